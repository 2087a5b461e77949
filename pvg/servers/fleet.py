"""The servers that have one model: which of them live, which weights each has, and which one gets the next request.

A server is *up*, *stale* (it lives, but its weights are not the newest: it missed an update, or was restarted), or
*away*. Every server is asked how it is at regular intervals, and at once when a request failed on it. A stale one is
caught up before it is used again; requests on a server that goes away are cut off, so that their callers can go on
elsewhere.

Invariant: `acquire` gives only servers that have the newest weights, and the one with the fewest requests among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pvg.config.sections import Serving
from pvg.errors import PvgError, ServerUnavailableError, StateError
from pvg.servers.control import ControlClient, DeliveryTiming, ServerInfo
from pvg.servers.labels import WeightLabel
from pvg.servers.pool import ConnectionBroken, ReplyTimeout, ServerFault, ServerUnreachable
from pvg.telemetry.events import Events

if TYPE_CHECKING:
    from pvg.servers.transports.transport import Transport

T = TypeVar("T")

State = Literal["away", "stale", "up"]
LONGEST_REST_S = 5.0
STOOD_STILL_S = 2.0  # by which a time limit may be late (aiohttp rounds up to seconds) without a doubt about ourselves


class StaleWeights(ServerFault):
    """A reply that came from other weights than the server was thought to have."""


@dataclass(slots=True, eq=False)
class Server:
    """One server. `label`: of the weights it has, and so the salt of its prefix cache."""

    url: str
    control: ControlClient
    state: State = "away"
    info: ServerInfo | None = None
    label: str = ""
    outstanding: int = 0
    fault: BaseException | None = None
    faults_in_a_row: int = 0
    rests_until: float = 0.0
    loading: bool = False  # it was sent weights and has not answered yet
    settled: bool = False  # the weights that it has are those of its label, for sure
    attempts: set[asyncio.Task[Any]] = field(default_factory=set)
    kicked: asyncio.Event = field(default_factory=asyncio.Event)

    async def attempt(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, a request to this server, until it is done or the server is given up (then: ConnectionBroken)."""
        task = asyncio.ensure_future(work)
        self.attempts.add(task)
        self.outstanding += 1
        try:
            await asyncio.wait([task])
        finally:
            self.outstanding -= 1
            self.attempts.discard(task)
            if not task.done():  # our own caller was cancelled: closing the connection tells the server
                task.cancel()
                await asyncio.wait([task])
            elif not task.cancelled():
                task.exception()  # seen, also where our caller was cancelled at the same moment
        if task.cancelled():
            raise ConnectionBroken(self.url, f"the server was given up: {self.fault}")
        self.faults_in_a_row = 0 if task.exception() is None else self.faults_in_a_row
        return task.result()


class Fleet:
    """Watches `controls` once opened. `catch_up(server)` brings the newest weights to a stale server and sets its
    label; a PvgError from it ends the run, a fault leaves the server where it is. All belongs to one event loop."""

    def __init__(
        self,
        controls: Sequence[ControlClient],
        section: Serving,
        events: Events,
        *,
        check: Callable[[ServerInfo], None],
        catch_up: Callable[[Server], Awaitable[None]],
    ) -> None:
        self.servers = tuple(Server(control.url, control) for control in controls)
        self.updating = asyncio.Lock()  # held while weights are being changed: nobody else looks at labels then
        self._section = section
        self._events = events
        self._check = check
        self._catch_up = catch_up
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._catching_up: asyncio.Task[None] | None = None

    @property
    def up(self) -> list[Server]:
        return [server for server in self.servers if server.state == "up"]

    @property
    def alive(self) -> list[Server]:
        """Those that can be sent weights: up or stale."""
        return [server for server in self.servers if server.state != "away"]

    async def look(self) -> None:
        """Ask every server once; those that answer are stale until they get weights. Raises what the user can mend,
        and ServerUnavailableError when none answers at all."""
        outcomes = await asyncio.gather(*(server.control.info() for server in self.servers), return_exceptions=True)
        for server, outcome in zip(self.servers, outcomes, strict=True):
            if isinstance(outcome, ServerInfo):
                self._check(outcome)
                server.info, server.label, server.state = outcome, outcome.label, "stale"
            elif isinstance(outcome, ServerFault):
                server.fault, server.state = outcome, "away"
            else:
                raise outcome
        if not self.alive:
            raise self._unavailable("No server answers")

    async def open(self) -> None:
        """`look`, and from here on watch them all."""
        self._failure = None
        await self.look()
        for server in self.servers:
            if server.state == "away":
                self._tell(server, "away")
        self._watchers = [asyncio.create_task(self._watch(server)) for server in self.servers]
        for watcher in self._watchers:
            watcher.add_done_callback(self._watcher_ended)

    async def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._failure = StateError("The engine is closed.", "Open a new one to go on sampling.")
        self._changed.set()
        for server in self.servers:
            self._cut_off(server)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def acquire(self, avoid: Server | None = None) -> Server:
        """The server for the next request: up, not resting after a fault, not `avoid`, and with the fewest requests,
        in this order of importance. Waits for one to be up; raises ServerUnavailableError when that takes too long."""
        deadline = time.monotonic() + self._section.unavailable_s
        while True:
            if self._failure is not None:
                raise self._failure
            if ready := self.up:
                now = time.monotonic()
                return min(ready, key=lambda s: (s.rests_until > now, s is avoid, s.outstanding))
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
            except TimeoutError:
                raise self._unavailable(f"No server has been up for {self._section.unavailable_s:g} s") from None

    def report(self, server: Server, fault: ServerFault) -> None:
        """A request failed on `server`: look at it now, and let it rest, longer with every fault in a row. Without the
        rest, a server that fails at once would seem to have the fewest requests, and get them all."""
        server.fault = fault
        server.faults_in_a_row += 1
        rest_s = min(LONGEST_REST_S, 0.05 * 2 ** min(10, server.faults_in_a_row))
        server.rests_until = time.monotonic() + rest_s
        if isinstance(fault, ServerUnreachable) and server.state == "up":
            self.lose(server, fault)
        elif isinstance(fault, StaleWeights) and server.state == "up":
            self._set(server, "stale")
        server.kicked.set()

    def lose(self, server: Server, fault: BaseException) -> None:
        """Give the server up until it answers again; its requests end as ConnectionBroken."""
        server.fault = fault
        self._set(server, "away")
        self._cut_off(server)

    async def deliver(
        self, servers: Sequence[Server], transport: Transport, label: WeightLabel, trace: str
    ) -> list[DeliveryTiming | BaseException]:
        """Have `transport` send what it staged last to `servers`; one outcome for each, in their order. While this
        lasts, silence is no reason to give a server up, and nobody knows which weights it has. The caller holds
        `updating`, and decides about those that failed."""
        for server in servers:
            server.loading, server.settled = True, False
        try:
            return await transport.send([server.control for server in servers], label, trace)
        finally:
            for server in servers:
                server.loading = False

    def arrived(self, server: Server, label: str) -> None:
        """The server has the newest weights."""
        server.label, server.settled = label, True
        server.faults_in_a_row, server.rests_until = 0, 0.0
        self._set(server, "up")

    # --- watching ----------------------------------------------------------------------------------------------------

    async def _watch(self, server: Server) -> None:
        """Ask the server again and again. Ends only by being cancelled, or with the failure that ends the run."""
        while self._failure is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.kicked.wait(), self._section.probe_every_s)
            server.kicked.clear()
            try:
                await self._look(server)
            except ServerFault as fault:
                if server.state != "away":
                    self.lose(server, fault)
                server.fault = fault
            except PvgError as error:
                self._failure = error
                self._changed.set()

    def _watcher_ended(self, watcher: asyncio.Task[None]) -> None:
        """A defect in a watcher must reach those who wait for servers."""
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            self._failure = error
            self._changed.set()

    async def _look(self, server: Server) -> None:
        asked = time.monotonic()
        try:
            info = await server.control.info()
            self._check(info)
        except ReplyTimeout:
            # A core that loads weights answers nobody; the update has a time limit of its own. And when more time has
            # passed than the probe was given, it was this process that stood still.
            stood_still = time.monotonic() - asked > self._section.probe_timeout_s + STOOD_STILL_S
            if server.loading or stood_still:
                return
            raise
        except PvgError as error:  # something else listens there now, or has another key: no use, but others may be
            self.lose(server, error)
            return
        async with self.updating:
            restarted = server.info is not None and info.boot != server.info.boot
            server.info = info
            if restarted:
                self._cut_off(server)
                self._set(server, "stale")
            if server.state == "up" and not restarted:
                return  # whether its label is right, its tokens tell: `info` may be older than the last update
            self._catching_up = asyncio.ensure_future(self._catch_up(server))
            try:
                await asyncio.wait([self._catching_up])
            finally:
                self._catching_up.cancel()
            if not self._catching_up.cancelled():
                self._catching_up.result()

    def interrupt_catching_up(self) -> None:
        """Newer weights are waiting for `updating`: the server that is being caught up gets those, when they are out.
        A single server that hangs at this must not keep the others from them."""
        if self._catching_up is not None:
            self._catching_up.cancel()

    def _set(self, server: Server, state: State) -> None:
        if server.state != state:
            server.state = state
            self._tell(server, state)
        self._changed.set()

    def _cut_off(self, server: Server) -> None:
        for attempt in list(server.attempts):
            attempt.cancel()

    def _tell(self, server: Server, state: State) -> None:
        why = {"why": str(server.fault)} if state == "away" and server.fault is not None else {}
        self._events.event("gen", event=f"server.{state}", server=server.url, **why)

    def _unavailable(self, what: str) -> ServerUnavailableError:
        told = "; ".join(f"{s.fault or s.url}" for s in self.servers)
        return ServerUnavailableError(
            f"{what}: {told}.", "Start one with `pvg serve EXPERIMENT`, or set serving.servers to where they are."
        )
