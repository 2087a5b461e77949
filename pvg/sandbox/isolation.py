"""Determines by trial which isolation this machine offers, and whether it suffices.

`full` needs a system call filter, and a separate file system through namespaces or Landlock. Each of the two gives the
guarantees of docs/sandbox.md; if both are available, both are used. Then a trial program tries to escape. If it can,
the sandbox does not run other programs at this level.

`WardenProcess` is the handle of the interpreter that forks programs (see pvg.sandbox.inside.warden).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pvg.errors import MissingRequirementError, system_module
from pvg.sandbox.records import Level, Limits, Program

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
        job = {"source": program.source, "entry": program.entry, "cases": program.cases, "limits": limits.plain()}
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
        from pvg.sandbox.inside.keeper import HEADER

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
NAMES = (
    "read_a_file",
    "write_a_file",
    "reach_the_network",
    "signal_a_process",
    "have_a_process_signalled",
    "use_too_much_memory",
)
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
