"""The confinement of a solution: namespaces with a private root, Landlock, no privileges, limits.

Every function raises OSError if the kernel refuses. Sources: namespaces(7), pivot_root(2), user_namespaces(7),
landlock(7), capabilities(7) of Linux.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import tomllib
from collections.abc import Sequence

# A seccomp-BPF filter of the system calls that a solution may make, built by hand (seccomp(2), bpf(4) of Linux).

with open(os.path.join(os.path.dirname(__file__), "system_calls.toml"), "rb") as table:
    # By name; of the second machine None if it does not have the call.
    CALLS, FORKS = (
        {name: (numbers[0], numbers[1] if len(numbers) > 1 else None) for name, numbers in found.items()}
        for found in tomllib.load(table).values()
    )
# Calls that are allowed depending on an argument.
CLONE, CLONE3, KILL, TGKILL, IOCTL, PRLIMIT = (56, 220), (435, 435), (62, 129), (234, 131), (16, 29), (302, 261)
FCNTL = (72, 25)

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH
X32_BIT = 0x40000000  # an x86_64 kernel has the x32 calls under other numbers

CLONE_THREAD = 0x00010000
CLONE_NAMESPACES = 0x7E020080
# Commands of fcntl that are allowed: F_DUPFD to F_SETLKW, and F_DUPFD_CLOEXEC. Higher ones include F_SETOWN and
# F_SETSIG, with which the kernel sends any signal to any process when a descriptor is ready, and leases and notices,
# which also send signals.
LAST_PLAIN_FCNTL, DUPFD_CLOEXEC = 7, 1030
HARMLESS_IOCTLS = (0x5401, 0x5451, 0x5450, 0x541B)  # TCGETS (isatty), FIOCLEX, FIONCLEX, FIONREAD

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, DENY, UNKNOWN, KILL_PROCESS = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; little-endian machines only

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2

Instruction = tuple[int, int, int, int]


def filter_program(pid: int, *, processes: bool) -> list[Instruction]:
    """The filter for the process `pid`, as (code, jump if true, jump if false, k)."""
    column, architecture = ARCHITECTURES[platform.machine()]
    made = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL_PROCESS), (LOAD, 0, 0, NUMBER)]
    if column == 0:
        made += [(AT_LEAST, 0, 1, X32_BIT), (RETURN, 0, 0, KILL_PROCESS)]
    for numbers in (CALLS | FORKS if processes else CALLS).values():
        if (number := numbers[column]) is not None:
            made += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    own = [(EQUAL, 0, 1, pid), (RETURN, 0, 0, ALLOW)]
    unless_namespace = [(ANY_BIT, 1, 0, CLONE_NAMESPACES), (RETURN, 0, 0, ALLOW)]
    only_thread = [(ANY_BIT, 2, 0, CLONE_NAMESPACES), (ANY_BIT, 0, 1, CLONE_THREAD), (RETURN, 0, 0, ALLOW)]
    harmless: list[Instruction] = []
    for request in HARMLESS_IOCTLS:
        harmless += [(EQUAL, 0, 1, request), (RETURN, 0, 0, ALLOW)]
    plain_fcntl = [
        (AT_LEAST, 1, 0, LAST_PLAIN_FCNTL + 1),
        (RETURN, 0, 0, ALLOW),
        (EQUAL, 0, 1, DUPFD_CLOEXEC),
        (RETURN, 0, 0, ALLOW),
    ]
    for call, argument, tests in (
        (FCNTL, 1, plain_fcntl),
        (KILL, 0, own),
        (TGKILL, 0, own),
        (CLONE, 0, unless_namespace if processes else only_thread),
        (IOCTL, 1, harmless),
    ):
        made += _of_argument(call[column], argument, tests)
    # Limits may be read but not set: the pointer to new limits must be null, in both halves.
    high = ARGUMENTS + 8 * 2 + 4
    made += _of_argument(
        PRLIMIT[column], 2, [(EQUAL, 0, 3, 0), (LOAD, 0, 0, high), (EQUAL, 0, 1, 0), (RETURN, 0, 0, ALLOW)]
    )
    # glibc then creates threads with clone, whose flags are not behind a pointer and can be checked.
    return [*made, (EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, UNKNOWN), (RETURN, 0, 0, DENY)]


def _of_argument(number: int, argument: int, tests: list[Instruction]) -> list[Instruction]:
    """`tests` on the lower half of an argument of one call; denies the call if no test accepts it."""
    body = [(LOAD, 0, 0, ARGUMENTS + 8 * argument), *tests, (RETURN, 0, 0, DENY)]
    return [(EQUAL, 0, len(body), number), *body]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install_filter(libc: ctypes.CDLL, pid: int, *, processes: bool) -> None:
    """Confine this process permanently. It must have set no_new_privs before. Raises OSError."""
    instructions = filter_program(pid, processes=processes)
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    filter_ = _Program(len(instructions), code)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter_), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


libc = ctypes.CDLL(None, use_errno=True)

# Landlock checks the folder above a mount point, not the folder that the mount covers.
SCRATCH = "/scratch"
JOB = "/scratch/job"
# Folders in the standard library's folder that contain other packages, possibly pvg.
NOT_LIBRARY = frozenset({"site-packages", "dist-packages"})
INNER_ID = 1000  # user and group inside; outside, the user who started pvg, or NOBODY for root
NOBODY = 65534

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
SIGKILL = 9
CALL_NUMBERS = {"x86_64": {"pivot_root": 155, "capset": 126}, "aarch64": {"pivot_root": 41, "capset": 91}}
LAST_CAPABILITY = 63  # the kernel rejects unknown ones


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _call(name: str, *arguments: object) -> int:
    return _checked(libc.syscall(CALL_NUMBERS[platform.machine()][name], *arguments), name)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _checked(libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]), f"mount {target}")


# --- namespaces -------------------------------------------------------------------------------------------------------


def enter_namespaces(readable: Sequence[str]) -> None:
    """Enter new user, mount, network, IPC and host name namespaces, with a file system of the `readable` folders
    (read-only, at their own paths) and an empty SCRATCH. Only for a process with one thread."""
    uid, gid = os.getuid(), os.getgid()
    ready, mapped = os.pipe()
    done, confirm = os.pipe()
    mapper = os.fork()
    if mapper == 0:  # this child stays outside, where it may map other users
        status = 1
        try:
            os.close(mapped)
            os.close(done)
            if os.read(ready, 1):
                _map_users(os.getppid(), uid, gid)
                os.write(confirm, b"+")
                status = 0
        finally:
            os._exit(status)
    os.close(ready)
    os.close(confirm)
    try:
        _checked(libc.unshare(NEWUSER | NEWNS | NEWNET | NEWIPC | NEWUTS), "unshare")
        os.write(mapped, b"+")
        if os.read(done, 1) != b"+":
            raise OSError(1, "the user namespace's users cannot be mapped")
    finally:
        os.close(mapped)
        os.close(done)
        os.waitpid(mapper, 0)
    _change_root(readable)
    _checked(libc.sethostname(b"sandbox", 7), "sethostname")


def _map_users(pid: int, uid: int, gid: int) -> None:
    """For root: root stays root inside for the setup, and solutions run as nobody. For any other user: only INNER_ID
    exists inside."""
    with open(f"/proc/{pid}/setgroups", "w") as file:
        file.write("allow" if uid == 0 else "deny")
    for name, own in (("uid_map", uid), ("gid_map", gid)):
        lines = f"0 0 1\n{INNER_ID} {NOBODY} 1\n" if uid == 0 else f"{INNER_ID} {own} 1\n"
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(lines)


def _change_root(readable: Sequence[str]) -> None:
    new = "/tmp" if os.path.isdir("/tmp") else "/mnt"  # covered by the new root, and removed with the old one
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    # The content of `new` is hidden from here on, so open the folders before.
    held = [os.open(folder, os.O_PATH | os.O_DIRECTORY) for folder in readable]
    _mount("tmpfs", new, "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,nr_inodes=1k,mode=755")
    os.makedirs(new + JOB, 0o755)
    for folder, descriptor in zip(readable, held, strict=True):
        target = new + folder
        os.makedirs(target, 0o755, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", target, None, MS_BIND)
        os.close(descriptor)
        for hidden in NOT_LIBRARY.intersection(os.listdir(target)):
            _mount("tmpfs", f"{target}/{hidden}", "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "size=4k")
        # Flags that the mount already has are locked in a user namespace, so request them again.
        _mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | _flags(target))
    os.chdir(new)
    _call("pivot_root", b".", b".")
    _checked(libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")
    _mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _flags(path: str) -> int:
    """The flags of a mount for mount(2); statvfs(3) uses the same numbers for the lower ones."""
    found = os.statvfs(path).f_flag
    kept = found & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for asked, there in ((1 << 10, 1024), (1 << 11, 2048), (1 << 21, 4096)):  # noatime, nodiratime, relatime
        kept |= asked if found & there else 0
    return kept


def enter_job(scratch_bytes: int) -> None:
    """Enter the namespaces of one job. The next child is the first process of a tree that dies with it, and everything
    written or shared disappears with it."""
    _checked(libc.unshare(NEWPID | NEWNS | NEWIPC), "unshare")
    _mount("tmpfs", JOB, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, f"size={scratch_bytes},nr_inodes=256,mode=777")
    os.chdir(JOB)


# --- Landlock ---------------------------------------------------------------------------------------------------------

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on all machines
READ_FILE, READ_DIR = 1 << 2, 1 << 3
# Write, truncate, make and remove plain files and folders.
CHANGE = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 14
FILE_RIGHTS_OF_ABI = {1: 13, 2: 14, 3: 15, 4: 15}  # how many of the lowest bits; 16 from 5 on
TRUNCATES_FROM = 3  # with older ABIs, a file outside could be truncated


def landlock_abi() -> int:
    """The kernel's version of Landlock. Raises OSError without Landlock."""
    return _checked(libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1), "landlock")


def rules_of_files(abi: int, readable: Sequence[str], *, scratch: bool) -> int:
    """A descriptor of rules for `restrict_files`: only the interpreter's files can be read, and with `scratch` files in
    SCRATCH can be changed. If the ABI supports it, TCP ports and processes outside are blocked too."""
    rights = (1 << FILE_RIGHTS_OF_ABI.get(abi, 16)) - 1
    attributes = struct.pack("QQQ", rights, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    attributes = attributes[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = _checked(
        libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock_create_ruleset"
    )
    for folder in readable:
        for name in sorted(set(os.listdir(folder)) - NOT_LIBRARY):
            path = f"{folder}/{name}"
            if os.path.islink(path):  # in some distributions links point outside, or to nothing
                continue
            _allow(rules, path, READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE)
    if scratch:
        _allow(rules, SCRATCH, (READ_FILE | READ_DIR | CHANGE) & rights)
    return rules


def _allow(rules: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH)
    try:
        _checked(libc.syscall(ADD_RULE, rules, 1, struct.pack("=Qi", rights, place), 0), "landlock_add_rule")
    finally:
        os.close(place)


def restrict_files(rules: int) -> None:
    """Apply `rules` to this process. It must have set no_new_privs before."""
    _checked(libc.syscall(RESTRICT_SELF, rules, 0), "landlock_restrict_self")


# --- privileges and limits --------------------------------------------------------------------------------------------


def drop_privileges(*, namespaces: bool) -> None:
    """Drop all capabilities and ways to get them, and hide this process's memory. With namespaces and as root, become
    the user nobody."""
    if namespaces:
        for capability in range(LAST_CAPABILITY + 1):
            if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
                break
        if os.getuid() == 0:
            os.setgroups([])
            os.setresgid(INNER_ID, INNER_ID, INNER_ID)
            os.setresuid(INNER_ID, INNER_ID, INNER_ID)
    _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))  # version 3: two words of each of three sets
    _checked(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
    _checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    die_with_parent()


def die_with_parent() -> None:
    _checked(libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "prctl")


def set_limits(cpu_s: float, memory_bytes: int, file_bytes: int, processes: int | None) -> None:
    """Set hard limits of this process. `processes`: limit for its user; None if the user has other processes."""
    limits = {
        resource.RLIMIT_CPU: int(cpu_s) + 2,  # a fallback: the keeper counts more precisely and acts first
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if memory_bytes:
        limits[resource.RLIMIT_AS] = memory_bytes
    if processes is not None:
        limits[resource.RLIMIT_NPROC] = processes
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (least, least))
