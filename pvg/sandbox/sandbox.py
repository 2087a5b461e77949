"""`Sandbox`: runs programs written by a model such that they can do no harm, several at a time.

Invariant: a program's outcome depends only on the program. It runs in a process that knows only its source and its
inputs, leaves nothing behind, and is limited by its CPU time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pvg.errors import Closing, MissingRequirementError, system_module
from pvg.telemetry.waits import usable_cores

# full: all guarantees of docs/sandbox.md, otherwise nothing runs. reduced: what this machine offers.
Level = Literal["full", "reduced"]
# ok: the program ran to its end, even if cases failed. error: it failed outside its cases. timeout: it used up its
# CPU time. stalled: it waited for longer than `wall_s`. memory, output, threads: it reached that limit. killed: it
# crashed or exited early, or was ended from outside.
Status = Literal["ok", "error", "timeout", "stalled", "memory", "output", "threads", "killed"]
# Statuses that do not depend on the machine's load. A timeout or a kill proves nothing about a program: the kernel also
# kills processes if memory is short.
DETERMINISTIC: frozenset[Status] = frozenset({"ok", "error", "output"})


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one execution, for all its cases together. `cpu_s` is the deciding one. `wall_s` is for programs that
    wait; it is far larger, so that a busy machine changes no verdict. `processes`: how many the program may start (0:
    only threads; more need namespaces). `scratch_kb`: for files, which are deleted afterwards."""

    cpu_s: float = 2.0
    wall_s: float = 30.0
    memory_mb: int = 256
    scratch_kb: int = 1024
    output_kb: int = 256
    processes: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """Python source and its cases. With `entry`, the name of a function (or of a method of a class `Solution`), a case
    is an argument list as a Python literal; without it, a case is a text for standard input."""

    source: str
    entry: str | None
    cases: tuple[str, ...]

    @classmethod
    def of_function(cls, source: str, entry: str, arguments: Sequence[Sequence[Any]]) -> Program:
        return cls(source, entry, tuple(repr(list(given)) for given in arguments))

    def digest(self, limits: Limits, python: str) -> str:
        """The digest of everything that determines the outcome. `python`: the interpreter's version."""
        content = json.dumps([self.source, self.entry, self.cases, asdict(limits), python])
        return hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class CaseResult:
    """`value` is plain data (pvg.sandbox.inside.program) if there is no `error`."""

    value: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Execution:
    """The result of a program. `cases` has a result for each of its cases. `stderr`: the end of its error output.
    `exit`: negative for a signal. `cpu_s` and `wall_s`: of this execution, or of the first one if it was cached."""

    status: Status
    cases: tuple[CaseResult, ...]
    stdout: str
    stderr: str
    exit: int
    cpu_s: float
    wall_s: float


# Determines by trial which isolation this machine offers, and whether it suffices.

START_S = 60.0  # an interpreter starts in a tenth of a second on an idle machine
GRACE_S = 60.0  # in addition to the wall-clock limit, which the keeper enforces
LONGEST_HEADER = 65536
PLACE = Path(__file__).parent
CODE = f"import sys; sys.path.insert(0, {str(PLACE)!r}); from inside.warden import main; main()"
# The order of sets depends on hashes: with a different seed in each process, a program would give different answers.
ENVIRONMENT = {"PYTHONHASHSEED": "0"}


class WardenFailedError(Exception):
    """The warden has ended or gives a wrong answer: a defect of pvg, or a machine without free resources."""


class WardenProcess:
    """Runs one job at a time. `given` and `refused` (name -> reason): which of the `offered` mechanisms it got.
    `unlimited`: what it cannot limit on this machine."""

    def __init__(self, offered: Collection[str]) -> None:
        """Raises WardenFailedError, and MissingRequirementError on a system other than Linux and macOS."""
        system_module("fcntl")
        from pvg.sandbox.inside.warden import interpreter_folders

        # Only the standard library: no user or site packages, no current directory, no bytecode files.
        command = [os.path.realpath(sys.executable), "-s", "-S", "-P", "-B", "-X", "utf8", "-c", CODE]
        self._process = subprocess.Popen(
            [*command, json.dumps(interpreter_folders()), json.dumps(sorted(offered))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
        try:
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
            header, _ = self._answer(time.monotonic() + START_S)
            self.walls = frozenset(header["given"])
            self.refused: dict[str, str] = header["refused"]
            self.unlimited = tuple(header["unlimited"])
            self.python: str = header["python"]
        except BaseException:
            self.close()
            raise

    def run(self, program: Program, limits: Limits) -> tuple[dict[str, Any], list[bytes]]:
        """The keeper's header, and the program's reports, output and error output. Raises WardenFailedError."""
        job = {"source": program.source, "entry": program.entry, "cases": program.cases, "limits": asdict(limits)}
        data = json.dumps(job).encode()
        deadline = time.monotonic() + limits.wall_s + GRACE_S
        self._write(struct.pack("!I", len(data)) + data, deadline)
        header, body = self._answer(deadline)
        if header["status"] in ("keeper failed", "not confined"):
            raise self._failure(f"{header['status']} ({body.decode(errors='replace')[-300:]})")
        parts, start = [], 0
        for size in header["parts"]:
            parts.append(body[start : start + size])
            start += size
        return header, parts

    def kill(self) -> None:
        """Kill it together with what it runs. A thread that waits for its answer sees it end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _write(self, data: bytes, deadline: float) -> None:
        assert self._process.stdin is not None
        descriptor, rest = self._process.stdin.fileno(), memoryview(data)
        waiting = select.poll()
        waiting.register(descriptor, select.POLLOUT)
        while rest:
            if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise self._failure("it does not accept jobs")
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:  # room for less than a page
                continue
            except OSError as error:
                raise self._failure(f"it does not accept jobs ({error.strerror})") from None

    def _answer(self, deadline: float) -> tuple[dict[str, Any], bytes]:
        from pvg.sandbox.inside.warden import HEADER

        header_size, body_size = HEADER.unpack(self._read(HEADER.size, deadline))
        if header_size > LONGEST_HEADER:
            raise self._failure("its answer has the wrong form")
        header = json.loads(self._read(header_size, deadline))
        return header, self._read(body_size, deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor, data = self._process.stdout.fileno(), b""
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        while len(data) < size:
            if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise self._failure("it does not answer")
            part = os.read(descriptor, size - len(data))
            if not part:
                raise self._failure("it has ended")
            data += part
        return data

    def _failure(self, what: str) -> WardenFailedError:
        stderr = ""
        if self._process.stderr is not None:
            os.set_blocking(self._process.stderr.fileno(), False)
            with contextlib.suppress(OSError):
                stderr = (self._process.stderr.read() or b"").decode(errors="replace").strip()[-500:]
        return WardenFailedError(f"the sandbox's process failed: {what}{': ' if stderr else ''}{stderr}")


MECHANISMS = frozenset({"namespaces", "landlock", "seccomp"})
REMEDY = (
    "Run on a machine that offers it (a container needs user namespaces or Landlock, and seccomp), or set "
    "task.sandbox = 'reduced': programs written by a model then run with the isolation that is available."
)

# Each attempt returns whether it succeeded.
ATTEMPTS = """
import fcntl, mmap, os, socket

def read_a_file(secret, folder, port, pid):
    return "secret" in open(secret).read()

def write_a_file(secret, folder, port, pid):
    open(folder + "/written", "w").close()
    return True

def reach_the_network(secret, folder, port, pid):
    socket.create_connection(("127.0.0.1", port), timeout=2).close()
    return True

def signal_a_process(secret, folder, port, pid):
    os.kill(pid, 0)
    return True

def have_a_process_signalled(secret, folder, port, pid):
    reading, writing = os.pipe()
    fcntl.fcntl(reading, 10, 9)  # F_SETSIG: SIGKILL would be sent, were there anything to read
    fcntl.fcntl(reading, fcntl.F_SETOWN, pid)
    return True

def use_too_much_memory(secret, folder, port, pid):
    mmap.mmap(-1, TOO_MUCH, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()  # asked for, and never touched
    return True

def attempt(name, *given):
    try:
        return bool(globals()[name](*given))
    except OSError:
        return False
"""
NAMES = tuple(name for name in re.findall(r"^def (\w+)", ATTEMPTS, re.MULTILINE) if name != "attempt")
TRIAL = Limits(cpu_s=10.0)


@dataclass(frozen=True)
class Isolation:
    """A sandbox's isolation. `refused`: the mechanisms that are missing, and why. `open_`: the escape attempts that
    succeeded. `unlimited`: resources without a limit."""

    walls: frozenset[str]
    refused: dict[str, str] = field(default_factory=dict)
    open_: tuple[str, ...] = ()
    unlimited: tuple[str, ...] = ()

    @property
    def complaints(self) -> list[str]:
        """Why this is not `full`; empty if it is."""
        found = []
        if "seccomp" not in self.walls:
            found.append(f"no system call filter ({self.refused.get('seccomp', 'not offered')})")
        if not self.walls & {"namespaces", "landlock"}:
            why = " and ".join(
                f"{name}: {self.refused.get(name, 'not offered')}" for name in ("namespaces", "landlock")
            )
            found.append(f"no separate file system ({why})")
        found += [f"nothing limits {what} (this process cannot see it in /proc)" for what in self.unlimited]
        return found + [f"a program could {name.replace('_', ' ')}" for name in self.open_]

    def describe(self) -> str:
        """A summary such as "full (landlock, namespaces, seccomp)"."""
        level = "reduced" if self.complaints else "full"
        return f"{level} ({', '.join(sorted(self.walls)) or 'limits only'})"


def open_first_warden(level: Level, offered: frozenset[str]) -> tuple[WardenProcess, Isolation]:
    """A warden that has passed the trial, and its isolation.

    Raises MissingRequirementError if `level` needs more than the machine offers, or if no warden starts.
    """
    try:
        warden = WardenProcess(offered)
    except (WardenFailedError, OSError) as error:
        raise MissingRequirementError(f"The sandbox does not start: {error}.", REMEDY) from None
    try:
        isolation = Isolation(warden.walls, warden.refused, _ways_out(warden), warden.unlimited)
        if level == "full" and isolation.complaints:
            raise MissingRequirementError(
                f"This machine cannot isolate programs: {'; '.join(isolation.complaints)}.", REMEDY
            )
    except BaseException as error:
        warden.close()
        if isinstance(error, WardenFailedError):
            raise MissingRequirementError(f"The sandbox does not work: {error}.", REMEDY) from None
        raise
    return warden, isolation


def probe(offered: frozenset[str] = MECHANISMS) -> Isolation:
    """The isolation of this machine. Raises MissingRequirementError if not even a reduced sandbox starts."""
    warden, isolation = open_first_warden("reduced", offered)
    warden.close()
    return isolation


def _ways_out(warden: WardenProcess) -> tuple[str, ...]:
    """The names of the escape attempts that succeed."""
    with tempfile.TemporaryDirectory(prefix="pvg-sandbox-") as folder, socket.create_server(("127.0.0.1", 0)) as server:
        secret = Path(folder) / "secret"
        secret.write_text("secret")
        os.chmod(folder, 0o777)
        given = [str(secret), folder, server.getsockname()[1], os.getpid()]
        source = f"TOO_MUCH = {2 * TRIAL.memory_mb * 2**20}\n{ATTEMPTS}"
        program = Program.of_function(source, "attempt", [[name, *given] for name in NAMES])
        header, (reports, _, said) = warden.run(program, TRIAL)
    lines = reports.decode(errors="replace").splitlines()
    if header["status"] != "ok" or len(lines) != len(NAMES):
        raise WardenFailedError(f"its trial ended {header['status']} ({said.decode(errors='replace')[-200:]})")
    return tuple(name for name, line in zip(NAMES, lines, strict=True) if line != '["value", false]')


TAIL = 2000  # characters kept of a program's error output, bytes kept of its other output
LONGEST_SENTENCE = 200  # characters of an error message
CACHE_ENTRIES, CACHE_BYTES = 8192, 64 * 2**20
ENTRY_BYTES = 1024  # size of a cached execution without its parts
TRIES = 2  # a failed warden is replaced once per program


class Sandbox(Closing):
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
                if fresh or program not in of_program:
                    of_program[program] = self._submit(program, chosen, fresh=fresh)
                waiting.append(of_program[program])
            return [future.result() for future in waiting]
        except BaseException:  # the other results are no longer needed
            for future in waiting:
                future.cancel()
            raise

    def close(self) -> None:
        """End all processes. Waiting programs are cancelled, and running ones fail."""
        self._closed()

    def _submit(self, program: Program, limits: Limits, *, fresh: bool = False) -> Future[Execution]:
        key = program.digest(limits, self._python)
        if not fresh and (known := self._cache.get(key)) is not None:
            done: Future[Execution] = Future()
            done.set_result(known.execution(program))
            return done
        return self._pool.submit(_execute, self._wardens, None if fresh else self._cache, program, limits, key)


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
        reports, stdout, stderr = (part.decode(errors="replace") for part in self.parts)
        said = stderr[-TAIL:]
        missing = CaseResult(error=_why_missing(self.header["status"], said))
        cases = [_case(line) for line in reports.split("\n")[: len(program.cases)] if line]
        return Execution(
            status=self.header["status"],
            cases=tuple(cases + [missing] * (len(program.cases) - len(cases))),
            stdout=stdout,
            stderr=said,
            exit=self.header["exit"],
            cpu_s=self.header["cpu_s"],
            wall_s=self.header["wall_s"],
        )


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


def _execute(wardens: _Wardens, cache: _Cache | None, program: Program, limits: Limits, key: str) -> Execution:
    """Runs in a thread of the pool. Without a cache, the program runs in any case."""
    known = None if cache is None else cache.get(key)  # it may have been computed while this call waited
    if known is None:
        known = _answer(wardens, program, limits)
        if cache is not None and known.header["status"] in DETERMINISTIC:
            cache.keep(key, known)
    return known.execution(program)


def _answer(wardens: _Wardens, program: Program, limits: Limits) -> _Answer:
    for attempt in range(TRIES):
        try:
            warden = wardens.start() if attempt else wardens.take()  # after a failure, idle ones may be dead too
            try:
                header, (reports, stdout, stderr) = warden.run(program, limits)
            except BaseException:
                wardens.drop(warden)
                raise
        except (WardenFailedError, OSError) as error:
            if attempt == TRIES - 1:
                raise MissingRequirementError(
                    f"The sandbox fails: {error}.", "Check that this machine has free processes and memory."
                ) from None
        else:
            wardens.give_back(warden)
            break
    return _Answer(header, [reports, stdout[-TAIL:], stderr[-4 * TAIL :]])  # a character has at most four bytes


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
        "error": _sentence(said.strip().rpartition("\n")[2]) or "it called sys.exit, or failed without a word",
        "timeout": "its CPU time was used up",
        "stalled": "it waited for too long",
        "memory": "its memory was used up",
        "output": "it wrote too much",
        "threads": "it started too many threads",
    }.get(status, "it crashed or left early")
