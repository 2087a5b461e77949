"""The `Transport` protocol: how weight updates reach vLLM servers, and delivery with verification (`deliver`).

A broken connection or a missing reply does not show whether an update happened. But a server can be asked which weights
it has, and sending the same label twice is harmless. So `deliver` finds out:

    fault               asked       then
    ServerUnreachable   no          one more attempt after a pause: nothing was sent
    ConnectionBroken,
    ReplyTimeout,
    MalformedReply      yes         has it: delivered, times unknown; has it not: one more attempt; no answer: the fault
    RefusedRequest      no          the fault: a server that refuses is not asked twice
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from pvg.errors import PvgError
from pvg.servers.control import ControlClient, DeliveryTiming
from pvg.servers.pool import (
    ConnectionBroken,
    MalformedReply,
    ReplyTimeout,
    ServerFault,
    ServerUnreachable,
    pause_before_retry,
)
from pvg.servers.publishing import WeightLabel, WeightUpdate


class Transport(Protocol):
    """Delivers one update at a time to servers. `stage` copies what `send` needs from the tensors.

    `publish` calls `stage`, `send` to the servers that are up, and `retire`. A server that comes back later gets the
    newest weights by `send` alone, at any time before the next `stage`. A transport does not know how many servers
    there are. An error among the outcomes loses that server; for a server that comes back, a PvgError ends the run.
    """

    adapters: bool  # versions are adapters that coexist: each request names its version, and updates pause nothing

    def model_of(self, label: WeightLabel) -> str | None:
        """The model name in requests for these weights; None for the server's only model, which needs no name."""

    async def stage(self, update: WeightUpdate, label: WeightLabel) -> None:
        """Prepare the update once for all servers; each label once. Raises MissingRequirementError if the disk is full,
        and ConfigurationError for weights that this transport cannot carry. Then nothing is left behind."""

    async def send(
        self, servers: Sequence[ControlClient], label: WeightLabel, trace: str
    ) -> list[DeliveryTiming | BaseException]:
        """Deliver the update staged last, under `label`, to all `servers` concurrently. Returns one outcome per server,
        in order: a DeliveryTiming, or the ServerFault or PvgError that prevented it. Raises any other error. Can be
        called again for servers that were away, and for those that already have it."""

    async def retire(self, servers: Sequence[ControlClient], in_use: Sequence[WeightLabel]) -> None:
        """Drop versions that are neither `in_use` nor among the newest to keep. `servers`: the reachable ones."""

    async def close(self) -> None:
        """Drop everything that was staged. Servers keep what they have loaded."""


# --- delivery --------------------------------------------------------------------------------------------------------

# The only part of a delivery that was verified afterwards: its work, pauses and queueing were not measured.
UNKNOWN_PART = "unknown_ms"

# How long after the first delivery the others may still take. A server that exceeds this catches up later.
LATE_S, LATE_TIMES = 30.0, 4.0

Attempt = Callable[[ControlClient], Awaitable[DeliveryTiming]]
HasArrived = Callable[[ControlClient], Awaitable[bool]]


async def deliver(
    servers: Sequence[ControlClient], label: WeightLabel, attempt: Attempt, has_arrived: HasArrived
) -> list[DeliveryTiming | BaseException]:
    """Run `attempt` at all `servers` concurrently. Returns one outcome per server, in order: a DeliveryTiming, a
    ServerFault or a PvgError. Raises any other error once all are done. A server that hangs delays the others only by
    the limit of `_until_done_or_left_behind`."""
    tasks = [asyncio.ensure_future(_deliver_to(server, label, attempt, has_arrived)) for server in servers]
    try:
        late_s = await _until_done_or_left_behind(tasks)
    finally:
        for task in tasks:
            task.cancel()
        found: list[DeliveryTiming | BaseException] = await asyncio.gather(*tasks, return_exceptions=True)
    late = f"the other servers took the weights {late_s:.0f} s ago"
    outcomes = [
        ReplyTimeout(server.url, late) if isinstance(outcome, asyncio.CancelledError) else outcome
        for server, outcome in zip(servers, found, strict=True)
    ]
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, (ServerFault, PvgError)):
            raise outcome
    return outcomes


async def _until_done_or_left_behind(tasks: Sequence[asyncio.Task[DeliveryTiming]]) -> float:
    """Wait until all are done, or until LATE_S plus LATE_TIMES the duration of the first delivery have passed since it.
    Returns the seconds since the first delivery."""
    started, first, waiting = time.perf_counter(), math.inf, set(tasks)
    while waiting:
        took_s = first - started
        timeout = None if first == math.inf else first + LATE_S + LATE_TIMES * took_s - time.perf_counter()
        done, waiting = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            break
        if first == math.inf and any(task.exception() is None for task in done):
            first = time.perf_counter()
    return time.perf_counter() - first


async def _deliver_to(
    server: ControlClient, label: WeightLabel, attempt: Attempt, has_arrived: HasArrived
) -> DeliveryTiming:
    started = time.perf_counter()
    for attempts_left in (1, 0):
        try:
            return await attempt(server)
        except ServerUnreachable:
            if not attempts_left:
                raise
            await pause_before_retry(1, random.random())
        except (ConnectionBroken, ReplyTimeout, MalformedReply) as fault:
            if await _known(has_arrived(server), fault):
                return confirmed_delivery(server, label, started)
            if not attempts_left:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


async def _known(answer: Awaitable[bool], fault: ServerFault) -> bool:
    """The answer; raises `fault`, which made the question necessary, if the server gives none."""
    try:
        return await answer
    except ServerFault:
        raise fault from None


def confirmed_delivery(server: ControlClient, label: WeightLabel, started: float) -> DeliveryTiming:
    """A delivery that the server confirms although no reply arrived: all its time is UNKNOWN_PART, and its time of
    arrival is unknown (0). `started` is a time.perf_counter()."""
    wall_ms = (time.perf_counter() - started) * 1e3
    return DeliveryTiming(
        url=server.url, label=label, wall_ms=wall_ms, rpc_ms=wall_ms, received_ns=0, parts={UNKNOWN_PART: wall_ms}
    )
