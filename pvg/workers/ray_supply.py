"""Supplies worker processes on the nodes of a Ray cluster.

    supply = RaySupply(8)                       # starts a cluster on this machine, and returns at once
    supply = RaySupply(8, "10.0.0.1:6379")      # joins one
    member = await supply.start()               # a worker on one of the nodes

Ray reserves one CPU per worker in a placement group, whose bundles spread over the nodes. A worker that is added later
has its own placement group, which ends with it. Each worker is an actor (`WorkerActor`): requests are calls of it,
answers come back from a call that does not end, and weights are objects of Ray's store. Ray says when and why an actor
has ended; pvg notices one that hangs, starts another one, and repeats the requests that have no answer.

A worker whose node has ended starts again where Ray moves its bundle. If Ray finds no room for GRACE_S seconds, it
shares the bundle of another worker: slower, but with the same results.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pvg.errors import MissingRequirementError, WorkerLostError, counted
from pvg.telemetry.events import Events, SilentEvents, patience
from pvg.workers.frames import Frame, packed, unpacked
from pvg.workers.local import cpu_s
from pvg.workers.ray_actor import WorkerActor, seen
from pvg.workers.ray_cluster import ROOM_S, RayClient, RayConnection, note_other_processor, refuse_other_versions

if TYPE_CHECKING:
    from torch import Tensor

    from pvg.workers.pool import Member, SharedWeights

GRACE_S = 30.0  # after a loss, before workers share a node
START_S = 120.0  # for Ray to start a process, which imports pvg


class NotStartedError(ConnectionError):
    """Ray has not started a worker in time."""


@dataclass(eq=False)
class RayMember:
    """A worker on a node: a `Member` (pvg.workers.pool). `frames`: Ray's, of `WorkerActor.serve`. `bundle`: the number
    of its reservation; `place`: that of the one where it runs. `seen`: this process can see it."""

    supply: RaySupply
    actor: Any
    frames: Any
    bundle: int
    place: int
    pid: int = 0
    node: str = "?"
    seen: bool = False
    closed: bool = False
    error: BaseException | None = None  # why it has ended
    _sent: int = 0

    @property
    def names(self) -> dict[str, Any]:
        return {"node": self.node, "pid": self.pid}

    def send(self, frame: Frame) -> None:
        """Weights go as an object of Ray's store, of which Ray brings one copy to each node."""
        if self.closed:
            return
        memory = []
        if "place" in frame.fields:
            place = dict(frame.fields["place"])
            memory = [place.pop("object")]
            frame = Frame(frame.kind, {**frame.fields, "place": place}, frame.arrays)
        self.actor.take.remote(self._sent, b"".join(packed(frame)), *memory)
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

    def kill(self) -> None:
        self.supply.client.dismiss(self.actor)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.kill()

    def cpu_s(self) -> float | None:
        return cpu_s(self.pid) if self.seen else None


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
    """A user of the cluster, through `client`. Leave it as a context manager, or `close` it."""

    def __init__(self, workers: int, address: str | None = None, most: int | None = None) -> None:
        """Reserves CPUs for `workers`. Each further worker reserves one more CPU when it starts. `most`: the highest
        number of processes, for which a cluster on this machine has room."""
        self.events: Events = SilentEvents()
        self._workers = workers
        self.client = RayClient(most or workers, address)
        self._opening = asyncio.Lock()
        self._group: Any = None
        self._numbers = workers - 1  # of the newest bundle
        self._free = list(range(workers))  # bundles without a worker
        self._single: dict[int, Any] = {}  # the placement groups of further bundles
        self._members: set[RayMember] = set()
        self._nodes: set[str] = set()  # those that a worker has run on, by Ray's id
        self._losses = 0
        self._watching: asyncio.Task[None] | None = None

    # --- workers ------------------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Connect to the cluster, and wait until it has reserved what the first workers need."""
        async with self._opening:
            if self._group is None:
                await self._open()

    async def start(self) -> Member:
        """Start a worker. Raises MissingRequirementError if the cluster has no room or cannot run pvg."""
        await self.ready()
        bundle = self._free.pop(0) if self._free else await self._one_more()
        why = "it has not answered"
        try:
            async with asyncio.timeout(ROOM_S):
                while True:
                    try:
                        return await self._started(bundle)
                    except ConnectionError as error:  # it ended meanwhile, or its node
                        why = str(error)
                        await asyncio.sleep(1.0)
        except TimeoutError:
            self._free.append(bundle)
            raise WorkerLostError(
                f"The Ray cluster had no node for worker {bundle} in {ROOM_S:g} s: {why}.",
                "Add a node to the cluster, and resume the run",
            ) from None
        except BaseException:
            self._free.append(bundle)
            raise

    async def _started(self, bundle: int) -> RayMember:
        """A worker in its bundle. After a loss, if Ray finds no room for that, in another one's."""
        others = [member.place for member in self._members]
        try:
            return await self._worker_in(bundle, bundle, GRACE_S if self._losses and others else START_S)
        except NotStartedError:
            if not (self._losses and others):
                raise
        member = await self._worker_in(bundle, min(others, key=others.count), START_S)
        why = f"Ray has no room for worker {bundle}, so it shares node {member.node}"
        self.events.event("workers", event="node shared", node=member.node, why=why)
        return member

    async def _worker_in(self, bundle: int, place: int, patience_s: float) -> RayMember:
        """A worker where Ray has put the bundle `place`, or will put it. Raises ConnectionError if another attempt may
        help."""
        group, index = (self._single[place], 0) if place in self._single else (self._group, place)
        # Without a CPU, because workers may share a bundle.
        actor, frames = await self.client.start_actor(WorkerActor, os.getcwd(), group, index, num_cpus=0)
        member = RayMember(self, actor, frames, bundle, place)
        try:
            async with patience(self.events, f"Ray to start worker {bundle}", patience_s):
                hello = await member.receive()
            if hello is None:
                raise self._failure(member.error)
            found = hello.fields
            member.node = await self.client.call(self._cluster.node_name, found["node"])
            member.pid, member.seen = found["pid"], found["seen"] == seen()
            refuse_other_versions(member.node, found)
        except TimeoutError:
            member.close()
            raise NotStartedError(f"Ray has not started it in {patience_s:g} s") from None
        except BaseException:
            member.close()
            raise
        if found["node"] not in self._nodes:
            self._nodes.add(found["node"])
            note_other_processor(member.node, found, self.events)
            self.events.event("workers", event="node joined", node=member.node, processor=found["processor"])
        self._members.add(member)
        return member

    def _failure(self, error: BaseException | None) -> Exception:
        """Why a worker ended before its first frame: ConnectionError if another attempt may help."""
        text = self._cluster.cause(error)
        if "ModuleNotFoundError" in str(error) or "ImportError" in str(error):
            return MissingRequirementError(
                f"A node of the Ray cluster cannot import pvg: {text}.",
                "Install pvg on all nodes, with the same version",
            )
        if isinstance(error, self.ray.exceptions.RayTaskError):
            remedy = "Every node must have pvg with the extra cluster"
            return MissingRequirementError(f"A node of the Ray cluster cannot work: {text}.", remedy)
        return ConnectionError(text)

    async def reason(self, member: Member) -> str:
        """Why a worker ended, in words. Kills it if Ray only cannot reach it."""
        assert isinstance(member, RayMember)
        member.close()
        self._losses += 1
        self._members.discard(member)
        self._free.append(member.bundle)
        return self._cluster.cause(member.error)

    async def retire(self, member: Member) -> None:
        """End a worker that serves nothing any more. Gives the CPU back, unless it is one of the first, or another
        worker runs in the same place: Ray ends all actors of a placement group."""
        assert isinstance(member, RayMember)
        member.close()
        self._members.discard(member)
        if member.bundle in self._single and all(other.place != member.bundle for other in self._members):
            await self.client.call(self.ray.util.remove_placement_group, self._single.pop(member.bundle))
        else:
            self._free.append(member.bundle)

    def check(self) -> None:
        """Raises WorkerLostError if the cluster's head has ended."""
        if self._watching is not None and self._watching.done():
            self._watching.result()

    def weights(self) -> SharedWeights:
        return RayObjects(self)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End all workers, and leave the cluster. A second call does nothing."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for member in self._members:
            member.close()
        await asyncio.get_running_loop().run_in_executor(None, self.end)

    def end(self) -> None:
        """Leave the cluster: Ray ends the workers."""
        self.client.end()

    def __enter__(self) -> RaySupply:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    # --- the cluster --------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Connect to the cluster, and reserve a CPU for each worker."""
        self.client.events = self.events
        self._cluster: RayConnection = await self.client.connection()
        self.ray = self._cluster.ray
        self._group = await self._room(self._workers)
        self._watching = asyncio.create_task(self.client.watch())

    async def _room(self, workers: int) -> Any:
        return await self.client.reserve(
            {"CPU": 1.0}, workers, counted(workers, "worker"), "Use fewer workers (-s cluster.workers=N)"
        )

    async def _one_more(self) -> int:
        """A bundle for one more worker, for example on a node that joins."""
        group = await self._room(1)
        self._numbers += 1
        self._single[self._numbers] = group
        return self._numbers
