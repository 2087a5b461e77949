"""Supplies worker processes on the nodes of a Ray cluster.

    supply = RaySupply(8)                       # starts a cluster on this machine, and returns at once
    supply = RaySupply(8, "10.0.0.1:6379")      # joins one
    member = await supply.start()               # a worker on one of the nodes

Each worker is an actor (`WorkerActor`), for which Ray reserves one CPU, and one GPU if workers compute on GPUs: it sees
no other one. Requests are calls of it, answers come back from a call that does not end, and weights are objects of
Ray's store. Ray says when and why an actor has ended; pvg notices one that hangs, starts another one, and repeats the
requests that have no answer.

If no node has a free CPU for the successor of a worker for GRACE_S seconds, it shares a node without one: slower, but
with the same results. A GPU is never shared.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pvg.telemetry.device import processor
from pvg.telemetry.events import Events, SilentEvents, patience
from pvg.workers.frames import Frame, packed, unpacked
from pvg.workers.ray_cluster import ROOM_S, RayClient, cause_of, hello, refuse_other_versions, unfit_node

if TYPE_CHECKING:
    from torch import Tensor

    from pvg.workers.pool import Member, SharedWeights
    from pvg.workers.process import WorkerProcess

GRACE_S = 30.0  # after a loss, before workers share a node
AGAIN_S = 1.0  # after a worker has ended before its first frame


@dataclass(eq=False)
class RayMember:
    """A worker on a node: a `Member` (pvg.workers.pool). `frames`: Ray's, of `WorkerActor.serve`. `gpus`: the
    names of those that it uses."""

    supply: RaySupply
    actor: Any
    frames: Any
    pid: int = 0
    node: str = "?"
    gpus: str = ""
    ended: bool = False
    error: BaseException | None = None  # why it has ended
    _sent: int = 0

    @property
    def names(self) -> dict[str, Any]:
        return {"node": self.node, "pid": self.pid, **({"gpus": self.gpus} if self.gpus else {})}

    def send(self, frame: Frame) -> None:
        """Weights go as an object of Ray's store, of which Ray brings one copy to each node."""
        if self.ended:
            return
        memory = []
        if "place" in frame.fields:
            place = dict(frame.fields["place"])
            memory = [place.pop("object")]
            frame = Frame(frame.kind, {**frame.fields, "place": place})
        self.actor.take.remote(self._sent, _bytes(frame), *memory)
        self._sent += 1

    async def receive(self) -> Frame | None:
        try:
            data: bytes = await (await anext(self.frames))
            return unpacked(data)
        except StopAsyncIteration:
            return None
        except self.supply.ray.exceptions.RayError as error:
            self.error = error
            return None

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self.supply.client.dismiss(self.actor)

    def cpu_s(self) -> float | None:
        return None


class RayObjects:
    """The weights of one model in Ray's store, which keeps them while a frame names them."""

    def __init__(self, supply: RaySupply) -> None:
        self._supply = supply

    async def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        from pvg.workers.shared import packed_tensors  # here, because it imports torch

        def put() -> dict[str, Any]:
            layout, data = packed_tensors(tensors)
            return {"layout": layout, "object": self._supply.ray.put(data)}

        return await self._supply.client.call(put)

    def close(self) -> None: ...


class RaySupply:
    """A user of the cluster, through `client`. `end` it."""

    def __init__(self, most: int, address: str | None = None, gpus: int = 0) -> None:
        """`most`: the highest number of processes, for which a cluster on this machine has room. `gpus`: that each
        of them needs."""
        self.events: Events = SilentEvents()
        self.client = RayClient(most, address)
        self._needs = {"num_cpus": 1, "num_gpus": gpus}
        self._nodes: set[str] = set()  # those that a worker has run on

    async def start(self, successor: bool = False) -> Member:
        """Start a worker. Raises MissingRequirementError if the cluster has no room or cannot run pvg."""
        self.client.events = self.events
        self.ray = await self.client.connection()
        try:
            async with patience(self.events, "room for a worker on the Ray cluster", ROOM_S):
                if successor and not self._needs["num_gpus"]:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(GRACE_S):
                            return await self._started(self._needs)
                    member = await self._started({"num_cpus": 0})
                    if member.pid:  # otherwise it has ended
                        why = f"Ray has no room for a worker, so it shares node {member.node}"
                        self.events.event("workers", event="node shared", node=member.node, why=why)
                    return member
                return await self._started(self._needs)
        except TimeoutError:
            remedy = "Use fewer workers (-s cluster.workers=N; in a resumed run, cluster.max_workers)"
            raise await self.client.no_room("a worker", self._needs, remedy) from None

    async def _started(self, needs: Mapping[str, int]) -> RayMember:
        """A worker, once a node has what it needs. It may have ended meanwhile, which the pool notices."""
        member = RayMember(self, *await self.client.start_actor(WorkerActor, os.getcwd(), **needs))
        try:
            first = await member.receive()
            if first is None:
                if (error := unfit_node(member.error)) is not None:
                    raise error
                await asyncio.sleep(AGAIN_S)
                return member
            found = first.fields
            refuse_other_versions(found)
        except BaseException:
            member.end()
            raise
        member.node, member.pid = found["node"], found["pid"]
        member.gpus = found["gpus"] if self._needs["num_gpus"] else ""
        if member.node not in self._nodes:
            self._nodes.add(member.node)
            if found["processor"] != processor():
                why = f"Node {member.node} has another processor than this machine, so last bits of results may differ"
                self.events.event("workers", event="node differs", node=member.node, why=why)
            device = "GPUs" if self._needs["num_gpus"] else "CPUs"
            self.events.event(
                "workers", event="node joined", node=member.node, processor=found["processor"], device=device
            )
        return member

    async def reason(self, member: Member) -> str:
        """Why a worker ended, in words."""
        assert isinstance(member, RayMember)
        return cause_of(member.error)

    async def watch(self) -> None:
        """Raises WorkerLostError when the cluster's head has ended."""
        await self.client.watch()

    def weights(self) -> SharedWeights:
        return RayObjects(self)

    def end(self) -> None:
        """Leave the cluster, which ends all workers. A second call does nothing."""
        self.client.end()


# --- on a node --------------------------------------------------------------------------------------------------------


class WorkerActor:
    """A worker process, which serves one driver and ends with it. The driver calls `take` for each frame that it sends,
    and reads the frames of the worker from one call of `serve`. Both are bytes, so neither side unpickles what the
    other one has computed. `folder`: the driver's working folder, which the node may have too."""

    def __init__(self, folder: str) -> None:
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self._frames: asyncio.Queue[Frame | Exception] = asyncio.Queue()
        self._waiting: dict[int, Frame] = {}  # frames that have come before an earlier one
        self._next = 0
        self._process: WorkerProcess | None = None

    async def serve(self) -> AsyncIterator[bytes]:
        """The frames of the worker, without end; first "hello", which says where it runs. Raises what `take` raises."""
        yield _bytes(Frame("hello", hello()))
        opening = asyncio.create_task(self._open())
        while True:
            frame = await self._frames.get()
            if isinstance(frame, Exception):
                opening.cancel()
                raise frame
            yield _bytes(frame)

    async def _open(self) -> None:
        """Import torch, which takes seconds, and begin to work."""
        gc.disable()  # otherwise it scans the objects of torch again and again while they are made
        try:
            module = await asyncio.to_thread(importlib.import_module, "pvg.workers.process")
            self._process = module.WorkerProcess(self._frames.put_nowait)
            self._take(self._process)
        except Exception as error:  # noqa: BLE001 - `serve` raises it
            self._frames.put_nowait(error)
        gc.enable()

    async def take(self, number: int, data: bytes, memory: Any = None) -> None:
        """Frame `number` of the driver. Ray starts calls in any order. `memory`: Ray's, where the frame's place is."""
        frame = unpacked(data)
        if memory is not None:
            frame = Frame(frame.kind, {**frame.fields, "place": {**frame.fields["place"], "memory": memory}})
        self._waiting[number] = frame
        if self._process is None:
            self._frames.put_nowait(Frame("pong"))
        else:
            self._take(self._process)

    def _take(self, process: WorkerProcess) -> None:
        try:
            while (ready := self._waiting.pop(self._next, None)) is not None:
                self._next += 1
                process.take(ready)
        except Exception as error:  # noqa: BLE001 - `serve` raises it
            self._frames.put_nowait(error)


def _bytes(frame: Frame) -> bytes:
    return b"".join(packed(frame))
