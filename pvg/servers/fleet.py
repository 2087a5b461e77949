"""`Fleet`: the servers of one model, their state and weights, and the choice of a server for each request.

A server is *up*, *stale* (alive, but its weights are not the newest, because it missed an update or was restarted), or
*away*. Every server is probed at regular intervals, and immediately after a failed request. A stale server catches up
before it is used again. When a server goes away, its requests are cancelled so that their callers can retry elsewhere.
Servers can be added and removed at run time. A new server catches up before it gets requests. A server that is
*leaving* gets no more requests and no more weights.

Invariant: `acquire` returns only servers with the newest weights, and among them the one with the fewest requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pvg.config.operation import Serving
from pvg.errors import PvgError, ServerUnavailableError, StateError
from pvg.servers.control import ControlClient, DeliveryTiming, ServerInfo
from pvg.servers.pool import ConnectionBroken, ReplyTimeout, ServerFault, ServerUnreachable
from pvg.servers.publishing import WeightLabel
from pvg.telemetry.events import Events
from pvg.telemetry.waits import LagWindow, LoopLagMonitor

if TYPE_CHECKING:
    from pvg.servers.transports import Transport

T = TypeVar("T")

State = Literal["away", "stale", "up"]
LONGEST_REST_S = 5.0
SILENCE_S = 300.0  # longer than most requests take
LAG_HZ = 20.0  # ticks per second that measure our own event loop during a probe


class StaleWeights(ServerFault):
    """A reply from weights other than those the server was believed to have."""


@dataclass(slots=True, eq=False)
class Server:
    """One server. `label` names its weights and is the salt of its prefix cache."""

    url: str
    control: ControlClient
    state: State = "away"
    info: ServerInfo | None = None
    label: str = ""
    outstanding: int = 0
    fault: BaseException | None = None
    faults_in_a_row: int = 0
    rests_until: float = 0.0
    loading: bool = False  # weights were sent, and it has not answered yet
    settled: bool = False  # its weights are certainly those of its label
    leaving: bool = False  # it is being removed
    asleep: bool = False  # its GPU memory is free for others
    interruptions: int = 0  # times that newer weights stopped it from catching up, since it last had the newest
    heard_at: float = 0.0  # when its last answer to a request came, by `time.monotonic`
    told_silence_of: float = 0.0  # the `silent_since` of the last server.silent event
    attempts: dict[asyncio.Task[Any], float] = field(default_factory=dict)  # oldest first, with their starts
    probe_now: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def silent_since(self) -> float:
        """When its last answer came, or when its oldest request in flight was sent, if that is later."""
        return max(self.heard_at, next(iter(self.attempts.values()), 0.0))

    async def attempt(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, a request to this server. Raises ConnectionBroken if the server goes away first."""
        task = asyncio.ensure_future(work)
        self.attempts[task] = time.monotonic()
        self.outstanding += 1
        try:
            await asyncio.wait([task])
        finally:
            self.outstanding -= 1
            del self.attempts[task]
            if not task.done():  # our caller was cancelled: closing the connection tells the server
                task.cancel()
                await asyncio.wait([task])
            elif not task.cancelled():
                task.exception()  # marks it as retrieved, even if our caller was cancelled at the same moment
        if task.cancelled():
            raise ConnectionBroken(self.url, f"the server was given up: {self.fault}")
        if task.exception() is None:
            self.faults_in_a_row, self.heard_at = 0, time.monotonic()
        return task.result()


class Fleet:
    """Watches `controls` once opened. `catch_up(server)` sends the newest weights to a stale server and sets its label.
    A PvgError from it ends the run; a fault leaves the server's state unchanged. `remedy`: what to do if no server is
    available. Belongs to one event loop."""

    def __init__(
        self,
        controls: Sequence[ControlClient],
        section: Serving,
        events: Events,
        *,
        check: Callable[[ServerInfo], None],
        catch_up: Callable[[Server], Awaitable[None]],
        remedy: str,
    ) -> None:
        self.servers = [Server(control.url, control) for control in controls]
        self.updating = asyncio.Lock()  # held while weights change; labels are valid only under this lock
        self.resting = False  # servers sleep, and none gets weights before they wake
        self.starting = 0  # servers that will be up soon: requests wait for them, however long it takes
        self._section = section
        self._events = events
        self._check = check
        self._catch_up = catch_up
        self._remedy = remedy
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._watching = False
        self._watchers: dict[Server, asyncio.Task[None]] = {}
        self._catching_up: tuple[Server, asyncio.Task[None]] | None = None

    @property
    def up(self) -> list[Server]:
        return [server for server in self.servers if server.state == "up" and not server.leaving]

    @property
    def alive(self) -> list[Server]:
        """Servers that can receive weights: up or stale."""
        return [server for server in self.servers if server.state != "away" and not server.leaving]

    async def look(self) -> None:
        """Probe every server once. Those that answer are stale until they get weights. Raises errors that the user can
        fix, and ServerUnavailableError if no server answers."""
        servers = list(self.servers)
        outcomes = await asyncio.gather(*(server.control.info() for server in servers), return_exceptions=True)
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, ServerInfo):
                self._check(outcome)
                server.info, server.label, server.state = outcome, outcome.label, "stale"
                server.asleep = outcome.asleep
            elif isinstance(outcome, ServerFault):
                server.fault, server.state = outcome, "away"
            else:
                raise outcome
        if not self.alive:
            raise self._unavailable("No server answers")

    async def open(self) -> None:
        """`look`, then watch all servers."""
        self._failure = None
        await self.look()
        for server in self.servers:
            if server.state == "away":
                self._tell(server, "away")
        self._watching = True
        for server in self.servers:
            self._start_watching(server)

    async def close(self) -> None:
        self._watching = False
        await self._stop_watching(list(self._watchers))
        self._failure = StateError("The connections to the servers are closed.", "Open a new engine to continue.")
        self._changed.set()
        for server in self.servers:
            self._cut_off(server)

    def fail(self, error: BaseException) -> None:
        """End the run: tasks that wait for a server raise `error`, and so do those that will."""
        self._failure = error
        self._changed.set()

    # --- membership --------------------------------------------------------------------------------------------------

    def add(self, control: ControlClient) -> Server:
        """Add a server, which is away until it answers. It gets requests once it has caught up. Raises StateError if it
        belongs to the fleet already."""
        if any(server.url == control.url for server in self.servers):
            raise StateError(f"{control.url} is in use already.", "Name each server once.")
        server = Server(control.url, control)
        self.servers.append(server)
        self._events.event("gen", event="server.added", server=server.url)
        if self._watching:
            server.probe_now.set()  # probe it now
            self._start_watching(server)
        return server

    async def remove(self, url: str, *, drain_s: float | None = None) -> None:
        """Remove a server. It gets no more requests. Those in flight have `drain_s` seconds to end (None: no limit);
        then they are cancelled, and their callers retry elsewhere. Raises StateError if there is no such server."""
        server = next((server for server in self.servers if server.url == url and not server.leaving), None)
        if server is None:
            raise StateError(f"{url} is not in use.", "Name a server by the URL with which it was added.")
        server.leaving = True
        try:
            if server.attempts:
                await asyncio.wait(server.attempts, timeout=drain_s)
        finally:  # also if the caller is cancelled while it waits
            self.servers.remove(server)
            server.fault = ConnectionBroken(url, "the server was removed")
            self._cut_off(server)
            self._events.event("gen", event="server.removed", server=url)
            await self._stop_watching([server])

    # --- requests ----------------------------------------------------------------------------------------------------

    async def acquire(self, avoid: Server | None = None) -> Server:
        """The server for the next request, among those that are up. Prefers servers that do not rest after a fault,
        then any server but `avoid`, then the one with the fewest requests. Waits for a server to be up; raises
        ServerUnavailableError after `serving.unavailable_s`, unless servers are being started (`starting`)."""
        deadline = time.monotonic() + self._section.unavailable_s
        while True:
            if self._failure is not None:
                raise self._failure
            if ready := self.up:
                now = time.monotonic()
                return min(ready, key=lambda s: (s.rests_until > now, s is avoid, s.outstanding))
            self._changed.clear()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):  # not `wait_for`: see `_watch`
                    await self._changed.wait()
            except TimeoutError:
                if not self.starting:
                    raise self._unavailable(f"No server has been up for {self._section.unavailable_s:g} s") from None
                deadline = time.monotonic() + self._section.unavailable_s

    def report(self, server: Server, fault: ServerFault) -> None:
        """A request failed on `server`: probe it now and let it rest, longer with every consecutive fault. Without the
        rest, a server that fails fast would have the fewest requests and attract all others."""
        if server.state != "away":  # else the known fault is the cause of this one
            server.fault = fault
        server.faults_in_a_row += 1
        rest_s = min(LONGEST_REST_S, 0.05 * 2 ** min(10, server.faults_in_a_row))
        server.rests_until = time.monotonic() + rest_s
        if isinstance(fault, ServerUnreachable) and server.state == "up":
            self.lose(server, fault)
        elif isinstance(fault, StaleWeights) and server.state == "up":
            self._set(server, "stale")
        server.probe_now.set()

    def lose(self, server: Server, fault: BaseException) -> None:
        """Mark the server as away until it answers again, and cancel its requests."""
        server.fault = fault
        self._set(server, "away")
        self._cut_off(server)

    async def deliver(
        self, servers: Sequence[Server], transport: Transport, label: WeightLabel, trace: str
    ) -> list[DeliveryTiming | BaseException]:
        """Let `transport` send the version that it staged last to `servers`. Returns one outcome per server, in order.
        Meanwhile a server may be silent, and its weights are unknown. The caller holds `updating` and handles
        failures."""
        for server in servers:
            server.loading, server.settled = True, False
        try:
            return await transport.send([server.control for server in servers], label, trace)
        finally:
            for server in servers:
                server.loading = False

    async def sleep(self, gpu: str, level: int) -> None:
        """Let the servers on this GPU sleep (see ControlClient.sleep) until `wake`. The caller holds `updating`, and no
        request is in flight. Level 2 makes them stale. One that fails is lost."""
        servers = [s for s in self.up if s.info is not None and s.info.gpus == gpu and not s.asleep]
        for server in servers:
            server.asleep = self.resting = True
        await self._tell_each(servers, lambda server: server.control.sleep(level))
        for server in servers:
            if level == 2 and server.state == "up":
                self._set(server, "stale")

    async def wake(self) -> None:
        """Wake all servers that sleep, also those that another process sent to sleep. The caller holds `updating`. One
        that fails is lost."""
        servers = [server for server in self.alive if server.asleep]
        await self._tell_each(servers, lambda server: server.control.wake())
        self.resting = False
        for server in servers:
            server.asleep = False
        for server in self.servers:
            if server.state != "up":
                server.probe_now.set()  # it may have to catch up

    async def _tell_each(self, servers: Sequence[Server], call: Callable[[Server], Awaitable[None]]) -> None:
        """Meanwhile a server may be silent."""
        for server in servers:
            server.loading = True
        try:
            outcomes = await asyncio.gather(*map(call, servers), return_exceptions=True)
        finally:
            for server in servers:
                server.loading = False
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, ServerFault):
                self.lose(server, outcome)
            elif outcome is not None:
                raise outcome

    def arrived(self, server: Server, label: str) -> None:
        """Record that the server has the newest weights."""
        server.label, server.settled, server.interruptions, server.asleep = label, True, 0, False
        server.faults_in_a_row, server.rests_until = 0, 0.0
        self._set(server, "up")

    # --- watching ----------------------------------------------------------------------------------------------------

    def _start_watching(self, server: Server) -> None:
        self._watchers[server] = asyncio.create_task(self._watch(server))
        self._watchers[server].add_done_callback(self._watcher_ended)

    async def _stop_watching(self, servers: Sequence[Server]) -> None:
        watchers = [self._watchers.pop(server) for server in servers if server in self._watchers]
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)

    async def _watch(self, server: Server) -> None:
        """Probe the server repeatedly. Ends only by cancellation, or with the failure that ends the run."""
        while self._failure is None:
            with contextlib.suppress(TimeoutError):
                # Not `wait_for`: in Python 3.11 it ignores a cancellation in the moment in which the event is set.
                async with asyncio.timeout(self._section.probe_every_s):
                    await server.probe_now.wait()
            server.probe_now.clear()
            try:
                await self._look(server)
                self._tell_silence(server)
            except ServerFault as fault:
                if server.state != "away":
                    self.lose(server, fault)
                server.fault = fault
            except PvgError as error:
                self.fail(error)

    def _watcher_ended(self, watcher: asyncio.Task[None]) -> None:
        """If a watcher crashes, the tasks that wait for servers raise its error."""
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            self.fail(error)

    async def _look(self, server: Server) -> None:
        asked, lag = time.monotonic(), LoopLagMonitor(LAG_HZ)
        try:
            async with lag:
                info = await server.control.info()
            self._check(info)
        except (ReplyTimeout, ServerUnreachable) as fault:
            # An engine that loads weights does not answer, and the update has its own timeout. A server that answered
            # requests meanwhile is slow, but alive.
            excused = isinstance(fault, ReplyTimeout) and (server.loading or server.heard_at > asked)
            if excused or _stalled(lag.take()):
                return
            raise
        except PvgError as error:  # another program or key is there now: unusable, but other servers may be fine
            self.lose(server, error)
            return
        async with self.updating:
            restarted = server.info is not None and info.boot != server.info.boot
            server.info = info
            if restarted or server.state == "away":
                server.asleep = info.asleep
            if restarted:
                server.interruptions = 0
                self._cut_off(server)
                self._set(server, "stale")
            if self.resting or server.leaving or (server.state == "up" and not restarted):
                return  # its tokens show whether its label is right; `info` may be older than the last update
            task = asyncio.ensure_future(self._return(server))
            self._catching_up = server, task
            try:
                await asyncio.wait([task])
            finally:
                self._catching_up = None
                task.cancel()
            if not task.cancelled():
                task.result()

    async def _return(self, server: Server) -> None:
        """Wake the server if it sleeps, because not every transport does, and bring it the newest weights."""
        if server.asleep:
            await server.control.wake()
            server.asleep = False
        await self._catch_up(server)

    def _tell_silence(self, server: Server) -> None:
        """Report once that a server that answers probes has not answered its requests for SILENCE_S. They have no
        timeout by default, because a long completion may take that long."""
        since = server.silent_since
        if server.attempts and time.monotonic() - since > SILENCE_S and since != server.told_silence_of:
            server.told_silence_of = since
            requests = len(server.attempts)
            self._events.event("gen", event="server.silent", server=server.url, requests=requests, silent_s=SILENCE_S)

    def interrupt_catching_up(self) -> None:
        """Stop catching up a server, because newer weights wait for `updating`. So one server that hangs while catching
        up does not delay the others. The server gets the newer weights afterwards.

        A server that loads for longer than a training step would be interrupted forever. So the second interruption
        makes it stale, and it gets the newer weights together with the others. It gets only one such chance: if it
        hangs, it delays one update."""
        if self._catching_up is None:
            return
        server, task = self._catching_up
        task.cancel()
        server.interruptions += 1
        if server.interruptions == 2:
            self._set(server, "stale")

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
        faults = "; ".join(f"{s.fault or s.url}" for s in self.servers)
        return ServerUnavailableError(f"{what}: {faults or 'there is none'}.", self._remedy)


def _stalled(lags: LagWindow | None) -> bool:
    """Whether our own event loop stood still for half of a probe: most ticks came later than the next one was due. Then
    the request was perhaps not sent, or its reply not read, and the timeout says nothing about the server."""
    return lags is not None and lags.p50_s > 1 / LAG_HZ
