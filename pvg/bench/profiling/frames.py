"""The costliest frames: of the stacks py-spy sampled, by the time a function itself ran.

Read from py-spy's speedscope file (https://www.speedscope.app/file-format-schema.json): one profile per thread, each
sample a stack of frame numbers, outermost first, with its seconds as weight.
"""

from __future__ import annotations

import site
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

SHOWN_FRAMES = 10
LONG_PATH = 28  # characters that fit beside the function in 80 columns
# Innermost frames of a thread that waits for work: py-spy cannot always tell that it sleeps. File and function.
WAITING = frozenset(
    {
        ("asyncio/runners.py", "run"),  # uvloop's own waiting has no Python frame
        ("asyncio/base_events.py", "run_forever"),
        ("concurrent/futures/thread.py", "_worker"),
        ("queue.py", "get"),
        ("selectors.py", "select"),
        ("threading.py", "_wait_for_tstate_lock"),
        ("threading.py", "wait"),
    }
)


@dataclass(frozen=True, slots=True)
class Frame:
    """Where the time went: `own_s` seconds in the function itself, `share` of all that were sampled. `line` is the one
    most of them were spent in; an operator of torch has neither file nor line."""

    function: str
    file: str
    line: int
    own_s: float
    share: float

    @property
    def place(self) -> str:
        """`file:line`; of a long path the package and the file."""
        if not self.file:
            return ""
        package, *rest = self.file.split("/")
        long = len(self.file) > LONG_PATH and len(rest) > 1
        file = f"{package}/…/{rest[-1]}" if long else self.file
        return f"{file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a speedscope file says: the costliest frames first, how many samples of working threads it rests on, and how
    many more were of waiting ones."""

    frames: tuple[Frame, ...]
    samples: int
    seconds: float
    waiting: int


def read_speedscope(path: Path, count: int = SHOWN_FRAMES) -> Sampled:
    """The `count` costliest functions over all threads. Samples of threads that wait for work do not count."""
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
    return Sampled(tuple(_frame(*item, seconds) for item in costliest), samples, seconds, waiting)


def _leaves(document: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
    for thread in document["profiles"]:
        for stack, weight in zip(thread["samples"], thread["weights"], strict=True):
            if stack:
                yield stack[-1], weight


def _waits(frame: Mapping[str, Any]) -> bool:
    file, function = frame.get("file") or "", frame["name"].rpartition(".")[2]
    return any(function == name and file.endswith(f"/{place}") for place, name in WAITING)


def _frame(where: tuple[str, str], by_line: Mapping[int, float], seconds: float) -> Frame:
    name, file = where
    own = sum(by_line.values())
    return Frame(name, shortened(file), max(by_line, key=by_line.__getitem__), own, own / seconds if seconds else 0.0)


def shortened(file: str) -> str:
    """A file as one knows it: below site-packages, the standard library or the current folder; else in full."""
    roots = [*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), str(Path.cwd())]
    roots.append(str(Path(__file__).parents[3]))  # what holds pvg: a checkout, or site-packages
    for root in sorted(set(roots), key=len, reverse=True):
        if file.startswith(f"{root}/"):
            return file[len(root) + 1 :]
    return file
