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
import select
import signal
import sys
import sysconfig
from collections.abc import Callable

from . import seccomp, walls
from .keeper import Walls, keep, threads_of, write_frame

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
    if not seccomp.supported():
        raise OSError(0, "pvg has no list of system calls for this machine")

    def trial() -> None:
        walls.libc.prctl(walls.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        seccomp.install(walls.libc, os.getpid(), processes=False)

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
