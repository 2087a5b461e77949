"""Supplies worker processes on the nodes of a Ray cluster.

Each worker is an actor (`WorkerActor`), for which Ray reserves one CPU, and one GPU if workers compute on GPUs: it sees
no other one. Requests are calls of it, answers come back from a call that does not end, and weights are objects of
Ray's store. If no node has a free CPU for the successor of a worker for GRACE_S seconds, it shares a node without one:
slower, but with the same results. A GPU is never shared.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from pvg.telemetry.device import processor
from pvg.workers.frames import Frame, packed, unpacked
from pvg.workers.ray_cluster import RayActor, RayClient, cause_of, hello

if TYPE_CHECKING:
    from torch import Tensor

    from pvg.workers.pool import Member, SharedWeights
    from pvg.workers.process import WorkerProcess

GRACE_S = 30.0  # after a loss, before workers share a node
IMPORT_S = 300.0  # for importing torch on a slow disk of a node
AGAIN_S = 1.0  # after a worker has ended before its first frame


class RayMember(RayActor):
    """A worker on a node: a `Member` (pvg.workers.pool)."""

    _sent = 0

    @property
    def names(self) -> dict[str, Any]:
        return {name: self.found[name] for name in ("node", "pid", "gpus") if self.found.get(name)} or {"node": "?"}

    def send(self, frame: Frame) -> None:
        """Weights go as an object of Ray's store, of which Ray brings one copy to each node."""
        if self.ended:
            return
        memory = []
        if "place" in frame.fields:
            place = dict(frame.fields["place"])
            memory = [place.pop("object")]
            frame = Frame(frame.kind, {**frame.fields, "place": place})
        self.handle.take.remote(self._sent, b"".join(packed(frame)), *memory)
        self._sent += 1

    async def receive(self) -> Frame | None:
        data = await self.next()
        return None if data is None else unpacked(data)

    def cpu_s(self) -> float | None:
        return None


class RayObjects:
    """The weights of one model in Ray's store, which keeps them while a frame names them."""

    def __init__(self, client: RayClient) -> None:
        self._client = client

    async def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        from pvg.workers.shared import packed_tensors  # here, because it imports torch

        def put() -> dict[str, Any]:
            layout, data = packed_tensors(tensors)
            return {"layout": layout, "object": self._client.ray.put(data)}

        return await self._client.call(put)

    def close(self) -> None: ...


class RaySupply(RayClient):
    """`most`: the highest number of processes, for which a cluster on this machine has room. `gpus`: that each of them
    needs."""

    def __init__(self, most: int, address: str | None = None, gpus: int = 0) -> None:
        super().__init__(most, address)
        self._needs = {"num_cpus": 1, "num_gpus": gpus}
        self._nodes: set[str] = set()  # those that a worker has run on

    async def start(self, successor: bool = False) -> Member:
        """Once it has imported torch, because it answers no probe before. One that hangs meanwhile has ended."""
        member = await self._placed(successor)
        try:
            async with asyncio.timeout(IMPORT_S):
                await member.next()
        except TimeoutError:
            member.end()
        return member

    async def _placed(self, successor: bool) -> RayMember:
        remedy = "Use fewer workers (-s cluster.workers=N; in a resumed run, cluster.max_workers)"
        async with self.room("a worker", self._needs, remedy):
            shares = successor and not self._needs["num_gpus"]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S if shares else None):
                    return await self._started(self._needs)
            member = await self._started({"num_cpus": 0})
            if member.found:  # otherwise it has ended
                node = member.found["node"]
                why = f"Ray has no room for a worker, so it shares node {node}"
                self.events.event("workers", event="node shared", node=node, why=why)
            return member

    async def _started(self, needs: Mapping[str, int]) -> RayMember:
        """A worker, once a node has what it needs. It may have ended meanwhile, which the pool notices."""
        member = await self.started(WorkerActor, os.getcwd(), needs, RayMember)
        if not member.found:
            await asyncio.sleep(AGAIN_S)
        elif (node := member.found["node"]) not in self._nodes:
            self._nodes.add(node)
            if (kind := member.found["processor"]) != processor():
                why = f"Node {node} has another processor than this machine, so last bits of results may differ"
                self.events.event("workers", event="node differs", node=node, why=why)
            device = "GPUs" if self._needs["num_gpus"] else "CPUs"
            self.events.event("workers", event="node joined", node=node, processor=kind, device=device)
        return member

    async def reason(self, member: Member) -> str:
        assert isinstance(member, RayMember)
        return cause_of(member.error)

    def weights(self) -> SharedWeights:
        return RayObjects(self)


# --- on a node --------------------------------------------------------------------------------------------------------


class WorkerActor:
    """A worker process, which serves one driver and ends with it. Frames are bytes in both directions, so neither side
    unpickles what the other one has computed. `folder`: the driver's working folder, which the node may have too."""

    def __init__(self, folder: str) -> None:
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self._frames: asyncio.Queue[Frame | Exception] = asyncio.Queue()
        self._waiting: dict[int, Frame] = {}  # frames that have come before an earlier one
        self._next = 0

    async def serve(self) -> AsyncIterator[bytes | dict[str, Any]]:
        """`hello`; b"" once torch is imported, which takes seconds; and then the frames of the worker, without end.
        Raises what `take` raises."""
        yield hello()
        gc.disable()  # otherwise it scans the objects of torch again and again while they are made
        module = await asyncio.to_thread(importlib.import_module, "pvg.workers.process")
        gc.enable()
        self._process: WorkerProcess = module.WorkerProcess(self._frames.put_nowait)
        yield b""
        while True:
            frame = await self._frames.get()
            if isinstance(frame, Exception):
                raise frame
            yield b"".join(packed(frame))

    async def take(self, number: int, data: bytes, memory: Any = None) -> None:
        """Frame `number` of the driver. Ray starts calls in any order. `memory`: Ray's, where the frame's place is."""
        frame = unpacked(data)
        if memory is not None:
            frame = Frame(frame.kind, {**frame.fields, "place": {**frame.fields["place"], "memory": memory}})
        self._waiting[number] = frame
        try:
            while (ready := self._waiting.pop(self._next, None)) is not None:
                self._next += 1
                self._process.take(ready)
        except Exception as error:  # noqa: BLE001 - `serve` raises it
            self._frames.put_nowait(error)
