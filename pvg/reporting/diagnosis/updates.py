"""Weight updates: the halves that client and server wrote, paired by trace id.

A client's line may stand before or after the server's lines of the same update, in the same log or in another. The two
may have monotonic clocks of different machines, so only differences on one clock are taken: `wall` is the client's,
`rpc` the client's or the server's, `queue` = wall - rpc.

Invariant: at most OPEN_TRACES + DONE_TRACES traces are held; the oldest are given up first, and counted.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from pvg.reporting.diagnosis.lines import Event

OPEN_TRACES = 4096  # updates in flight at a time are few; more are torn ones
DONE_TRACES = 512  # how long a finished update waits for lines that come late
LONGEST_TRACE_ID = 64  # ours have 16 characters

SERVER_EVENTS = frozenset({"server.recv", "rpc.start", "rpc.done"})
CLIENT_EVENTS = frozenset({"client.send", "client.done"})
CLOCK_SLACK_S = 0.001  # the clock of one machine is the same in all its processes; the lines are rounded


@dataclass(slots=True)
class Trace:
    """One update as far as it is known: moments on the client's and on the server's clock, seconds; load when sent."""

    load: float | None = None
    sent: float | None = None
    done: Event | None = None
    received: float | None = None
    rpc_start: float | None = None
    rpc_done: float | None = None
    rpc_ms: float | None = None  # of the slowest engine, as the server tells it
    server_line: Event | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """A finished update, in milliseconds. `event` is the line to show. Without the client's half only rpc is known."""

    event: Event
    load: float | None
    rpc_ms: float | None
    wall_ms: float | None = None
    queue_ms: float | None = None
    in_server_ms: float | None = None  # of the queue: received, and not yet started


@dataclass(slots=True)
class Halves:
    """What was found of the updates: whole ones, and the lines that were missing."""

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

    def see(self, trace: Trace) -> None:
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
class Pairing:
    """Takes `[weights]` events, hands every finished update to `finished`."""

    finished: Callable[[Update], None]
    halves: Halves = field(default_factory=Halves)
    offset: ClockOffset = field(default_factory=ClockOffset)
    _open: OrderedDict[str, Trace] = field(default_factory=OrderedDict)
    _done: OrderedDict[str, Trace] = field(default_factory=OrderedDict)

    def add(self, event: Event, load: float | None) -> None:
        """`load`: requests in generation at this line. Raises MalformedLineError."""
        if event.name not in SERVER_EVENTS | CLIENT_EVENTS:
            return
        name = event.fields.get("trace", "")[:LONGEST_TRACE_ID]
        if not name:
            self.halves.untraced += 1
            if event.name == "client.done":  # it says all that is needed
                self._finish(_noted(Trace(load=load), event))
            return
        trace = self._done.get(name) or self._open.get(name) or Trace(load=load)
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
        """The log is at its end: what is still held is finished, or never will be."""
        for table in (self._done, self._open):
            while table:
                self._finish(table.popitem(last=False)[1])

    def _finish(self, trace: Trace) -> None:
        self.offset.see(trace)
        server = trace.server_line is not None
        if trace.done is None and not server:
            self.halves.unfinished += 1
        elif trace.done is None:
            assert trace.server_line is not None
            self.halves.server_only += 1
            self.finished(Update(trace.server_line, trace.load, _server_rpc_ms(trace), in_server_ms=_in_server(trace)))
        else:
            self.halves.paired += server
            self.halves.client_only += not server
            self.halves.failed += int(trace.done.number("failed") or 0)
            self.finished(_update(trace, trace.done))


def _noted(trace: Trace, event: Event) -> Trace:
    """Write into `trace` what the line says. With several engines: the first to receive, the last to be done."""
    rpc_ms, sent = event.number("rpc_ms"), event.number("client.send")
    for key in ("wall_ms", "queue_ms", "failed"):
        event.number(key)  # whatever is read later must not raise then
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


def _update(trace: Trace, done: Event) -> Update:
    wall_ms = done.number("wall_ms")
    if wall_ms is None and trace.sent is not None:
        wall_ms = max(0.0, (done.t - trace.sent) * 1e3)
    rpc_ms = done.number("rpc_ms")
    if rpc_ms is None:
        rpc_ms = _server_rpc_ms(trace)
    queue_ms = done.number("queue_ms")
    if queue_ms is None and wall_ms is not None and rpc_ms is not None:
        queue_ms = max(0.0, wall_ms - rpc_ms)
    return Update(done, trace.load, rpc_ms, wall_ms, queue_ms, _in_server(trace))


def _server_rpc_ms(trace: Trace) -> float | None:
    if trace.rpc_ms is not None or trace.rpc_done is None or trace.rpc_start is None:
        return trace.rpc_ms
    return max(0.0, (trace.rpc_done - trace.rpc_start) * 1e3)


def _in_server(trace: Trace) -> float | None:
    if trace.received is None or trace.rpc_start is None:
        return None
    return max(0.0, (trace.rpc_start - trace.received) * 1e3)
