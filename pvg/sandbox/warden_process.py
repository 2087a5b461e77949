"""`WardenProcess`: the handle of the interpreter that forks programs (see pvg.sandbox.inside.warden)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pvg.errors import system_module
from pvg.sandbox.records import Limits, Program

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
            self.given = frozenset(header["given"])
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
                raise self._failure("it takes no job")
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:  # room for less than a page
                continue
            except OSError as error:
                raise self._failure(f"it takes no job ({error.strerror})") from None

    def _answer(self, deadline: float) -> tuple[dict[str, Any], bytes]:
        from pvg.sandbox.inside.keeper import HEADER

        header_size, body_size = HEADER.unpack(self._read(HEADER.size, deadline))
        if header_size > LONGEST_HEADER:
            raise self._failure("its answer is no answer")
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
        said = ""
        if self._process.stderr is not None:
            os.set_blocking(self._process.stderr.fileno(), False)
            with contextlib.suppress(OSError):
                said = (self._process.stderr.read() or b"").decode(errors="replace").strip()[-500:]
        return WardenFailedError(f"the sandbox's process failed: {what}{': ' if said else ''}{said}")
