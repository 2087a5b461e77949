"""The `Transport` protocol: how the weights of an update get into vLLM servers."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from pvg.errors import PvgError
from pvg.servers.control import ControlClient, DeliveryTiming
from pvg.servers.labels import WeightLabel
from pvg.servers.pool import (
    ConnectionBroken,
    MalformedReply,
    ReplyTimeout,
    ServerFault,
    ServerUnreachable,
    pause_before_retry,
)
from pvg.servers.update import WeightUpdate


class Transport(Protocol):
    """Brings one update at a time to servers. What `send` needs from the tensors it has taken when `stage` returns."""

    @property
    def adapters(self) -> bool:
        """Whether versions are adapters that live side by side: requests name theirs, and nothing is paused."""
        ...

    async def stage(self, update: WeightUpdate, label: WeightLabel) -> None:
        """Make the update ready, once for all servers. Each label once. Raises MissingRequirementError when the disk is
        full, ConfigurationError for weights that cannot travel this way; nothing is left behind then."""
        ...

    async def send(
        self, servers: Sequence[ControlClient], label: WeightLabel, trace: str
    ) -> list[DeliveryTiming | BaseException]:
        """Deliver what was staged last, under `label`, to all `servers` at once; one outcome per server, in their
        order: a DeliveryTiming, or the ServerFault or PvgError that prevented it. Anything else is raised. May be
        called again for servers that were away, and for such as have it already."""
        ...

    async def retire(self, servers: Sequence[ControlClient], in_use: Sequence[WeightLabel]) -> None:
        """Let go of versions that are neither `in_use` nor among the newest that are to be kept. `servers` are those
        that can be told."""
        ...

    async def close(self) -> None:
        """Let go of everything that was staged. Servers keep what they have loaded."""
        ...


# One update to several servers at once, and what became of it at each: a delivery, or the fault that prevented it.
#
# A connection that breaks, or a reply that does not come, does not tell whether the update happened. A server can be
# asked which weights it has, and to be sent the same label twice is harmless (protocol 1), so the answer is found
# out:
#
#     fault               asked   then
#     ServerUnreachable   no      one more attempt after a pause: nothing was sent
#     ConnectionBroken,
#     ReplyTimeout,
#     MalformedReply      yes     has it: delivered, times unknown; has it not: one more attempt; no answer: fault
#     RefusedRequest      no      the fault: a server that says no is not asked twice

# The one part of a delivery that was found out afterwards: nobody measured its work, its pauses or its queueing.
UNKNOWN_PART = "unknown_ms"

# How much later than the first server another may be before it is given up. It is caught up when it answers.
LATE_S, LATE_TIMES = 30.0, 4.0

Attempt = Callable[[ControlClient], Awaitable[DeliveryTiming]]
HasArrived = Callable[[ControlClient], Awaitable[bool]]


async def deliver(
    servers: Sequence[ControlClient], label: WeightLabel, attempt: Attempt, has_arrived: HasArrived
) -> list[DeliveryTiming | BaseException]:
    """`attempt` at all `servers` at once. One outcome for each, in their order: a DeliveryTiming, a ServerFault or a
    PvgError; anything else is a defect and is raised when all are through. A server that hangs does not hold the others
    for the time limit of a call: see `_until_done_or_left_behind`."""
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
    """Until all are done, or for so long after the first delivery: LATE_S, and LATE_TIMES what that one took. Returns
    the seconds since the first."""
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
                return found_delivered(server, label, started)
            if not attempts_left:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


async def _known(answer: Awaitable[bool], fault: ServerFault) -> bool:
    """The answer; `fault`, which made it necessary, when the server gives none."""
    try:
        return await answer
    except ServerFault:
        raise fault from None


def found_delivered(server: ControlClient, label: WeightLabel, started: float) -> DeliveryTiming:
    """A delivery that a server knows of and this side saw no reply to: all its time is UNKNOWN_PART, and when it was
    received is unknown too (0). `started` is a time.perf_counter()."""
    wall_ms = (time.perf_counter() - started) * 1e3
    return DeliveryTiming(
        url=server.url, label=label, wall_ms=wall_ms, rpc_ms=wall_ms, received_ns=0, parts={UNKNOWN_PART: wall_ms}
    )
