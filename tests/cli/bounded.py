"""`pvg` in a child process that takes call after call, and that the kernel ends if one call takes too long.

    with BoundedPvg() as bounded:
        called = bounded("train", "--dry-run", "-s", text)    # exit code, stderr, and the peak memory of this call

So many calls are checked for the price of one process.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CPU_S = 20.0  # of one call
WALL_S = 300.0  # of one call that waits for something; long enough for a busy machine
# Resident, in one call. A dry run opens tokenizers, and so loads torch and transformers, which take 530 MB.
MOST_BYTES = 700_000_000
# What the process may allocate before an allocation fails, so that a defect does not fill the machine's memory.
ALLOCATED_BYTES = 4 << 30


@dataclass(frozen=True)
class BoundedCall:
    """`peak_bytes`: the largest resident memory of the process during the call; 0 if the system does not tell."""

    code: int
    err: str
    peak_bytes: int


class BoundedPvg:
    """Starts the child with the first call, and again after a call that ended it."""

    def __init__(self, cpu_s: float = CPU_S, wall_s: float = WALL_S) -> None:
        self._limits = (cpu_s, wall_s)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> BoundedPvg:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def __call__(self, *arguments: str) -> BoundedCall:
        """Call `pvg` in the current working directory. Raises AssertionError if the call ended the process."""
        if self._process is None:
            self._start()
        with suppress(BrokenPipeError):
            self._requests.write(json.dumps([os.getcwd(), *self._limits, *arguments]).encode() + b"\n")
            self._requests.flush()
        answer = self._answers.readline()
        if not answer:
            raise AssertionError(f"pvg {arguments!r} {self._end()}")
        return BoundedCall(*json.loads(answer))

    def _start(self) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs_in), str(theirs_out)],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs_in, theirs_out),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._requests, self._answers = os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb")

    def _end(self) -> str:
        """How the process ended."""
        process, self._process = self._process, None
        if process is None:
            return ""
        with suppress(BrokenPipeError):
            self._requests.close()
        self._answers.close()
        code = process.wait()
        cpu_s, wall_s = self._limits
        causes = {
            -signal.SIGPROF: f"took more than {cpu_s:g} s of CPU time",
            -signal.SIGALRM: f"took more than {wall_s:g} s",
        }
        return causes.get(code, f"ended the process with code {code}")


def serve(requests: Any, answers: Any) -> None:
    from calling import pvg  # imported by the first call's process, not by the tests

    resource.setrlimit(resource.RLIMIT_DATA, (ALLOCATED_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    for line in requests:
        folder, cpu_s, wall_s, *arguments = json.loads(line)
        os.chdir(folder)
        with suppress(OSError):  # where this fails, the peak is that of all calls so far
            Path("/proc/self/clear_refs").write_text("5")
        # The default action of both signals ends the process.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_REAL, wall_s)
        called = pvg(*arguments)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        answers.write(json.dumps([called.code, called.err[-2000:], peak_bytes()]).encode() + b"\n")
        answers.flush()


def peak_bytes() -> int:
    with suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    return 0


if __name__ == "__main__":
    serve(os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb"))
