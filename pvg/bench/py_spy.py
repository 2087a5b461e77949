"""py-spy as a child process: it samples this process's Python stacks from outside, with little slowdown.

    with sampling(find_py_spy(), Path("py-spy.speedscope.json"), "speedscope"):
        work()
    read_speedscope(Path("py-spy.speedscope.json")).frames      # the functions with the most self time

Raises PySpyError if py-spy is missing or may not inspect this process. The message says which, the remedy how to fix
it. The results come from py-spy's speedscope file (https://www.speedscope.app/file-format-schema.json): one profile per
thread; each sample is a stack of frame numbers, outermost first, weighted with its seconds.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import orjson

from pvg.errors import MissingRequirementError
from pvg.installation import install_extra

Format = Literal["flamegraph", "speedscope"]

RATE = 200  # samples per second: a frame of 1 % has 40 in 20 s; each sample pauses this process for about 0.1 ms
START_LIMIT_S = 60.0  # py-spy first reads the symbols of every library, which takes seconds with torch loaded
STOP_LIMIT_S = 60.0  # time for py-spy to write its file
POLL_S = 0.02
READY = "Sampling process"  # py-spy prints this when it begins to sample
PR_SET_PTRACER, ANY_PROCESS = 0x59616D61, ctypes.c_ulong(-1)  # prctl of Linux' Yama module


class PySpyError(MissingRequirementError):
    """py-spy is missing, not permitted, or failed. `message` is one line, `remedy` the command that fixes it."""


def find_py_spy() -> Path:
    """py-spy of this Python installation, otherwise from PATH. Raises PySpyError."""
    folder = str(Path(sys.executable).parent)
    found = shutil.which("py-spy", path=os.pathsep.join([folder, os.environ.get("PATH", "")]))
    if found is None:
        raise PySpyError("py-spy is not installed.", install_extra("profile"))
    return Path(found)


@contextmanager
def sampling(py_spy: Path, output: Path, form: Format) -> Iterator[None]:
    """Sample this process while the body runs, and write `output`. Raises PySpyError if py-spy wrote nothing."""
    command = [str(py_spy), "record", "--pid", str(os.getpid()), "--format", form, "--output", str(output)]
    command += ["--rate", str(RATE), "--threads"]
    with tempfile.TemporaryFile() as log:
        allow_tracing(True)
        # In a separate session, Ctrl-C reaches only this process, which then stops py-spy.
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait_until_sampling(child, log)
            yield
            _finish(child, log, output)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            allow_tracing(False)


def allow_tracing(allowed: bool) -> None:
    """Let our child trace this process where Linux permits that only to parents (Yama's ptrace_scope = 1). Does nothing
    on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANY_PROCESS if allowed else ctypes.c_ulong(0), 0, 0, 0)


def _wait_until_sampling(child: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while READY not in (text := _text(log)):
        if child.poll() is not None:
            raise explained(text)
        if time.monotonic() > deadline:
            raise PySpyError(
                f"py-spy did not start to sample within {START_LIMIT_S:.0f} s.", "Try again, or use --no-py-spy."
            )
        time.sleep(POLL_S)


def _finish(child: subprocess.Popen[bytes], log: IO[bytes], output: Path) -> None:
    child.send_signal(signal.SIGINT)
    try:
        code = child.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise PySpyError(f"py-spy did not end within {STOP_LIMIT_S:.0f} s.", "Try again with fewer --steps.") from None
    if code != 0 or not output.exists() or not output.stat().st_size:
        raise explained(_text(log))


def explained(text: str) -> PySpyError:
    """The error for what py-spy printed, with a remedy."""
    if "denied" in text.lower() or "not permitted" in text.lower():
        return PySpyError(
            "py-spy may not inspect this process.",
            "Allow it: sudo sysctl kernel.yama.ptrace_scope=0; start a container with --cap-add=SYS_PTRACE.",
        )
    lines = [line.strip().removeprefix("Error: ") for line in text.splitlines() if line.strip()]
    return PySpyError(f"py-spy failed: {lines[0] if lines else 'without a message'}", "See its documentation.")


def _text(log: IO[bytes]) -> str:
    """What the child has printed so far. Does not move the file's position, which child and parent share."""
    return os.pread(log.fileno(), 65_536, 0).decode("utf-8", "replace")


# --- the most expensive frames ----------------------------------------------------------------------------------------

SHOWN_FRAMES = 10
LONG_PATH = 28  # characters that fit beside the function in 80 columns
# Innermost frames (file, function) of a thread that waits for work. py-spy cannot always detect that it sleeps.
WAITING = frozenset(
    {
        ("asyncio/runners.py", "run"),  # uvloop waits without a Python frame
        ("asyncio/base_events.py", "run_forever"),
        ("concurrent/futures/thread.py", "_worker"),
        ("queue.py", "get"),
        ("selectors.py", "select"),
        ("threading.py", "_wait_for_tstate_lock"),
        ("threading.py", "wait"),
    }
)


@dataclass(frozen=True, slots=True)
class CostlyFrame:
    """A function and its time: `own_s` seconds in the function itself, `share` of all sampled time. `line`: the line
    with the most of it. An operator of torch has neither file nor line."""

    function: str
    file: str
    line: int
    own_s: float
    share: float

    @property
    def place(self) -> str:
        """`file:line`; a long path is cut to the package and the file."""
        if not self.file:
            return ""
        package, *rest = self.file.split("/")
        long = len(self.file) > LONG_PATH and len(rest) > 1
        file = f"{package}/…/{rest[-1]}" if long else self.file
        return f"{file}:{self.line}"


@dataclass(frozen=True, slots=True)
class StackSamples:
    """A speedscope file's content: the most expensive frames first, the number of samples of working threads, and the
    number of samples of waiting threads."""

    frames: tuple[CostlyFrame, ...]
    samples: int
    seconds: float
    waiting: int


def read_speedscope(path: Path, count: int = SHOWN_FRAMES) -> StackSamples:
    """The `count` most expensive functions over all threads. Samples of threads that wait for work do not count."""
    document = orjson.loads(path.read_bytes())
    frames = document["shared"]["frames"]
    own_s: dict[tuple[str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    samples, seconds, waiting = 0, 0.0, 0
    for leaf, weight in _leaves(document):
        frame = frames[leaf]
        if _waits(frame):
            waiting += 1
            continue
        own_s[(frame["name"], frame.get("file") or "")][frame.get("line") or 0] += weight
        samples, seconds = samples + 1, seconds + weight
    costliest = sorted(own_s.items(), key=lambda item: -sum(item[1].values()))[:count]
    return StackSamples(tuple(_frame(*item, seconds) for item in costliest), samples, seconds, waiting)


def _leaves(document: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
    for thread in document["profiles"]:
        for stack, weight in zip(thread["samples"], thread["weights"], strict=True):
            if stack:
                yield stack[-1], weight


def _waits(frame: Mapping[str, Any]) -> bool:
    file, function = frame.get("file") or "", frame["name"].rpartition(".")[2]
    return any(function == name and file.endswith(f"/{place}") for place, name in WAITING)


def _frame(where: tuple[str, str], by_line: Mapping[int, float], seconds: float) -> CostlyFrame:
    name, file = where
    own = sum(by_line.values())
    return CostlyFrame(
        name, shortened(file), max(by_line, key=by_line.__getitem__), own, own / seconds if seconds else 0.0
    )


def shortened(file: str) -> str:
    """The file relative to site-packages, the standard library or the current folder; otherwise in full."""
    roots = [*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), str(Path.cwd())]
    roots.append(str(Path(__file__).parents[3]))  # the parent of pvg: a checkout, or site-packages
    for root in sorted(set(roots), key=len, reverse=True):
        if file.startswith(f"{root}/"):
            return file[len(root) + 1 :]
    return file
