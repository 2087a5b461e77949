"""How far a starting vLLM has come, told by its own log.

    log = LogTail(path)
    for stage in log.new_stages(): ...

vLLM writes in the words of its release. A line that none of ours knows changes nothing but the stage that is shown: a
server is ready when it answers.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LAST_LINES = 20  # of a server that failed
# What stands before a line of vLLM's: (EngineCore pid=12) INFO 11-21 14:08:34 [core.py:133]
PREFIX = re.compile(r"^(\([^)]*\) )?([A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")

# The stages, in their order, each with the lines that begin it and what of them is worth showing.
STAGES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("reading the settings", re.compile(r"non-default args|\bversion (?P<detail>\d+\.\d+\S*)$")),
    ("starting the engine", re.compile(r"Resolved architecture: (?P<detail>\w+)|Initializing a V1 LLM engine")),
    (
        "loading weights",
        re.compile(r"Starting to load model|checkpoint shards: +(?P<detail>\d+%)|Loading weights took"),
    ),
    (
        "compiling",
        re.compile(r"Dynamo bytecode transform|Compiling a graph|Cache the graph|Warming up model for the comp"),
    ),
    ("making room for the KV cache", re.compile(r"KV cache size: (?P<detail>[\d,]+ tokens)|for KV cache on node")),
    ("capturing CUDA graphs", re.compile(r"Capturing CUDA graph\w*[^:]*: +(?P<detail>\d+%)")),
    ("opening the port", re.compile(r"Starting vLLM (API )?server|Waiting for application startup")),
)
STARTING = "importing vLLM"
FIRST_REQUEST = "answering a first request"
READY = "ready"
ALL_STAGES = (STARTING, *(name for name, _ in STAGES), FIRST_REQUEST, READY)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the start is. `detail` is what the server said of it; `place` counts along ALL_STAGES."""

    name: str
    detail: str = ""

    @property
    def place(self) -> int:
        return ALL_STAGES.index(self.name)


def stage_of(line: str) -> Stage | None:
    """The stage that a line of the log begins, or tells more of."""
    for name, pattern in STAGES:
        if found := pattern.search(line):
            return Stage(name, found.groupdict().get("detail") or "")
    return None


class LogTail:
    """Reads what is appended to a server's log, from where it ends now."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place = path.stat().st_size if path.exists() else 0
        self._began = self._place
        self._rest = b""
        self._stage = Stage(STARTING)

    def new_stages(self) -> Iterator[Stage]:
        """The stages that the log has come to since the last call. Never one that lies behind: a worker may be
        slower than the others."""
        for line in self._new_lines():
            stage = stage_of(line)
            if stage is None or stage.place < self._stage.place or stage == self._stage:
                continue
            if stage.name == self._stage.name and not stage.detail:
                continue
            self._stage = stage
            yield stage

    def last_lines(self, count: int = LAST_LINES) -> list[str]:
        """The last lines that say something, without colours: from the traceback of the process that failed first,
        where there is one, since those of the others only say that it did."""
        with self.path.open("rb") as file:
            file.seek(self._began)
            lines = [_plain(line) for line in file.read().decode(errors="replace").splitlines()]
        told = [line for line in lines if line.strip()]
        for place, line in enumerate(told):
            if ROOT_CAUSE.search(PREFIX.sub("", line)):
                return told[max(0, place + 1 - count) : place + 1]
        return list(deque(told, maxlen=count))

    def _new_lines(self) -> list[str]:
        with self.path.open("rb") as file:
            file.seek(self._place)
            data = file.read()
        self._place += len(data)
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        return [_plain(line.decode(errors="replace")) for line in lines]


# The end of a traceback: the exception, at the start of what a line says.
ROOT_CAUSE = re.compile(r"^(\w+\.)*\w*(Error|Exception|Exit)\b.*:|error: ")


def _plain(line: str) -> str:
    return ESCAPES.sub("", line).rstrip()


def said(line: str) -> str:
    """A line without what vLLM puts before it."""
    return PREFIX.sub("", line)
