"""A seccomp-BPF filter of the system calls that a solution may make, built by hand (seccomp(2), bpf(4) of Linux).

Calls that are not in the list fail with EPERM: no sockets, execve, ptrace, namespaces, mounts, memfd, keyrings or
io_uring. Threads are allowed; processes only on request. Signals can be sent only to the own process.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

# Call numbers of the two supported machines: (x86_64, aarch64); None: the machine does not have the call.
CALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226),
    "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66),
    "access": (21, None), "pipe": (22, None), "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216),
    "madvise": (28, 233), "dup": (32, 23), "dup2": (33, None), "pause": (34, None), "nanosleep": (35, 101),
    "getitimer": (36, 102), "alarm": (37, None), "setitimer": (38, 103), "getpid": (39, 172), "exit": (60, 93),
    "wait4": (61, 260), "uname": (63, 160), "fsync": (74, 82), "fdatasync": (75, 83),
    "truncate": (76, 45), "ftruncate": (77, 46), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50),
    "rename": (82, None), "mkdir": (83, None), "rmdir": (84, None), "creat": (85, None), "unlink": (87, None),
    "readlink": (89, None), "umask": (95, 166), "gettimeofday": (96, 169), "getrlimit": (97, 163),
    "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176),
    "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173), "getpgrp": (111, None),
    "getgroups": (115, 158), "getresuid": (118, 148), "getresgid": (120, 150), "getpgid": (121, 155),
    "getsid": (124, 156), "sigaltstack": (131, 132), "getpriority": (140, 141), "gettid": (186, 178),
    "time": (201, None), "futex": (202, 98), "sched_getaffinity": (204, 123), "getdents64": (217, 61),
    "set_tid_address": (218, 96), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "epoll_wait": (232, None), "epoll_ctl": (233, 21),
    "waitid": (247, 95), "openat": (257, 56), "mkdirat": (258, 34), "newfstatat": (262, 79), "unlinkat": (263, 35),
    "renameat": (264, 38), "readlinkat": (267, 78), "faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73),
    "set_robust_list": (273, 99), "get_robust_list": (274, 100), "epoll_pwait": (281, 22), "eventfd2": (290, 19),
    "epoll_create1": (291, 20), "dup3": (292, 24), "pipe2": (293, 59), "renameat2": (316, 276),
    "getrandom": (318, 278), "statx": (332, 291), "rseq": (334, 293), "close_range": (436, 436),
    "faccessat2": (439, 439),
}  # fmt: skip
FORKS: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "setpgid": (109, 154), "setsid": (112, 157),
}  # fmt: skip
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


def supported() -> bool:
    return platform.machine() in ARCHITECTURES


def program(pid: int, *, processes: bool) -> list[Instruction]:
    """The filter for the process `pid`, as (code, jump if true, jump if false, k)."""
    column, architecture = ARCHITECTURES[platform.machine()]
    made = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER),
    ]
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


def install(libc: ctypes.CDLL, pid: int, *, processes: bool) -> None:
    """Confine this process permanently. It must have set no_new_privs before. Raises OSError."""
    instructions = program(pid, processes=processes)
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    filter_ = _Program(len(instructions), code)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter_), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")
