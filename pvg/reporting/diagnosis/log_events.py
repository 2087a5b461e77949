"""Log lines to events, one at a time: `[tag] t=SECONDS event=NAME key=value ...` (pvg.telemetry.events).

    with open_log("events.log.gz") as log:
        for event in EventReader(log):
            event.tag, event.name, event.number("wall_ms")

A tag may follow another program's prefix. No line is fatal: unreadable lines are counted, with an example.

Invariant: memory does not depend on the length of a line; a log's numbers take 8 bytes each.
"""

from __future__ import annotations

import gzip
import math
import re
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from pvg.errors import UsageError
from pvg.inputs import open_input

TAGS = ("weights", "ckpt", "gen", "rollout", "step", "loop", "phase", "alert", "run", "workers", "memory", "machine")
STDIN = "-"
LONGEST_LINE = 65_536  # bytes; lines of pvg have a few hundred
SHOWN_TEXT = 240  # characters of a line that are kept as evidence: an event line fits
ROUNDING = 0.1  # milliseconds
GZIP_MAGIC = b"\x1f\x8b"

_TAG = re.compile(rf"\[({'|'.join(TAGS)})\](?=\s|$)")
_FIELD = re.compile(r'([A-Za-z_][\w.-]*)=("[^"]*"|\S*)')


class MalformedLineError(ValueError):
    """A line with a tag of pvg and an impossible value. Never leaves this package."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line. `t` is in seconds of the writer's monotonic clock; `line` counts from 1."""

    tag: str
    name: str
    t: float
    fields: dict[str, str]
    text: str
    source: int
    line: int

    def number(self, key: str) -> float | None:
        """The value of `key`; None where it is absent. Raises MalformedLineError unless it is finite and not negative:
        all numbers of these lines are durations or counts. (The difference of two measured times may come out a hair
        below zero.)"""
        return _number(self.fields, key)


@dataclass(slots=True)
class LineCounts:
    """Counts of events, foreign lines and unreadable lines, with the first unreadable line as an example."""

    read: int = 0
    events: int = 0
    other: int = 0
    malformed: int = 0
    example: str = ""
    cut_short: list[str] = field(default_factory=list)  # compressed logs that end in the middle

    def reject(self, where: str, reason: str, text: str) -> None:
        self.malformed += 1
        self.example = self.example or f"{where}: {reason}: {text}".rstrip(": ")


def parse_line(text: str, source: int, line: int) -> Event | None:
    """The event of one line; None without a tag of pvg. Raises MalformedLineError."""
    found = _TAG.search(text)
    if found is None:
        return None
    rest = text[found.end() :]
    fields: dict[str, str] = dict(_FIELD.findall(rest))
    if '"' in rest:
        fields = {key: value.strip('"') for key, value in fields.items()}
    t = _number(fields, "t")
    if t is None:
        raise MalformedLineError("it has no time (t=)")
    return Event(found[1], fields.get("event", ""), t, fields, text[found.start() :][:SHOWN_TEXT], source, line)


def _number(fields: dict[str, str], key: str) -> float | None:
    text = fields.get(key)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        raise MalformedLineError(f"{key} is no number") from None
    if not -ROUNDING < value < math.inf:
        raise MalformedLineError(f"{key} is out of range")
    return max(value, 0.0)


class EventReader:
    """Iterates over the events of one open log and counts the rest. `source` is its number among several logs."""

    def __init__(self, file: BinaryIO, name: str, counts: LineCounts, source: int = 0) -> None:
        self._file = file
        self._name = name
        self._counts = counts
        self._source = source

    def __iter__(self) -> Iterator[Event]:
        counts = self._counts
        for number, raw in enumerate(self._lines(), start=1):
            counts.read += 1
            if raw is None:
                self._reject(number, f"longer than {LONGEST_LINE} bytes", "")
                continue
            text = raw.decode("utf-8", "replace").strip("\r\n")
            binary = "\ufffd" in text or "\0" in text
            text = printable(text)
            if binary:
                self._reject(number, "binary", text[:SHOWN_TEXT])
                continue
            try:
                event = parse_line(text, self._source, number)
            except MalformedLineError as error:
                self._reject(number, str(error), text[:SHOWN_TEXT])
                continue
            if event is None:
                counts.other += bool(text.strip())
            else:
                counts.events += 1
                yield event

    def _reject(self, number: int, reason: str, text: str) -> None:
        self._counts.reject(f"{self._name}:{number}", reason, text)

    def _lines(self) -> Iterator[bytes | None]:
        """The lines; None for a line that is too long. A truncated compressed file ends where it breaks."""
        try:
            while raw := self._file.readline(LONGEST_LINE):
                if len(raw) < LONGEST_LINE or raw.endswith(b"\n"):
                    yield raw
                    continue
                while (more := self._file.readline(LONGEST_LINE)) and not more.endswith(b"\n"):
                    pass
                yield None
        except (EOFError, gzip.BadGzipFile, zlib.error):
            self._counts.cut_short.append(self._name)


def printable(text: str) -> str:
    """Without control characters: a log must not move the reader's cursor."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "\u00b7" for character in text.replace("\t", " "))


@contextmanager
def open_log(path: str | Path) -> Iterator[BinaryIO]:
    """The bytes of a log, uncompressed; "-" is standard input. Raises UsageError when it cannot be read."""
    if str(path) == STDIN:
        yield _uncompressed(cast(BinaryIO, sys.stdin.buffer))
        return
    try:
        file = open_input(path)
    except OSError as error:
        raise UsageError(f"The log {path} cannot be read: {error.strerror}.", "Give a run, a log file, or -.") from None
    with file:
        yield _uncompressed(file)


def _uncompressed(file: BinaryIO) -> BinaryIO:
    """By its first bytes, not by its name."""
    start = file.peek(len(GZIP_MAGIC))[: len(GZIP_MAGIC)]  # type: ignore[attr-defined]
    return cast(BinaryIO, gzip.GzipFile(fileobj=file)) if start == GZIP_MAGIC else file


# Weight updates: lines of client and server, paired by trace id.
#
# A client's line may come before or after the server's lines of the same update, in the same log or in another. Client
# and server may run on different machines, so only times of the same clock are subtracted: `wall` is from the client,
# `rpc` from the client or the server, `queue` = wall - rpc.
#
# Invariant: at most OPEN_TRACES + DONE_TRACES traces are in memory. The oldest are dropped first, and counted.

OPEN_TRACES = 4096  # few updates are in flight at a time; more are incomplete ones
DONE_TRACES = 512  # finished updates that wait for late lines
LONGEST_TRACE_ID = 64  # ours have 16 characters

SERVER_EVENTS = frozenset({"server.recv", "rpc.start", "rpc.done"})
CLIENT_EVENTS = frozenset({"client.send", "client.done"})
CLOCK_SLACK_S = 0.001  # the clock of one machine is the same in all its processes; the lines are rounded


@dataclass(slots=True)
class UpdateTrace:
    """The known times of one update on the clocks of client and server, in seconds; the load when it was sent."""

    load: float | None = None
    sent: float | None = None
    done: Event | None = None
    received: float | None = None
    rpc_start: float | None = None
    rpc_done: float | None = None
    rpc_ms: float | None = None  # of the slowest engine, from the server's line
    server_line: Event | None = None


@dataclass(frozen=True, slots=True)
class LoggedUpdate:
    """A finished update, in milliseconds. `event` is the line to show. Without the client's half only rpc is known."""

    event: Event
    load: float | None
    rpc_ms: float | None
    wall_ms: float | None = None
    queue_ms: float | None = None
    in_server_ms: float | None = None  # of the queue: received, and not yet started


@dataclass(slots=True)
class UpdateCounts:
    """Counts of complete updates, and of updates with missing lines."""

    paired: int = 0  # both client and server lines
    client_only: int = 0  # finished, and no server line in the logs: normal where only the client's log was given
    server_only: int = 0
    unfinished: int = 0  # sent, and no client.done
    evicted: int = 0  # of these, given up early because too many were open
    untraced: int = 0  # lines without a trace id
    failed: int = 0  # engines that did not get an update


@dataclass(slots=True)
class ClockOffset:
    """Bounds of (server's clock - client's clock): the server cannot receive before the client sends, nor finish after
    the client is done. Seconds."""

    at_least: float = -math.inf
    at_most: float = math.inf

    def see(self, trace: UpdateTrace) -> None:
        if trace.received is not None and trace.sent is not None:
            self.at_most = min(self.at_most, trace.received - trace.sent)
        if trace.rpc_done is not None and trace.done is not None:
            self.at_least = max(self.at_least, trace.rpc_done - trace.done.t)

    @property
    def known(self) -> bool:
        return self.at_least > -math.inf or self.at_most < math.inf

    @property
    def same_clock(self) -> bool:
        return self.at_least - CLOCK_SLACK_S <= 0.0 <= self.at_most + CLOCK_SLACK_S


@dataclass(slots=True)
class UpdatePairing:
    """Takes `[weights]` events, hands every finished update to `finished`."""

    finished: Callable[[LoggedUpdate], None]
    halves: UpdateCounts = field(default_factory=UpdateCounts)
    offset: ClockOffset = field(default_factory=ClockOffset)
    _open: OrderedDict[str, UpdateTrace] = field(default_factory=OrderedDict)
    _done: OrderedDict[str, UpdateTrace] = field(default_factory=OrderedDict)

    def add(self, event: Event, load: float | None) -> None:
        """`load`: requests in generation at this line. Raises MalformedLineError."""
        if event.name not in SERVER_EVENTS | CLIENT_EVENTS:
            return
        name = event.fields.get("trace", "")[:LONGEST_TRACE_ID]
        if not name:
            self.halves.untraced += 1
            if event.name == "client.done":  # this line alone has all that is needed
                self._finish(_noted(UpdateTrace(load=load), event))
            return
        trace = self._done.get(name) or self._open.get(name) or UpdateTrace(load=load)
        _noted(trace, event)
        if event.name == "client.send":
            trace.load = load
        if name in self._done:
            return
        self._open[name] = trace
        if trace.done is not None:
            self._done[name] = self._open.pop(name)
            if len(self._done) > DONE_TRACES:
                self._finish(self._done.popitem(last=False)[1])
        elif len(self._open) > OPEN_TRACES:
            self.halves.evicted += 1
            self._finish(self._open.popitem(last=False)[1])

    def close(self) -> None:
        """Finish all updates in memory: the log has ended."""
        for table in (self._done, self._open):
            while table:
                self._finish(table.popitem(last=False)[1])

    def _finish(self, trace: UpdateTrace) -> None:
        self.offset.see(trace)
        server = trace.server_line is not None
        if trace.done is None and not server:
            self.halves.unfinished += 1
        elif trace.done is None:
            assert trace.server_line is not None
            self.halves.server_only += 1
            self.finished(
                LoggedUpdate(trace.server_line, trace.load, _server_rpc_ms(trace), in_server_ms=_in_server(trace))
            )
        else:
            self.halves.paired += server
            self.halves.client_only += not server
            self.halves.failed += int(trace.done.number("failed") or 0)
            self.finished(_update(trace, trace.done))


def _noted(trace: UpdateTrace, event: Event) -> UpdateTrace:
    """Copy the times of a line into `trace`. With several engines: the first reception, the last completion."""
    rpc_ms, sent = event.number("rpc_ms"), event.number("client.send")
    for key in ("wall_ms", "queue_ms", "failed"):
        event.number(key)  # raises now what a later read would raise
    if event.name == "client.send":
        trace.sent = event.t
    elif event.name == "client.done":
        trace.done = event
        trace.sent = sent if trace.sent is None else trace.sent
    else:
        trace.server_line = event
        if event.name == "server.recv":
            trace.received = event.t if trace.received is None else min(trace.received, event.t)
        elif event.name == "rpc.start":
            trace.rpc_start = event.t if trace.rpc_start is None else min(trace.rpc_start, event.t)
        else:
            trace.rpc_done = event.t if trace.rpc_done is None else max(trace.rpc_done, event.t)
            if rpc_ms is not None:
                trace.rpc_ms = max(rpc_ms, trace.rpc_ms or 0.0)
    return trace


def _update(trace: UpdateTrace, done: Event) -> LoggedUpdate:
    wall_ms = done.number("wall_ms")
    if wall_ms is None and trace.sent is not None:
        wall_ms = max(0.0, (done.t - trace.sent) * 1e3)
    rpc_ms = done.number("rpc_ms")
    if rpc_ms is None:
        rpc_ms = _server_rpc_ms(trace)
    queue_ms = done.number("queue_ms")
    if queue_ms is None and wall_ms is not None and rpc_ms is not None:
        queue_ms = max(0.0, wall_ms - rpc_ms)
    return LoggedUpdate(done, trace.load, rpc_ms, wall_ms, queue_ms, _in_server(trace))


def _server_rpc_ms(trace: UpdateTrace) -> float | None:
    if trace.rpc_ms is not None or trace.rpc_done is None or trace.rpc_start is None:
        return trace.rpc_ms
    return max(0.0, (trace.rpc_done - trace.rpc_start) * 1e3)


def _in_server(trace: UpdateTrace) -> float | None:
    if trace.received is None or trace.rpc_start is None:
        return None
    return max(0.0, (trace.rpc_start - trace.received) * 1e3)
