"""The sandbox's process: builds the confinement that all jobs share, reports it, and forks a keeper for each job.

    python -s -S -P -B -c '... from inside.warden import main; main()' FOLDERS OFFERED

`main` gets the interpreter's folders and the mechanisms to use as JSON. It waits for jobs on its standard input until
that ends; frames go to its standard output. It never reads a job itself: keepers read and write.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import platform
import select
import signal
import struct
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import program, walls

# Supervises one job: the confined child that runs it, the child's outputs and its time.

HEADER = struct.Struct("!II")  # bytes of the header, bytes of everything after it
STREAMS = ("reports", "stdout", "stderr")
CHUNK = 65536
SLOWEST_LOOK_S, FASTEST_LOOK_S = 0.1, 0.005  # between two looks at the child's CPU time
COUNTING_LOOK_S = 0.02  # between two counts of its threads, if nothing else limits them
LAST_LOOK_S = 0.0005  # between two looks at a child that has closed its outputs and usually has ended
# Exit codes of a child whose program failed. A program may choose them too, so pvg concludes nothing from them.
FAILED, NO_MEMORY = 82, 83
BEHIND = 4  # the child's descriptor for one byte, written when it is confined and closed before the program starts
# The memory that the child may map in addition to its job's: code and data of the interpreter, stacks of threads.
THREADS = 16
HIGHEST_DESCRIPTOR = 4096  # the warden opens a handful


@dataclass(frozen=True)
class Walls:
    """The isolation that this machine's kernel provides. `landlock`: a descriptor of rules, or None."""

    namespaces: bool
    landlock: int | None
    seccomp: bool
    base_bytes: int  # address space of the interpreter; 0: unknown, so address space is not limited


def read_exactly(descriptor: int, size: int) -> bytes:
    """Raises EOFError if the other end is closed."""
    data = b""
    while len(data) < size:
        part = os.read(descriptor, size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_frame(descriptor: int, header: Mapping[str, Any], *parts: bytes) -> None:
    encoded = json.dumps({**header, "parts": [len(part) for part in parts]}).encode()
    write_all(descriptor, HEADER.pack(len(encoded), sum(map(len, parts))) + encoded + b"".join(parts))


def keep(asked: int, answers: int, around: Walls) -> None:
    """Read a job from the descriptor `asked`, run it, and write a frame to `answers`."""
    (size,) = struct.unpack("!I", read_exactly(asked, 4))
    job = json.loads(read_exactly(asked, size))
    limits = job["limits"]
    if around.namespaces:
        walls.enter_job(limits["scratch_kb"] * 2**10)
    pipes = {name: os.pipe() for name in (*STREAMS, "behind")}
    for reading, _ in pipes.values():
        os.set_blocking(reading, False)
    child = os.fork()
    if child == 0:
        _confined(job, {name: writing for name, (_, writing) in pipes.items()}, around)
    for _, writing in pipes.values():
        os.close(writing)
    behind = pipes.pop("behind")[0]
    most = None if around.namespaces else 1 + THREADS
    ending = _watch(child, {name: reading for name, (reading, _) in pipes.items()}, asked, limits, most)
    if not ending.status:
        # The child is dead, so the byte is there or never comes. The exit code alone proves nothing, because programs
        # choose it.
        told = {0: "ok", FAILED: "error", NO_MEMORY: "memory"}
        ending.status = told.get(ending.exit, "killed") if os.read(behind, 1) else "not confined"
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # needed without namespaces; with them all die with the child
    header = {"status": ending.status, "exit": ending.exit, "cpu_s": ending.cpu_s, "wall_s": ending.wall_s}
    write_frame(answers, header, *(ending.outputs[name] for name in STREAMS))


# --- the child --------------------------------------------------------------------------------------------------------


def _confined(job: dict[str, Any], ends: Mapping[str, int], around: Walls) -> None:
    """Runs in the child and never returns."""
    status = FAILED
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY) if os.path.exists(os.devnull) else os.pipe()[0]
        held = (null, ends["stdout"], ends["stderr"], ends["reports"], ends["behind"])
        for place, descriptor in enumerate(held):
            os.dup2(descriptor, place + 20)  # above all descriptors that are assigned below
        for place in range(len(held)):
            os.dup2(place + 20, place)
        _close_all_but({*range(len(held)), around.landlock})
        _confine(job["limits"], around)
        os.write(BEHIND, b"+")
        os.close(BEHIND)
        try:
            program.run(job, 3)
            status = 0
        except MemoryError:
            status = NO_MEMORY
        except SystemExit as leaving:
            status = 0 if leaving.code in (None, 0) else FAILED
        except BaseException as error:  # noqa: BLE001 - reports whatever the program raises
            write_all(2, program.complaint(error).encode(errors="replace"))
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - the exit code reports it, and there is no caller
        with contextlib.suppress(OSError):
            write_all(2, repr(error).encode(errors="replace"))
    finally:
        os._exit(status)


def _close_all_but(kept: set[int | None]) -> None:
    first = 0
    for descriptor in sorted(number for number in kept if number is not None):
        if first < descriptor:  # closerange would take an empty range as everything
            os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, HIGHEST_DESCRIPTOR)


def _confine(limits: Mapping[str, Any], around: Walls) -> None:
    memory = around.base_bytes + limits["memory_mb"] * 2**20 if around.base_bytes else 0
    tasks = 1 + limits["processes"] + THREADS if around.namespaces else None
    # Without a private scratch folder, the program may not write any file.
    walls.set_limits(limits["cpu_s"], memory, limits["scratch_kb"] * 2**10 if around.namespaces else 0, tasks)
    if sys.platform != "linux":
        return
    walls.drop_privileges(namespaces=around.namespaces)
    if around.landlock is not None:
        walls.restrict_files(around.landlock)
        os.close(around.landlock)
    if around.seccomp:
        # Without namespaces, a process that leaves its group would survive, so none are allowed.
        forks = bool(limits["processes"]) and around.namespaces
        walls.install_filter(walls.libc, os.getpid(), processes=forks)


# --- watching ---------------------------------------------------------------------------------------------------------


@dataclass
class _Ending:
    status: str  # "": it ended without reaching a limit
    exit: int
    cpu_s: float
    wall_s: float
    outputs: dict[str, bytes]


def _watch(
    child: int, ends: Mapping[str, int], asked: int, limits: Mapping[str, Any], most_threads: int | None
) -> _Ending:
    """Watch until the child ends, a limit is reached, or the caller has gone. `most_threads`: None if the kernel
    enforces that limit."""
    started = time.monotonic()
    outputs = {name: bytearray() for name in STREAMS}
    names = {descriptor: name for name, descriptor in ends.items()}
    poller = select.poll()
    for descriptor in names:
        poller.register(descriptor, select.POLLIN)
    poller.register(asked, 0)  # a hang-up means that the caller has gone
    left, status, ended = limits["output_kb"] * 2**10, "", None
    slowest_s = SLOWEST_LOOK_S if most_threads is None else COUNTING_LOOK_S
    while ended is None and not status:
        spent_s = _cpu_s(child)
        if status := _limit_reached(child, spent_s, time.monotonic() - started, limits, most_threads):
            break
        if names:
            look_s = min(max((limits["cpu_s"] - spent_s) / 4, FASTEST_LOOK_S), slowest_s)
        else:  # a child that has closed its outputs may continue until its time is over
            ended = _ended(child)
            look_s = 0.0
            if ended is None:
                time.sleep(LAST_LOOK_S)
        for descriptor, _ in poller.poll(look_s * 1e3):
            if descriptor == asked:
                status = "abandoned"
            elif data := os.read(descriptor, CHUNK):
                outputs[names[descriptor]] += data[: max(left, 0)]
                left -= len(data)
            else:
                poller.unregister(descriptor)
                del names[descriptor]
        status = status or ("output" if left < 0 else "")
    if ended is None:
        os.kill(child, signal.SIGKILL)
        ended = os.wait4(child, 0)
    _, waited, usage = ended
    spent_s = usage.ru_utime + usage.ru_stime
    return _Ending(
        status,
        os.waitstatus_to_exitcode(waited),
        spent_s,
        time.monotonic() - started,
        {name: bytes(data) for name, data in outputs.items()},
    )


def _ended(child: int) -> tuple[int, int, Any] | None:
    found = os.wait4(child, os.WNOHANG)
    return found if found[0] else None


def _limit_reached(
    child: int, spent_s: float, passed_s: float, limits: Mapping[str, Any], most_threads: int | None
) -> str:
    """The status of a child that has exceeded a limit, otherwise ""."""
    if spent_s > limits["cpu_s"]:
        return "timeout"
    if passed_s > limits["wall_s"]:
        return "stalled"
    return "threads" if most_threads is not None and threads_of(child) > most_threads else ""


def threads_of(pid: int) -> int:
    """The number of threads of a process; 0 if the system does not show it, and for an ended process."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def _cpu_s(pid: int) -> float:
    """CPU seconds of a child and its threads so far (clock_getcpuclockid(3)); 0 if the clock cannot be read."""
    if sys.platform != "linux":
        return 0.0
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:  # it has ended
        return 0.0


# Modules that programs often use, imported once so that each job has them in memory. `random` is seeded for each job.
COMMON = (  # noqa: SIM905
    "array base64 binascii bisect calendar cmath collections copy csv dataclasses datetime decimal enum fractions "
    "functools hashlib heapq io itertools json math numbers operator pprint queue random re statistics string struct "
    "sys textwrap threading time traceback typing zlib"
).split()


def main() -> None:
    readable, offered = json.loads(sys.argv[1]), frozenset(json.loads(sys.argv[2]))
    for name in COMMON:
        with contextlib.suppress(ImportError):  # an interpreter may be built without it
            importlib.import_module(name)
    base_bytes = _address_space()
    refused: dict[str, str] = {}
    namespaces = "namespaces" in offered and _granted("namespaces", refused, lambda: _enter(readable))
    rules = None
    if "landlock" in offered and _granted("landlock", refused, lambda: _try_landlock(readable, namespaces)):
        opened = walls.rules_of_files(walls.landlock_abi(), readable, scratch=namespaces)
        rules = fcntl.fcntl(opened, fcntl.F_DUPFD, ABOVE_STREAMS)
        os.close(opened)
    filter_ = "seccomp" in offered and _granted("seccomp", refused, _try_seccomp)
    around = Walls(namespaces, rules, filter_, base_bytes)
    gc.collect()
    gc.freeze()
    given = {"namespaces": namespaces, "landlock": rules is not None, "seccomp": filter_}
    names = [name for name, there in given.items() if there]
    unlimited = ([] if base_bytes else ["memory"]) + ([] if namespaces or _can_count_threads() else ["threads"])
    report = {"given": names, "refused": refused, "unlimited": unlimited, "python": sys.version.split()[0]}
    write_frame(1, {"status": "ready", **report})
    while True:
        select.select([0], [], [])
        keeper = os.fork()
        if keeper == 0:
            _as_keeper(around)
        _, waited = os.waitpid(keeper, 0)
        ended = os.waitstatus_to_exitcode(waited)
        if ended == CALLER_ENDED:
            return
        if ended:
            write_frame(1, {"status": "keeper failed", "exit": ended})


CALLER_ENDED = 84  # a keeper's exit code: the caller has gone
ABOVE_STREAMS = 64  # a descriptor above those of a job's streams


def _as_keeper(around: Walls) -> None:
    """Runs in the keeper and never returns."""
    status = 1
    try:
        if sys.platform == "linux":
            walls.die_with_parent()
        keep(0, 1, around)
        status = 0
    except (EOFError, BrokenPipeError):
        status = CALLER_ENDED
    except BaseException as error:  # noqa: BLE001 - printed, and reported by the exit code
        os.write(2, f"{error!r}\n".encode())
    finally:
        os._exit(status)


def _address_space() -> int:
    """Bytes of address space of this process, 0 if the system does not show it."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _can_count_threads() -> bool:
    """Whether a keeper can count the threads of a child that is hidden like a job's."""
    if sys.platform != "linux":
        return False
    hidden, ready = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            walls.die_with_parent()
            walls.libc.prctl(walls.PR_SET_DUMPABLE, 0, 0, 0, 0)
            os.write(ready, b"+")
            signal.pause()
        finally:
            os._exit(1)
    os.close(ready)
    os.read(hidden, 1)
    os.close(hidden)
    found = threads_of(child)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return found == 1


def _granted(name: str, refused: dict[str, str], trial: Callable[[], None]) -> bool:
    if sys.platform != "linux":
        refused[name] = "only Linux has it"
        return False
    try:
        trial()
    except OSError as error:
        refused[name] = str(error.strerror or error)
        return False
    return True


def _enter(readable: list[str]) -> None:
    """Enter the namespaces permanently. A child process tries first, so that this process never enters only some of
    them."""

    def trial() -> None:
        walls.enter_namespaces(readable)
        walls.enter_job(4096)

    _in_child(trial)
    walls.enter_namespaces(readable)


def _try_landlock(readable: list[str], namespaces: bool) -> None:
    abi = walls.landlock_abi()
    if abi < walls.TRUNCATES_FROM and not namespaces:
        raise OSError(0, f"its version {abi} does not protect files from truncation; {walls.TRUNCATES_FROM} is needed")

    def trial() -> None:
        walls.libc.prctl(walls.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        walls.restrict_files(walls.rules_of_files(abi, readable, scratch=namespaces))

    _in_child(trial)


def _try_seccomp() -> None:
    if platform.machine() not in walls.ARCHITECTURES:
        raise OSError(0, "pvg has no list of system calls for this machine")

    def trial() -> None:
        walls.libc.prctl(walls.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        walls.install_filter(walls.libc, os.getpid(), processes=False)

    _in_child(trial)


def _in_child(trial: Callable[[], object]) -> None:
    """Raises the OSError that `trial` raised in a child process."""
    child = os.fork()
    if child == 0:
        number = 255
        try:
            trial()
            number = 0
        except OSError as error:
            number = error.errno or 255
        finally:
            os._exit(number)
    number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if number:
        raise OSError(number, os.strerror(number) if 0 < number < 255 else "it failed")


def interpreter_folders() -> list[str]:
    """The folders that an interpreter like this one reads: its standard library."""
    found = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    return sorted(found)
