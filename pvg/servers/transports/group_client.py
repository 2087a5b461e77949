"""`GroupClient`: sends the calls of vLLM's trainer side to several servers at once.

vLLM calls its blocking methods (its VLLMWeightSyncClient) from a thread. Control clients make the actual calls in the
event loop. It records each server's answers and their duration.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pvg.errors import PvgError
from pvg.servers.control import RECEIVED_HEADER, WORK_HEADER, ControlClient, DeliveryTiming
from pvg.servers.labels import WeightLabel
from pvg.servers.pool import ConnectionBroken, MalformedReply, Reply, ReplyTimeout, ServerFault


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A server of the group. `first_rank` is the rank of its first worker; the trainer is rank 0."""

    control: ControlClient
    first_rank: int


@dataclass(frozen=True, slots=True)
class GroupCall:
    """One call to one server, in ms. `part`: the part of the delivery that it belongs to."""

    part: str
    wall_ms: float
    work_ms: float
    received_ns: int


class GroupClient:
    """`servers` with their numbers of workers. `plain` converts vLLM's update_info to JSON.

    The methods of vLLM's protocol raise the first fault of any server, in the calling thread.
    """

    def __init__(
        self,
        servers: Sequence[tuple[ControlClient, int]],
        loop: asyncio.AbstractEventLoop,
        plain: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    ) -> None:
        self._loop = loop
        self._plain = plain
        self.members: list[GroupMember] = []
        self.ranks = 1
        for control, workers in servers:
            self.members.append(GroupMember(control, self.ranks))
            self.ranks += workers
        self.begin("", "")

    def begin(self, label: str, trace: str) -> None:
        self._label, self._trace = label, trace
        self._steps: dict[str, list[GroupCall]] = defaultdict(list)
        self._started: set[str] = set()
        self._finished: set[str] = set()
        self._ended = False
        self.faults: dict[str, ServerFault | PvgError] = {}  # each server's first fault, by url
        self.failed = asyncio.Event()  # set with the first fault

    # --- vLLM's VLLMWeightSyncClient: blocking, called from vLLM's threads --------------------------------------------

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """`init_info` is for the first server. If it has a rank_offset, each server gets its own."""

        def body(member: GroupMember) -> dict[str, Any]:
            ranked = {"rank_offset": member.first_rank} if "rank_offset" in init_info else {}
            return {"init_info": {**init_info, **ranked}}

        self._block(self._post("init_ms", "/init_weight_transfer_engine", body))

    def start_weight_update(self) -> None:
        self._started.update(member.control.url for member in self.members)
        self._block(self._post("load_ms", "/start_weight_update"))

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        body = {"update_info": self._plain(update_info)}
        self._block(self._post("load_ms", "/update_weights", lambda member: body))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ignores vLLM's `weight_version` and uses the label of the update."""
        self._block(self._finish())

    def _block(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # --- in the event loop --------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        await self._each("pause_ms", lambda member: member.control.pause(self._trace))

    async def resume(self) -> None:
        """Resume every server, even if others fail. Faults appear in the outcomes."""
        await self._each("resume_ms", lambda member: member.control.resume(self._trace), must=True)

    def end(self) -> None:
        """Give up the update: a vLLM thread that continues later can make no more calls."""
        self._ended = True

    async def mark_broken(self, prefix: str) -> None:
        """Give up the update, and put `prefix` before the label of servers that began it and did not finish."""
        self.end()
        body = {"new_version": prefix + self._label}
        halfway = self._started - self._finished
        await self._each(
            "mark_ms",
            lambda member: member.control.call("/update_weight_version", body, self._trace),
            among=halfway,
            must=True,
        )

    async def shutdown(self) -> None:
        """Make the servers leave the group. One that does not answer has already left it, or leaves when the next group
        forms."""
        await self._each(
            "shutdown_ms", lambda member: member.control.call("/shutdown_weight_transfer_engine", None), must=True
        )

    def outcomes(self, label: WeightLabel, *, timed_out: str = "") -> dict[str, DeliveryTiming | BaseException]:
        """By url: a delivery if the update finished, otherwise the server's fault or the one that stopped the group."""
        return {member.control.url: self._outcome(member.control.url, label, timed_out) for member in self.members}

    def _outcome(self, url: str, label: WeightLabel, timed_out: str) -> DeliveryTiming | BaseException:
        if fault := self.faults.get(url):
            return fault
        if url not in self._finished:
            culprit = next(iter(self.faults), "")
            return (
                ConnectionBroken(url, f"given up, because {culprit} failed")
                if culprit
                else ReplyTimeout(url, timed_out)
            )
        steps = self._steps[url]
        parts: dict[str, float] = defaultdict(float)
        for step in steps:
            parts[step.part] += step.work_ms
        return DeliveryTiming(
            url=url,
            label=label,
            wall_ms=sum(step.wall_ms for step in steps),
            rpc_ms=sum(step.work_ms for step in steps),
            received_ns=steps[0].received_ns,
            parts=dict(parts),
        )

    async def _finish(self) -> None:
        body = {"weight_version": self._label}

        async def finish(member: GroupMember) -> Reply:
            reply = await member.control.call("/finish_weight_update", body, self._trace)
            self._finished.add(member.control.url)
            return reply

        await self._each("load_ms", finish)

    async def _post(
        self, part: str, path: str, body: Callable[[GroupMember], Mapping[str, Any] | None] = lambda member: None
    ) -> None:
        await self._each(part, lambda member: member.control.call(path, body(member), self._trace))

    async def _each(
        self,
        part: str,
        call: Callable[[GroupMember], Awaitable[Reply]],
        *,
        among: set[str] | None = None,
        must: bool = False,
    ) -> None:
        """Run `call` for all members concurrently (or those `among`) and record the results. Raises the first fault,
        unless `must` is set: then faults are only recorded."""
        if self._ended and not must:
            raise ReplyTimeout(self.members[0].control.url, "the update was given up")
        members = [member for member in self.members if among is None or member.control.url in among]
        outcomes = await asyncio.gather(
            *(self._timed(part, member, call) for member in members), return_exceptions=True
        )
        faults = [outcome for outcome in outcomes if outcome is not None]
        for fault in faults:
            if must and isinstance(fault, (ServerFault, PvgError)):
                continue
            raise fault

    async def _timed(self, part: str, member: GroupMember, call: Callable[[GroupMember], Awaitable[Reply]]) -> None:
        url, sent = member.control.url, time.perf_counter()
        try:
            reply = await call(member)
            work_ms, received_ns = _stamp(reply, WORK_HEADER), int(_stamp(reply, RECEIVED_HEADER))
        except (ServerFault, PvgError) as fault:
            self.faults.setdefault(url, fault)
            self.failed.set()
            raise
        self._steps[url].append(GroupCall(part, (time.perf_counter() - sent) * 1e3, work_ms, received_ns))


def _stamp(reply: Reply, name: str) -> float:
    """A number in the reply's headers, set by pvg's middleware."""
    try:
        return float(reply.headers.get(name, ""))
    except ValueError:
        raise MalformedReply(reply.url, f"the header {name} is missing or not a number") from None
