"""The processes of a trainer on several ranks: started, asked and ended together.

    group = RankGroup(2, "cpu", events)
    await group.start()
    answers = await group.ask([Frame("rank", {"do": "update", ...})] * 2)       # one request per rank
    await group.close()

Ranks wait for each other within a request, so one of them cannot be replaced alone: if one ends or hangs, `ask` ends
all and raises RankEndedError. The caller starts them again. A rank hangs as a worker does (pvg.workers.pool).
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pvg.telemetry.events import Events, SilentEvents
from pvg.workers.frames import Frame, receive
from pvg.workers.local import LocalSupply, Member
from pvg.workers.pool import PROBE_S, PROBES_MISSED, WorkerFailedError, error_of

# A rank whose neighbour has been killed fails in its exchange, perhaps before the driver sees the end of the other one.
GRACE_S = 5.0


class RankEndedError(Exception):
    """Rank `number` has ended. `why`: in words."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"rank {number}: {why}")
        self.number = number
        self.why = why


class RankGroup:
    """`count` processes on this machine. `device`: "cpu", or "cuda" for one GPU per rank. Belongs to one event loop."""

    def __init__(self, count: int, device: str, events: Events | None = None) -> None:
        self.count = count
        self.events = events or SilentEvents()
        self._device = device
        self._supply: LocalSupply | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._members: list[Member] = []
        self._serving: list[asyncio.Task[None]] = []
        self._prober: asyncio.Task[None] | None = None
        self._pending: dict[int, asyncio.Future[Frame]] = {}
        self._missed: list[int] = []  # probes since a rank answered or computed
        self._ended: asyncio.Future[RankEndedError]  # the first rank that has ended
        self._numbers = itertools.count(1)

    @property
    def running(self) -> bool:
        return bool(self._members)

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members]

    async def start(self) -> None:
        """Start all ranks, and let them find each other. Raises what `ask` raises, and MissingRequirementError if no
        process can be started."""
        loop = asyncio.get_running_loop()
        if self._supply is None:
            self._supply = LocalSupply()
            if self._device != "cpu":
                self.events.event("workers", event="experimental", why="No run has used trainer ranks on GPUs yet")
        self._folder = tempfile.TemporaryDirectory(prefix="pvg-ranks-")
        self._ended = loop.create_future()
        self._missed = [0] * self.count
        try:
            for number in range(self.count):
                member = await self._supply.start()
                self._members.append(member)
                serving = asyncio.create_task(self._serve(number, member, self._supply), name=f"rank {number}")
                self._serving.append(serving)
        except BaseException:
            await self.end()
            raise
        self._prober = asyncio.create_task(self._probe(), name="rank probes")
        store = str(Path(self._folder.name, "store"))
        join = {"do": "join", "ranks": self.count, "device": self._device, "store": store}
        await self.ask([Frame("rank", {**join, "number": number}) for number in range(self.count)])

    async def ask(self, frames: Sequence[Frame]) -> list[Frame]:
        """The answer of each rank to its request. After any error all ranks have ended. Raises RankEndedError, a rank's
        PvgError, or WorkerFailedError."""
        answers = asyncio.gather(*(self._send(*pair) for pair in zip(self._members, frames, strict=True)))
        first: list[asyncio.Future[Any]] = [answers, self._ended]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if answers.done():
                error = answers.exception()
                if error is None:
                    return answers.result()
                if isinstance(error, WorkerFailedError):
                    await asyncio.wait([self._ended], timeout=GRACE_S)
                if not self._ended.done():
                    raise error
            raise self._ended.result()
        except BaseException:
            answers.cancel()
            await self.end()
            await asyncio.wait([answers])
            if not answers.cancelled():
                answers.exception()  # marks it as retrieved: the other errors follow from the first one
            raise

    async def end(self) -> None:
        """Kill all ranks. A second call does nothing."""
        members, self._members = self._members, []
        serving, self._serving = self._serving, []
        for member in members:
            member.kill()
        if self._prober is not None:
            self._prober.cancel()
        # They end with the processes. Cancelling them would leave an answer of the nursery unread.
        await asyncio.gather(*serving)
        for member in members:
            member.writer.close()
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()
        if self._folder is not None:
            self._folder.cleanup()

    async def close(self) -> None:
        """End all ranks and what starts them."""
        await self.end()
        if self._supply is not None:
            await self._supply.close()

    def _send(self, member: Member, frame: Frame) -> asyncio.Future[Frame]:
        number = next(self._numbers)
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        member.send(Frame(frame.kind, {**frame.fields, "id": number}, frame.arrays))
        return future

    async def _serve(self, number: int, member: Member, supply: LocalSupply) -> None:
        """Take the answers of a rank until it ends."""
        while (frame := await receive(member.reader)) is not None:
            self._missed[number] = 0
            future = self._pending.pop(frame.fields.get("id", 0), None)
            if future is None or future.done():
                continue
            if frame.kind == "done":
                future.set_result(frame)
            else:
                future.set_exception(error_of(frame))
        error = RankEndedError(number, await supply.reason(member))
        if not self._ended.done():
            self._ended.set_result(error)

    async def _probe(self) -> None:
        """Kill a rank that hangs."""
        cpu_s = [0.0] * self.count
        while True:
            await asyncio.sleep(PROBE_S)
            for number, member in enumerate(self._members):
                now_s = member.cpu_s()
                moved, cpu_s[number] = now_s is not None and now_s > cpu_s[number], now_s or 0.0
                self._missed[number] = 0 if moved else self._missed[number] + 1
                if self._missed[number] > PROBES_MISSED:
                    self.events.event("workers", event="rank hangs", rank=number, **member.names)
                    member.kill()
                else:
                    member.send(Frame("ping"))
