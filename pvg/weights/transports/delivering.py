"""One update to several servers at once, and what became of it at each: a delivery, or the fault that prevented it.

A connection that breaks, or a reply that does not come, does not tell whether the update happened. A server can be
asked which weights it has, and to be sent the same label twice is harmless (protocol 1), so the answer is found out:

    fault         asked       then
    Unreachable   no          one more attempt after a pause: nothing was sent
    Broken,
    Silent,
    Malformed     yes         has it: delivered, with its times unknown; has it not: one more attempt; no answer: fault
    Refused       no          the fault: a server that says no is not asked twice
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from pvg.errors import PvgError
from pvg.serving.control import ControlClient, Delivery
from pvg.serving.labels import Label
from pvg.serving.pool import Broken, Malformed, ServerFault, Silent, Unreachable, pause_before_retry

# The one part of a delivery that was found out afterwards: nobody measured its work, its pauses or its queueing.
UNKNOWN_PART = "unknown_ms"

Attempt = Callable[[ControlClient], Awaitable[Delivery]]
HasArrived = Callable[[ControlClient], Awaitable[bool]]


async def deliver(
    servers: Sequence[ControlClient], label: Label, attempt: Attempt, has_arrived: HasArrived
) -> list[Delivery | BaseException]:
    """`attempt` at all `servers` at once. One outcome for each, in their order: a Delivery, a ServerFault or a
    PvgError; anything else is a defect and is raised when all are through."""
    outcomes = await asyncio.gather(
        *(_deliver_to(server, label, attempt, has_arrived) for server in servers), return_exceptions=True
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, (ServerFault, PvgError)):
            raise outcome
    return outcomes


async def _deliver_to(server: ControlClient, label: Label, attempt: Attempt, has_arrived: HasArrived) -> Delivery:
    started = time.perf_counter()
    for attempts_left in (1, 0):
        try:
            return await attempt(server)
        except Unreachable:
            if not attempts_left:
                raise
            await pause_before_retry(1, random.random())
        except (Broken, Silent, Malformed) as fault:
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


def found_delivered(server: ControlClient, label: Label, started: float) -> Delivery:
    """A delivery that a server knows of and this side saw no reply to: all its time is UNKNOWN_PART, and when it was
    received is unknown too (0). `started` is a time.perf_counter()."""
    wall_ms = (time.perf_counter() - started) * 1e3
    return Delivery(
        url=server.url, label=label, wall_ms=wall_ms, rpc_ms=wall_ms, received_ns=0, parts={UNKNOWN_PART: wall_ms}
    )
