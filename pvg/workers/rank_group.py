"""The processes of a trainer on several ranks: started, asked and ended together.

    group = RankGroup(2, "cpu", events)                     # on this machine
    group = RankGroup(2, "cpu", events, RaySupply(...))     # on the nodes of a cluster; or with a TorchrunSupply
    await group.start()
    answers = await group.ask([Frame("rank", {"do": "update", ...})] * 2)       # one request per rank
    await group.close()

Ranks wait for each other within a request, so one of them cannot be replaced alone: if one ends or hangs, `ask` ends
all and raises RankEndedError. The caller starts them again. A rank hangs as a worker does (pvg.workers.pool).

The driver has a store of torch, where the ranks find each other. It and the ranks listen on the network by which ranks
and driver reach each other: on loopback, if all run on this machine.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Sequence
from typing import Any

from pvg.errors import MissingRequirementError, PvgError, WorkerLostError
from pvg.telemetry.events import Events, SilentEvents
from pvg.workers.frames import Frame
from pvg.workers.local import LocalSupply
from pvg.workers.pool import PROBE_S, PROBES_MISSED, Member, Supply, WorkerFailedError, error_of

# A rank whose neighbour has been killed fails in its exchange, perhaps before the driver sees the end of the other one.
GRACE_S = 5.0


class RankEndedError(Exception):
    """Rank `number` has ended, or cannot reach the others. `why`: in words."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"rank {number}: {why}")
        self.number = number
        self.why = why


class RankGroup:
    """`count` processes. `device`: "cpu", or "cuda" for one GPU per rank. Belongs to one event loop."""

    def __init__(self, count: int, device: str, events: Events | None = None, supply: Supply | None = None) -> None:
        """`supply`: starts the ranks on the nodes of a cluster, or in processes of torchrun; None: they run on this
        machine, and map the driver's memory."""
        self.count = count
        self.events = events or SilentEvents()
        self.on_cluster = supply is not None
        self._device = device
        self._supply = supply
        self._told = device == "cpu"  # that GPUs are experimental
        self._store: Any = None
        self._members: list[Member] = []
        self._serving: list[asyncio.Task[None]] = []
        self._prober: asyncio.Task[None] | None = None
        self._pending: dict[int, asyncio.Future[Frame]] = {}
        self._missed: list[int] = []  # probes since a rank answered or computed
        self._leaving: asyncio.Future[None]  # a rank's connection has ended; why is not known yet
        self._ended: asyncio.Future[Exception]  # the first rank that has ended, or the whole cluster
        self._numbers = itertools.count(1)

    @property
    def running(self) -> bool:
        return bool(self._members)

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members]

    @property
    def nodes(self) -> list[str]:
        """The node of each rank on a cluster."""
        return [member.names["node"] for member in self._members if "node" in member.names]

    async def ready(self) -> None:
        """Wait until a cluster has room for the ranks, which start later. Raises MissingRequirementError if it has
        none."""
        if self._supply is not None:
            self._supply.events = self.events
            await self._supply.ready()

    async def start(self) -> None:
        """Start all ranks, and let them find each other. Raises what `ask` raises, MissingRequirementError if no
        process can be started, and WorkerLostError if the cluster has no node for one."""
        if self._supply is None:
            self._supply = LocalSupply()
        self._supply.events = self.events
        if not self._told:
            self._told = True
            self.events.event("workers", event="experimental", why="No run has used trainer ranks on GPUs yet")
        loop = asyncio.get_running_loop()
        self._leaving, self._ended = loop.create_future(), loop.create_future()
        self._missed = [0] * self.count
        try:
            await self._start_members(self._supply)
            host = self._members[0].driver_address
            self._store, port = await loop.run_in_executor(None, open_store, host)
        except BaseException:
            await self.end()
            raise
        self._prober = asyncio.create_task(self._probe(self._supply), name="rank probes")
        place = {"ranks": self.count, "host": host, "port": port}
        await self.ask([self._join({**place, "number": number}) for number in range(self.count)])

    async def _start_members(self, supply: Supply) -> None:
        """Start all processes at the same time: on a cluster, each may take seconds."""
        found = await asyncio.gather(*(supply.start() for _ in range(self.count)), return_exceptions=True)
        self._members = [member for member in found if not isinstance(member, BaseException)]
        for number, member in enumerate(self._members):
            serving = asyncio.create_task(self._serve(number, member, supply), name=f"rank {number}")
            self._serving.append(serving)
        for error in found:
            if isinstance(error, BaseException):
                raise error

    def _join(self, place: dict[str, Any]) -> Frame:
        gpu = self._members[place["number"]].gpu(place["number"])
        device = self._device if self._device == "cpu" else f"{self._device}:{gpu}"
        return Frame("rank", {"do": "join", "rank": {**place, "device": device}})

    async def ask(self, frames: Sequence[Frame]) -> list[Frame]:
        """The answer of each rank to its request. After any error all ranks have ended. Raises RankEndedError, a rank's
        PvgError, WorkerFailedError, or WorkerLostError if the cluster is lost."""
        asked = [self._send(*pair) for pair in zip(self._members, frames, strict=True)]
        answers = asyncio.gather(*asked)
        first: list[asyncio.Future[Any]] = [answers, self._ended]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if answers.done() and answers.exception() is None:
                return answers.result()
            if not self._ended.done():
                await self._explain(asked)
            raise self._ended.result()
        except BaseException:
            answers.cancel()
            await self.end()
            await asyncio.wait([answers])
            if not answers.cancelled():
                answers.exception()  # marks it as retrieved: the other errors follow from the first one
            raise

    async def _explain(self, asked: Sequence[asyncio.Future[Frame]]) -> None:
        """Wait for the end of a rank, if that may be why another one has failed. Raises the error of the failed one if
        no rank has ended."""
        number = next(n for n, answer in enumerate(asked) if answer.done() and answer.exception() is not None)
        error = asked[number].exception()
        assert error is not None
        if isinstance(error, WorkerFailedError | WorkerLostError):
            await asyncio.wait([self._leaving], timeout=GRACE_S)
        if self._leaving.done():
            await self._ended  # a cluster may need seconds to tell that a node is gone
        elif isinstance(error, WorkerLostError):
            node = self._members[number].names.get("node")
            raise RankEndedError(number, error.message if node is None else f"{error.message}, on node {node}")
        else:
            raise error

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
            member.close()
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()
        self._store = None

    async def close(self) -> None:
        """End all ranks and what starts them."""
        await self.end()
        if self._supply is not None:
            await self._supply.close()

    def abandon(self) -> None:
        """End what starts ranks, before any has started."""
        if self._supply is not None:
            self._supply.end()

    def _send(self, member: Member, frame: Frame) -> asyncio.Future[Frame]:
        number = next(self._numbers)
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        member.send(Frame(frame.kind, {**frame.fields, "id": number}, frame.arrays))
        return future

    async def _serve(self, number: int, member: Member, supply: Supply) -> None:
        """Take the answers of a rank until it ends."""
        while (frame := await member.receive()) is not None:
            self._missed[number] = 0
            future = self._pending.pop(frame.fields.get("id", 0), None)
            if future is None or future.done():
                continue
            if frame.kind == "done":
                future.set_result(frame)
            else:
                future.set_exception(_with_node(error_of(frame), member.names.get("node")))
        if not self._leaving.done():
            self._leaving.set_result(None)
        try:
            error: Exception = RankEndedError(number, await supply.reason(member))
        except PvgError as failed:
            error = failed
        if not self._ended.done():
            self._ended.set_result(error)

    async def _probe(self, supply: Supply) -> None:
        """Kill a rank that hangs. Gives up if the cluster is lost."""
        cpu_s = [0.0] * self.count
        while True:
            await asyncio.sleep(PROBE_S)
            try:
                supply.check()
            except WorkerLostError as error:
                if not self._ended.done():
                    self._ended.set_result(error)
                return
            for number, member in enumerate(self._members):
                if member.closed:  # killed already; its node may be gone, too
                    continue
                now_s = member.cpu_s()
                moved, cpu_s[number] = now_s is not None and now_s > cpu_s[number], now_s or 0.0
                self._missed[number] = 0 if moved else self._missed[number] + 1
                if self._missed[number] > PROBES_MISSED:
                    self.events.event("workers", event="rank hangs", rank=number, **member.names)
                    member.kill()
                else:
                    member.send(Frame("ping"))


def open_store(host: str) -> tuple[Any, int]:
    """A store of torch that listens at `host` only, and its port. It ends with its last reference. Blocks. Raises
    MissingRequirementError if torch has no such store."""
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined] # here, because some builds of torch lack it
    except ImportError:
        raise MissingRequirementError(
            "This build of torch has no torch.distributed, which trainer ranks need.",
            "Leave out cluster.trainer_ranks, or install another build of torch",
        ) from None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # torch itself would listen on all networks of this machine.
    with socket.create_server((host, 0), family=family) as listening:
        port = int(listening.getsockname()[1])
        return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()), port


def _with_node(error: Exception, node: str | None) -> Exception:
    """The error of a rank; it names the rank's node if it has one. `_explain` names it for a lost connection."""
    if node is None or isinstance(error, WorkerLostError):
        return error
    if isinstance(error, PvgError):
        error.message = f"On node {node}: {error.message}"
        error.args = (error.message,)
        return error
    return type(error)(f"On node {node}: {error}")
