"""The event log: one line per event, `[tag] key=value ...`, with monotonic time.

A line is one `write` in append mode, so lines of several threads never interleave. If a full disk or a kill cuts a line
short, the next event begins a new line.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from pvg.errors import counted
from pvg.inputs import open_input, open_own


class Events(Protocol):
    """A receiver of events: the event log, or nothing."""

    def event(self, tag: str, **fields: object) -> None: ...


class SilentEvents:
    """Discards events."""

    def event(self, tag: str, **fields: object) -> None: ...


def format_event(tag: str, **fields: object) -> str:
    """`[tag] t=12.345678 key=value`: floats with six significant digits, strings with spaces quoted."""
    parts = [f"[{tag}]", f"t={time.monotonic():.6f}"]
    parts += [f"{key}={_value(value)}" for key, value in fields.items()]
    return " ".join(parts)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value).replace("\n", "\\n").replace("\r", "\\r").replace('"', "'")
    return f'"{text}"' if (" " in text or not text) else text


class EventLog:
    """Appends events to a file. `close` it when the run ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._torn = path.is_file() and _ends_within_a_line(path)  # a full disk or a kill can end a write early
        self._file: int | None = open_own(path, os.O_WRONLY | os.O_APPEND)

    def event(self, tag: str, **fields: object) -> None:
        self.line(format_event(tag, **fields))

    def line(self, text: str) -> None:
        if self._file is None:
            raise RuntimeError("The event log is closed.")
        data = (("\n" if self._torn else "") + text + "\n").encode()
        try:
            while data:  # a write to a full disk may write a part; the next one raises
                data = data[os.write(self._file, data) :]
                self._torn = bool(data)
        except OSError as error:  # it has no file name yet
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _ends_within_a_line(path: Path) -> bool:
    with open_input(path) as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


# --- notices about servers --------------------------------------------------------------------------------------------

# Of worker processes and the nodes of a cluster. `why` of a node's event is a whole sentence.
NOTICES = {
    "lost": "Worker {worker}{where} has ended ({why}); another one takes its place.",
    "added": "Added worker {worker}: {why}. Now {now}.",
    "removed": "Removed worker {worker}: {why}. Now {now}.",
    "node joined": "Workers on node {node} compute on {device}.",
    "not added": "Worker {worker} could not be added: {why}",
    "server started": "A vLLM server on node {node} is ready.",
    "server lost": "vLLM on node {node}: {why}.",
    **dict.fromkeys(("node shared", "node differs", "experimental", "servers", "server given up"), "{why}."),
    "waits": "pvg waits for {why}.",
}
QUIET_S = 5.0  # of a wait for another process, before a notice


@asynccontextmanager
async def patience(events: Events, what: str, limit_s: float) -> AsyncIterator[None]:
    """Limits the awaits of the block, which wait for `what`; reports them once if they take longer than QUIET_S. Raises
    TimeoutError."""
    why = f"{what}, for at most {limit_s:g} s"
    late = asyncio.get_running_loop().call_later(QUIET_S, partial(events.event, "workers", event="waits", why=why))
    try:
        async with asyncio.timeout(limit_s):
            yield
    finally:
        late.cancel()


class ServerNotices(Events):
    """Passes every event to `log`, and calls `notice` when a server becomes unavailable or available again or does not
    answer its requests, and when a worker process ends, hangs, is added or is removed."""

    def __init__(self, log: Events, notice: Callable[[str], None], groups: Sequence[Sequence[str]]) -> None:
        """`groups`: addresses of servers that can replace each other."""
        self._log = log
        self._notice = notice
        self._groups = groups
        self._away: set[object] = set()

    def event(self, tag: str, **fields: object) -> None:
        self._log.event(tag, **fields)
        server, event = fields.get("server"), fields.get("event")
        if tag == "workers" and (says := NOTICES.get(str(event))):
            now = counted(int(str(fields["workers"])), "worker") if "workers" in fields else ""
            where = f" on node {fields['node']}" if "node" in fields else ""
            self._notice(says.format(**fields, now=now, where=where))
        if event == "server.away":
            self._away.add(server)
            group = next((set(group) for group in self._groups if server in group), None)
            rest = "the others take its requests" if group and group - self._away else "its requests wait for it"
            rest = "pvg repeats its requests" if group is None else rest  # servers on a cluster come and go
            self._notice(f"{server} is unavailable ({fields.get('why', 'no reason known')}); {rest}.")
        elif event == "server.up" and server in self._away:
            self._away.discard(server)
            self._notice(f"{server} is back, with the newest weights.")
        elif event == "server.silent":
            self._notice(
                f"{server} has answered no request for {fields['silent_s']:g} s; {fields['requests']} are in flight. "
                "If they hang, restart it: pvg repeats them."
            )


# The interface through which a run reports its progress to the live display or to a test.


@dataclass(frozen=True, slots=True)
class PhaseInfo:
    """A phase that begins or ends. `total`: its units of work (rollouts or optimizer steps). `done`: the finished ones,
    which is above 0 after a resume. If the work has parts (an evaluation): the phase belongs to `part` of `parts`, from
    1, which is called `label`. Without parts: 0."""

    round: int
    rounds: int
    phase: str
    unit: str
    total: int
    done: int = 0
    part: int = 0
    parts: int = 0
    label: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """A solution of the newest batch, to show. `grade`: correct, wrong or malformed. `accepted`: by the verifier."""

    role: str
    question: str
    text: str
    grade: str
    score: float
    accepted: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` units of the phase, the newest metrics, those of the worker processes, and the first solution of each
    role in the newest batch."""

    done: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    workers: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[Sample] = ()


class Observer(Protocol):
    def phase_started(self, info: PhaseInfo) -> None: ...

    def progressed(self, progress: Progress) -> None: ...

    def phase_finished(self, info: PhaseInfo, metrics: Mapping[str, float]) -> None: ...

    def round_finished(self, round_: int, metrics: Mapping[str, float]) -> None: ...

    def alerted(self, name: str, message: str) -> None: ...

    def noticed(self, message: str) -> None:
        """A message for the user: a recovery, a commit on Ctrl-C, a model being loaded."""


class SilentObserver:
    def phase_started(self, info: PhaseInfo) -> None: ...

    def progressed(self, progress: Progress) -> None: ...

    def phase_finished(self, info: PhaseInfo, metrics: Mapping[str, float]) -> None: ...

    def round_finished(self, round_: int, metrics: Mapping[str, float]) -> None: ...

    def alerted(self, name: str, message: str) -> None: ...

    def noticed(self, message: str) -> None: ...
