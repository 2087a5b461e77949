"""Supervising one job: a child that is confined and runs it, its outputs and its time.

The keeper is outside of the walls that the child is behind. It never looks into what the child says: bytes go to
whoever asked, up to a limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import program, seccomp, walls

HEADER = struct.Struct("!II")  # bytes of the header, bytes of all that follows it
STREAMS = ("reports", "stdout", "stderr")
CHUNK = 65536
SLOWEST_LOOK_S, FASTEST_LOOK_S = 0.1, 0.005  # at the child's CPU time
COUNTING_LOOK_S = 0.02  # at the number of its threads, which nothing else limits then
LAST_LOOK_S = 0.0005  # at a child that has closed its outputs, and has ended as a rule
# How a child ends whose program failed. A program may leave so too: it says nothing that pvg believes.
FAILED, NO_MEMORY = 82, 83
BEHIND = 4  # the child's descriptor for one byte, written behind the walls and closed before the program starts
# What the child may map beside its job's memory: code and data of the interpreter, stacks of threads.
THREADS = 16
HIGHEST_DESCRIPTOR = 4096  # the warden opens a handful


@dataclass(frozen=True)
class Walls:
    """What this machine's kernel gave. `landlock`: a descriptor of rules, None for none."""

    namespaces: bool
    landlock: int | None
    seccomp: bool
    base_bytes: int  # of address space that the interpreter takes; 0: unknown, and not limited


def read_exactly(descriptor: int, size: int) -> bytes:
    """Raises EOFError when whoever asks is gone."""
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
        walls.enter_job(limits["scratch_bytes"])
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
        # The child is dead, so that the byte is there or never comes. How it ended is no word of ours: programs end
        # as they like.
        ending.status = _status(ending.exit) if os.read(behind, 1) else "not confined"
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # where there are no namespaces; with them all are dead with the child
    header = {"status": ending.status, "exit": ending.exit, "cpu_s": ending.cpu_s, "wall_s": ending.wall_s}
    write_frame(answers, header, *(ending.outputs[name] for name in STREAMS))


# --- the child --------------------------------------------------------------------------------------------------------


def _confined(job: dict[str, Any], ends: Mapping[str, int], around: Walls) -> None:
    """In the child, which never returns."""
    status = FAILED
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY) if os.path.exists(os.devnull) else os.pipe()[0]
        held = (null, ends["stdout"], ends["stderr"], ends["reports"], ends["behind"])
        for place, descriptor in enumerate(held):
            os.dup2(descriptor, place + 20)  # above all that are in use below
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
        except BaseException as error:  # noqa: BLE001 - whatever a program raises is told, not ours to mend
            write_all(2, program.complaint(error).encode(errors="replace"))
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - told by the exit code, and there is no one above
        with contextlib.suppress(OSError):
            write_all(2, repr(error).encode(errors="replace"))
    finally:
        os._exit(status)


def _close_all_but(kept: set[int | None]) -> None:
    first = 0
    for descriptor in sorted(number for number in kept if number is not None):
        if first < descriptor:  # an empty range would be all of them
            os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, HIGHEST_DESCRIPTOR)


def _confine(limits: Mapping[str, Any], around: Walls) -> None:
    memory = around.base_bytes + limits["memory_bytes"] if around.base_bytes else 0
    tasks = 1 + limits["processes"] + THREADS if around.namespaces else None
    # Without a scratch folder of its own nothing is written to any file.
    walls.set_limits(limits["cpu_s"], memory, limits["scratch_bytes"] if around.namespaces else 0, tasks)
    if sys.platform != "linux":
        return
    walls.drop_privileges(namespaces=around.namespaces)
    if around.landlock is not None:
        walls.restrict_files(around.landlock)
        os.close(around.landlock)
    if around.seccomp:
        # Without namespaces a process that left its group would survive: then there are none.
        forks = bool(limits["processes"]) and around.namespaces
        seccomp.install(walls.libc, os.getpid(), processes=forks)


# --- watching ---------------------------------------------------------------------------------------------------------


@dataclass
class _Ending:
    status: str  # "": it ended by itself
    exit: int
    cpu_s: float
    wall_s: float
    outputs: dict[str, bytes]


def _watch(
    child: int, ends: Mapping[str, int], asked: int, limits: Mapping[str, Any], most_threads: int | None
) -> _Ending:
    """Until it ends, a limit is reached, or nobody waits for it any more. `most_threads`: None where the kernel keeps
    that limit."""
    started = time.monotonic()
    outputs = {name: bytearray() for name in STREAMS}
    names = {descriptor: name for name, descriptor in ends.items()}
    poller = select.poll()
    for descriptor in names:
        poller.register(descriptor, select.POLLIN)
    poller.register(asked, 0)  # hung up: whoever asked is gone
    left, status, ended = limits["output_bytes"], "", None
    slowest_s = SLOWEST_LOOK_S if most_threads is None else COUNTING_LOOK_S
    while ended is None and not status:
        spent_s = _cpu_s(child)
        if status := _limit_reached(child, spent_s, time.monotonic() - started, limits, most_threads):
            break
        if names:
            look_s = min(max((limits["cpu_s"] - spent_s) / 4, FASTEST_LOOK_S), slowest_s)
        else:  # a child that has closed its outputs may go on: it has until its time is over
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
    """The status of a child that is beyond a limit, "" of one that is not."""
    if spent_s > limits["cpu_s"]:
        return "timeout"
    if passed_s > limits["wall_s"]:
        return "stalled"
    return "threads" if most_threads is not None and threads_of(child) > most_threads else ""


def threads_of(pid: int) -> int:
    """How many threads a process has; 0 where the system does not tell, and for one that has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def _status(exit_: int) -> str:
    return {0: "ok", FAILED: "error", NO_MEMORY: "memory"}.get(exit_, "killed")


def _cpu_s(pid: int) -> float:
    """CPU seconds of a child and its threads so far (clock_getcpuclockid(3)); 0 where no such clock can be read."""
    if sys.platform != "linux":
        return 0.0
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:  # it has ended
        return 0.0
