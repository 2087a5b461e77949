"""The confinement of a solution: namespaces with a private root, Landlock, no privileges, limits.

Every function raises OSError if the kernel refuses. Sources: namespaces(7), pivot_root(2), user_namespaces(7),
landlock(7), capabilities(7) of Linux.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Sequence

libc = ctypes.CDLL(None, use_errno=True)

# Landlock checks the folder above a mount point, not the folder that the mount covers.
SCRATCH = "/scratch"
JOB = "/scratch/job"
# Folders in the standard library's folder that contain other packages, possibly pvg.
NOT_LIBRARY = frozenset({"site-packages", "dist-packages"})
INNER_ID = 1000  # user and group inside; outside, the user who started pvg, or NOBODY for root
NOBODY = 65534

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
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
