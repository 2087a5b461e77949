"""Probes of a fleet in an event loop with a clock that the test moves: time passes only while all tasks wait."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from pvg.config.operation import Serving
from pvg.servers import fleet as fleets
from pvg.servers.control import ServerInfo
from pvg.servers.fleet import Fleet
from pvg.servers.pool import ReplyTimeout, ServerFault, ServerUnreachable
from pvg.telemetry.events import SilentEvents
from pvg.telemetry.waits import LoopLagMonitor

URL = "http://server"
TIMEOUT_S = 8.0
INFO = ServerInfo(URL, "boot", "0", "model", "", "generate", "float32", 64, 8, True, "", 0, "", False, "", False, 1)
Fault = Callable[[str, str], ServerFault]


class Clock(selectors.DefaultSelector):
    """Moves `now` by as long as the event loop would wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)


class ClockedLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.clock = clock

    def time(self) -> float:
        return self.clock.now


class Control:
    """A server that answers its first probe. `silent`: what happens in each later one, before it fails."""

    url = URL

    def __init__(self, silent: Callable[[], Awaitable[None]], fault: Fault) -> None:
        self.probes = 0
        self._silent = silent
        self._fault = fault

    async def info(self) -> ServerInfo:
        self.probes += 1
        if self.probes == 1:
            return INFO
        await self._silent()
        raise self._fault(URL, "no reply")


def state_after(
    probes: int, silent: Callable[[Clock], Awaitable[None]], fault: Fault, patch: pytest.MonkeyPatch
) -> str:
    """The state of an up server after failed probes."""
    clock = Clock()
    patch.setattr(fleets, "LoopLagMonitor", partial(LoopLagMonitor, clock=lambda: clock.now))

    async def caught_up(server: Any) -> None: ...

    async def work() -> str:
        control: Any = Control(partial(silent, clock), fault)
        patch.setattr(Serving, "probe_timeout_s", TIMEOUT_S)
        fleet = Fleet(
            [control], Serving(), SilentEvents(), check=lambda info: None, catch_up=caught_up, remedy="Start one."
        )
        await fleet.open()
        (server,) = fleet.servers
        fleet.arrived(server, "label")
        while control.probes <= probes + 1:  # the last probe is only begun
            await asyncio.sleep(0.01)
            if server.state == "away":
                break
        await fleet.close()
        return server.state

    with asyncio.Runner(loop_factory=lambda: ClockedLoop(clock)) as runner:
        return runner.run(work())


async def a_stall_across_the_timeout(clock: Clock) -> None:
    """Less than 2 s beyond the timeout, but the request could not be sent before."""
    await asyncio.sleep(0.1)
    clock.now += TIMEOUT_S + 1.5  # no task runs for so long
    await asyncio.sleep(0)


async def no_stall(clock: Clock) -> None:
    await asyncio.sleep(TIMEOUT_S)


async def at_once(clock: Clock) -> None: ...


@pytest.mark.parametrize(
    ("silent", "fault", "state"),
    [
        (a_stall_across_the_timeout, ReplyTimeout, "up"),
        (a_stall_across_the_timeout, ServerUnreachable, "up"),
        (no_stall, ReplyTimeout, "away"),
        (at_once, ServerUnreachable, "away"),
    ],
)
def test_a_server_is_blamed_but_not_for_stalls_of_our_own_event_loop(
    silent: Callable[[Clock], Awaitable[None]], fault: Fault, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert state_after(3, silent, fault, monkeypatch) == state
