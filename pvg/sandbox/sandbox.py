"""`Sandbox`: programs that a model wrote, run where they can do no harm, several at a time.

    with Sandbox("full", Limits(cpu_s=2.0)) as sandbox:
        execution = sandbox.run(Program.of_function("def f(x): return x + 1", "f", [[1], [2]]))
        executions = sandbox.run_many(programs)
        execution = await sandbox.run_async(program)        # the event loop stays free

Invariant: a program's outcome is its own. It runs in a process that knows nothing but its source and its inputs, that
leaves nothing behind, and whose CPU time is what counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from pvg.errors import MissingRequirementError
from pvg.sandbox.isolation import MECHANISMS, open_first_warden
from pvg.sandbox.records import DETERMINISTIC, CaseResult, Execution, Level, Limits, Program
from pvg.sandbox.warden_process import WardenFailedError, WardenProcess

STDERR_TAIL = 2000  # characters kept of what a program complains
CACHE_ENTRIES = 8192
ATTEMPTS = 2  # a warden that fails is replaced once per program


class Sandbox:
    """At most `workers` programs at once (None: as many as this process has cores). All methods may be called from any
    thread. `mechanisms`: those that may be used; a test of one of them leaves out the others."""

    def __init__(
        self,
        level: Level = "full",
        limits: Limits | None = None,
        *,
        workers: int | None = None,
        cache_entries: int = CACHE_ENTRIES,
        mechanisms: Collection[str] = MECHANISMS,
    ) -> None:
        """Raises MissingRequirementError where this machine cannot give `level`."""
        self.limits = limits or Limits()
        self._offered = frozenset(mechanisms)
        first, self.isolation = open_first_warden(level, self._offered)
        self._python = first.python
        self._wardens = _Wardens(first, self._offered)
        self._pool = ThreadPoolExecutor(workers or _cores(), "pvg-sandbox")
        self._cache = _Cache(cache_entries)
        self._closed = weakref.finalize(self, _close, self._pool, self._wardens)

    def run(self, program: Program, limits: Limits | None = None) -> Execution:
        """Raises MissingRequirementError when the sandbox itself fails twice: no verdict is made up."""
        return self._submit(program, limits or self.limits).result()

    def run_many(self, programs: Sequence[Program], limits: Limits | None = None) -> list[Execution]:
        """Side by side; one that comes twice is run once."""
        submitted: dict[Program, Future[Execution]] = {}
        for program in programs:
            if program not in submitted:
                submitted[program] = self._submit(program, limits or self.limits)
        return [submitted[program].result() for program in programs]

    async def run_async(self, program: Program, limits: Limits | None = None) -> Execution:
        """A caller that is cancelled leaves a program that is running to its end."""
        return await asyncio.wrap_future(self._submit(program, limits or self.limits))

    def close(self) -> None:
        """Wait for what is running, and end all processes."""
        self._closed()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, program: Program, limits: Limits) -> Future[Execution]:
        key = program.digest(limits, self._python)
        if (known := self._cache.get(key)) is not None:
            done: Future[Execution] = Future()
            done.set_result(known)
            return done
        return self._pool.submit(_execute, self._wardens, self._cache, key, program, limits)


class _Wardens:
    """Those that are idle; more are started when all are busy."""

    def __init__(self, first: WardenProcess, offered: frozenset[str]) -> None:
        self._given, self._offered = first.given, offered
        self._idle = [first]
        self._lock = threading.Lock()

    def take(self) -> WardenProcess:
        """One that is idle, or else a new one. Raises WardenFailedError, also for one with fewer walls than the first,
        which was tried."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self.start()

    def start(self) -> WardenProcess:
        warden = WardenProcess(self._offered)
        if warden.given != self._given:
            warden.close()
            raise WardenFailedError(f"a second one got {sorted(warden.given)} instead of {sorted(self._given)}")
        return warden

    def give_back(self, warden: WardenProcess) -> None:
        with self._lock:
            self._idle.append(warden)

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop().close()


class _Cache:
    """The outcomes of the programs that were run last. Bounded, safe for threads."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._found: OrderedDict[str, Execution] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> Execution | None:
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
            return self._found.get(key)

    def keep(self, key: str, execution: Execution) -> None:
        with self._lock:
            self._found[key] = execution
            while len(self._found) > self._entries:
                self._found.popitem(last=False)


def _close(pool: ThreadPoolExecutor, wardens: _Wardens) -> None:
    pool.shutdown(wait=True)
    wardens.close()


def _execute(wardens: _Wardens, cache: _Cache, key: str, program: Program, limits: Limits) -> Execution:
    """In a thread of the pool."""
    if (known := cache.get(key)) is not None:  # made while this waited
        return known
    for attempt in range(ATTEMPTS):
        try:
            warden = wardens.start() if attempt else wardens.take()  # the idle ones may be dead too
            try:
                header, parts = warden.run(program, limits)
            except BaseException:
                warden.close()
                raise
        except (WardenFailedError, OSError) as error:
            if attempt == ATTEMPTS - 1:
                raise MissingRequirementError(
                    f"The sandbox fails: {error}.", "See whether this machine has processes and memory left."
                ) from None
        else:
            wardens.give_back(warden)
            break
    execution = _execution(program, header, parts)
    if execution.status in DETERMINISTIC:
        cache.keep(key, execution)
    return execution


def _execution(program: Program, header: dict[str, Any], parts: list[bytes]) -> Execution:
    reports, stdout, stderr = (part.decode(errors="replace") for part in parts)
    said = stderr[-STDERR_TAIL:]
    missing = CaseResult(error=_why_missing(header["status"], said))
    cases = [_case(line) for line in reports.split("\n")[: len(program.cases)] if line]
    return Execution(
        status=header["status"],
        cases=tuple(cases + [missing] * (len(program.cases) - len(cases))),
        stdout=stdout,
        stderr=said,
        exit=header["exit"],
        cpu_s=header["cpu_s"],
        wall_s=header["wall_s"],
    )


def _case(line: str) -> CaseResult:
    """What the program's process reported: anything at all, for the program may write there too."""
    try:
        kind, found = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return CaseResult(error="its report cannot be read")
    if kind == "value":
        return CaseResult(value=found)
    return CaseResult(error=found if isinstance(found, str) and found else "its report cannot be read")


def _why_missing(status: str, said: str) -> str:
    return {
        "ok": "it ended early",
        "error": said.strip().rpartition("\n")[2] or "it failed",
        "timeout": "its CPU time was used up",
        "stalled": "it waited for too long",
        "memory": "its memory was used up",
        "output": "it wrote too much",
    }.get(status, "it crashed or left early")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
