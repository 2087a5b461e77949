"""`Sandbox`: runs programs written by a model such that they can do no harm, several at a time.

    with Sandbox("full", Limits(cpu_s=2.0)) as sandbox:
        execution = sandbox.run(Program.of_function("def f(x): return x + 1", "f", [[1], [2]]))
        executions = sandbox.run_many(programs)

Invariant: a program's outcome depends only on the program. It runs in a process that knows only its source and its
inputs, leaves nothing behind, and is limited by its CPU time.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pvg.errors import MissingRequirementError
from pvg.sandbox.isolation import MECHANISMS, WardenFailedError, WardenProcess, open_first_warden
from pvg.sandbox.records import DETERMINISTIC, CaseResult, Execution, Level, Limits, Program
from pvg.telemetry.waits import usable_cores

TAIL = 2000  # characters kept of a program's error output, bytes kept of its other output
LONGEST_SENTENCE = 200  # characters of an error message
CACHE_ENTRIES, CACHE_BYTES = 8192, 64 * 2**20
ENTRY_BYTES = 1024  # size of a cached execution without its parts
ATTEMPTS = 2  # a failed warden is replaced once per program


class Sandbox:
    """At most `workers` programs at once (None: one per core of this process). Methods may be called from any thread.
    `mechanisms`: the ones that may be used, so that tests can test one alone."""

    def __init__(
        self,
        level: Level = "full",
        limits: Limits | None = None,
        *,
        workers: int | None = None,
        cache_entries: int = CACHE_ENTRIES,
        cache_bytes: int = CACHE_BYTES,
        mechanisms: Collection[str] = MECHANISMS,
    ) -> None:
        """Raises MissingRequirementError if this machine cannot provide `level`."""
        self.limits = limits or Limits()
        self._offered = frozenset(mechanisms)
        first, self.isolation = open_first_warden(level, self._offered)
        self._python = first.python
        self._wardens = _Wardens(first, self._offered)
        self._pool = ThreadPoolExecutor(workers or usable_cores(), "pvg-sandbox")
        self._cache = _Cache(cache_entries, cache_bytes)
        self._closed = weakref.finalize(self, _close, self._pool, self._wardens)

    def run(self, program: Program, limits: Limits | None = None) -> Execution:
        """Raises MissingRequirementError if the sandbox itself fails twice, instead of inventing a verdict."""
        return self.run_many([program], limits)[0]

    def run_many(
        self, programs: Sequence[Program], limits: Limits | None = None, *, fresh: bool = False
    ) -> list[Execution]:
        """Run in parallel; a repeated program runs once. `fresh`: run each one, ignoring the cache."""
        chosen = limits or self.limits
        of_program: dict[Program, Future[Execution]] = {}
        waiting: list[Future[Execution]] = []
        try:
            for program in programs:
                if fresh:
                    waiting.append(self._submit(program, chosen, fresh=True))
                else:
                    if program not in of_program:
                        of_program[program] = self._submit(program, chosen)
                    waiting.append(of_program[program])
            return [future.result() for future in waiting]
        except BaseException:  # the other results are no longer needed
            for future in waiting:
                future.cancel()
            raise

    def close(self) -> None:
        """End all processes. Waiting programs are cancelled, and running ones fail."""
        self._closed()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, program: Program, limits: Limits, *, fresh: bool = False) -> Future[Execution]:
        if fresh:
            return self._pool.submit(_execute, self._wardens, program, limits)
        key = program.digest(limits, self._python)
        if (known := self._cache.get(key)) is not None:
            done: Future[Execution] = Future()
            done.set_result(known.execution(program))
            return done
        return self._pool.submit(_execute_once, self._wardens, self._cache, key, program, limits)


class _Wardens:
    """The idle and the busy wardens; starts another one if all are busy."""

    def __init__(self, first: WardenProcess, offered: frozenset[str]) -> None:
        self._made_of, self._offered = (first.walls, first.unlimited), offered
        self._idle, self._busy = [first], set[WardenProcess]()
        self._closed = False
        self._lock = threading.Lock()

    def take(self) -> WardenProcess:
        """An idle warden or a new one. Raises WardenFailedError if it cannot start, if it has less isolation than the
        first one, which passed the trial, or if the sandbox is closed."""
        with self._lock:
            if self._idle and not self._closed:
                self._busy.add(warden := self._idle.pop())
                return warden
        return self.start()

    def start(self) -> WardenProcess:
        if self._closed:
            raise WardenFailedError("it was closed")
        warden = WardenProcess(self._offered)
        with self._lock:
            self._busy.add(warden)
            closed = self._closed
        if closed or (warden.walls, warden.unlimited) != self._made_of:
            self.drop(warden)
            why = "it was closed" if closed else f"a second one got {sorted(warden.walls)}, the first one more"
            raise WardenFailedError(why)
        return warden

    def give_back(self, warden: WardenProcess) -> None:
        with self._lock:
            self._busy.discard(warden)
            self._idle.append(warden)

    def drop(self, warden: WardenProcess) -> None:
        with self._lock:
            self._busy.discard(warden)
        warden.close()

    def stop(self) -> None:
        """Kill the busy ones, so that their users see them fail, and start no others."""
        with self._lock:
            self._closed = True
            for warden in self._busy:
                warden.kill()

    def close(self) -> None:
        """Call it after `stop`, when the users have ended."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()


@dataclass(frozen=True, slots=True)
class _Answer:
    """A warden's answer for a program, which takes a tenth of an Execution's memory."""

    header: dict[str, Any]
    parts: list[bytes]

    @property
    def size(self) -> int:
        return ENTRY_BYTES + sum(map(len, self.parts))

    def execution(self, program: Program) -> Execution:
        return _execution(program, self.header, self.parts)


class _Cache:
    """The outcomes of the latest programs: at most `entries`, with at most `most_bytes` in total. Thread-safe."""

    def __init__(self, entries: int, most_bytes: int) -> None:
        self._entries, self._most_bytes, self.bytes = entries, most_bytes, 0
        self._found: OrderedDict[str, _Answer] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> _Answer | None:
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
            return self._found.get(key)

    def keep(self, key: str, answer: _Answer) -> None:
        with self._lock:
            before = self._found.pop(key, None)
            self._found[key] = answer
            self.bytes += answer.size - (before.size if before else 0)
            while self._found and (len(self._found) > self._entries or self.bytes > self._most_bytes):
                self.bytes -= self._found.popitem(last=False)[1].size


def _close(pool: ThreadPoolExecutor, wardens: _Wardens) -> None:
    pool.shutdown(wait=False, cancel_futures=True)
    wardens.stop()
    pool.shutdown(wait=True)
    wardens.close()


def _execute_once(wardens: _Wardens, cache: _Cache, key: str, program: Program, limits: Limits) -> Execution:
    """Runs in a thread of the pool."""
    known = cache.get(key)  # it may have been computed while this call waited
    if known is None:
        known = _answer(wardens, program, limits)
        if known.header["status"] in DETERMINISTIC:
            cache.keep(key, known)
    return known.execution(program)


def _execute(wardens: _Wardens, program: Program, limits: Limits) -> Execution:
    return _answer(wardens, program, limits).execution(program)


def _answer(wardens: _Wardens, program: Program, limits: Limits) -> _Answer:
    for attempt in range(ATTEMPTS):
        try:
            warden = wardens.start() if attempt else wardens.take()  # after a failure, idle ones may be dead too
            try:
                header, (reports, stdout, stderr) = warden.run(program, limits)
            except BaseException:
                wardens.drop(warden)
                raise
        except (WardenFailedError, OSError) as error:
            if attempt == ATTEMPTS - 1:
                raise MissingRequirementError(
                    f"The sandbox fails: {error}.", "Check that this machine has free processes and memory."
                ) from None
        else:
            wardens.give_back(warden)
            break
    return _Answer(header, [reports, stdout[-TAIL:], stderr[-4 * TAIL :]])  # a character has at most four bytes


def _execution(program: Program, header: dict[str, Any], parts: list[bytes]) -> Execution:
    reports, stdout, stderr = (part.decode(errors="replace") for part in parts)
    said = stderr[-TAIL:]
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
    """A line from the program's process. It may be anything, because the program can write there too."""
    try:
        kind, found = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return CaseResult(error="its report cannot be read")
    if kind == "value":
        return CaseResult(value=found)
    sentence = _sentence(found) if isinstance(found, str) else ""
    return CaseResult(error=sentence or "its report cannot be read")


def _sentence(text: str) -> str:
    """A printable message: a program's text may have broken characters and terminal control sequences."""
    whole = text[:LONGEST_SENTENCE].encode(errors="replace").decode()
    return "".join(character if character.isprintable() else " " for character in whole).strip()


def _why_missing(status: str, said: str) -> str:
    return {
        "ok": "it ended early",
        "error": _sentence(said.strip().rpartition("\n")[2]) or "it failed",
        "timeout": "its CPU time was used up",
        "stalled": "it waited for too long",
        "memory": "its memory was used up",
        "output": "it wrote too much",
        "threads": "it started too many threads",
    }.get(status, "it crashed or left early")
