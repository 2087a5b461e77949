"""Supplies worker processes on the nodes of a Ray cluster.

    supply = RaySupply(8)                       # starts a cluster on this machine, and returns at once
    supply = RaySupply(8, "10.0.0.1:6379")      # joins one
    ranks = RaySupply(2, of=RANKS, client=supply.client.another())      # trainer ranks, on the same cluster
    member = await supply.start()               # a worker on one of the nodes

Ray reserves one CPU per worker in a placement group, whose bundles spread over the nodes. A worker that is added later
has its own placement group, which ends with it. Ray starts one actor per node (`NodeAgent`). The agent forks the
node's workers. They connect to the driver over TCP, as the agents do, so requests, answers and weights do not pass
through Ray. Ray reserves and reports; pvg restarts workers and repeats requests.

A node that ends, or does not answer, loses its workers. They start again where Ray moves their bundles. If Ray finds no
room for GRACE_S seconds, they share a node that the run uses already: slower, but with the same results.

Ray shows an actor only the GPUs that it has reserved for it. So a process with a GPU has an agent that no other process
shares, and waits for a node with a free GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pvg.errors import MissingRequirementError, WorkerLostError
from pvg.telemetry.events import Events, SilentEvents
from pvg.workers.frames import Frame, send
from pvg.workers.local import Member
from pvg.workers.node_agent import DriverAddress, NodeAgent
from pvg.workers.nodes import (
    PROBES_MISSED,
    Entrance,
    Node,
    NodeMember,
    forked,
    greeting,
    note_other_processor,
    refuse_other_packages,
)
from pvg.workers.ray_cluster import HEAD_MISSED, PROBE_S, RayClient, RayConnection, answers, head_lost

if TYPE_CHECKING:
    from pvg.workers.shared import SharedTensors

ROOM_S = 300.0  # how long a run waits for a cluster with room, at its start and after a loss
QUIET_S = 5.0  # of it, before a notice
ASK_S = 1.0  # between two questions whether there is room for one more worker
GRACE_S = 30.0  # after a loss, before workers share a node
AGENT_S = 120.0  # for an agent to start: Ray starts a process, which imports pvg
CAUSE_S = 3.0  # for Ray to say why an agent has ended
BACKLOG = 100  # connections that wait to be admitted; workers may all connect at once


@dataclass(frozen=True)
class Kind:
    """What kind of process a supply starts. `setting`: how many of them. `gpus`: those of each, 0 or 1."""

    name: str
    setting: str
    gpus: int = 0

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves for each process."""
        return {"CPU": 1, "GPU": self.gpus} if self.gpus else {"CPU": 1}

    @property
    def strategy(self) -> str:
        """Processes share the memory of a node, so they spread over the nodes. GPUs have their own memory, so ranks on
        GPUs use few nodes, where they exchange their weights faster."""
        return "PACK" if self.gpus else "SPREAD"

    @property
    def scarce(self) -> str:
        return "GPU" if self.gpus else "CPU"


WORKERS = Kind("worker", "cluster.workers")
RANKS = Kind("trainer rank", "cluster.trainer_ranks")
RANKS_ON_GPUS = Kind("trainer rank", "cluster.trainer_ranks", gpus=1)


@dataclass(eq=False)
class RayMember(NodeMember):
    """A worker on a node. `bundle`: the number of its reservation."""

    host: _Node
    bundle: int

    def gpu(self, number: int) -> int:
        return 0  # a rank sees only the GPU that Ray has reserved for it

    def send(self, frame: Frame) -> None:
        """Send a frame; the place of weights becomes their place on the node."""
        if "place" in frame.fields:
            place = frame.fields["place"]
            own = {**place, "path": self.host.memory[place["path"]]}
            frame = Frame(frame.kind, {**frame.fields, "place": own}, frame.arrays)
        send(self.writer, frame)


@dataclass(eq=False)
class _Node(Node):
    """An agent that Ray has started. `key`: Ray's id of the node, and with GPUs the bundle."""

    key: str
    actor: Any
    ended: asyncio.Future[None]  # Ray's word on the actor: its result or why it ended
    bundle: int  # whose placement group has the agent
    has_weights: asyncio.Event = field(default_factory=asyncio.Event)  # all that existed when it joined
    memory: dict[str, str] = field(default_factory=dict)  # the driver's path of shared memory -> the node's
    members: set[RayMember] = field(default_factory=set)


class RaySupply:
    """A user of the cluster, through `client`. Leave it as a context manager, or `close` it."""

    def __init__(
        self,
        workers: int,
        address: str | None = None,
        most: int | None = None,
        *,
        of: Kind = WORKERS,
        client: RayClient | None = None,
    ) -> None:
        """Reserves CPUs for `workers`. Each further worker reserves one more CPU when it starts. `most`: the highest
        number of processes, for which a cluster on this machine has room. `client`: uses its cluster, in place of
        `address`."""
        self.events: Events = SilentEvents()
        self._workers = workers
        self._kind = of
        self.client = client or RayClient(most or workers, address, self._log)
        self._call, self._dismiss = self.client.call, self.client.dismiss
        self._opening = asyncio.Lock()
        self._group: Any = None
        self._numbers = workers - 1  # of the newest bundle
        self._free = list(range(workers))  # bundles without a worker
        self._single: dict[int, Any] = {}  # the placement groups of further bundles
        self._nodes: dict[str, _Node] = {}  # those in use, by key
        self._entering: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by key
        self._losses = 0
        self._head_missed = 0  # probes that the cluster's head has not answered
        self._shared: dict[str, SharedTensors] = {}
        self._entrance = Entrance()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

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
                        return await self._worker_on(await self._node_of(bundle), bundle)
                    except ConnectionError as error:  # the node was lost meanwhile
                        why = str(error)
                        await asyncio.sleep(1.0)
        except TimeoutError:
            self._free.append(bundle)
            raise WorkerLostError(
                f"The Ray cluster had no node for {self._kind.name} {bundle} in {ROOM_S:g} s: {why}.",
                "Add a node to the cluster, and resume the run",
            ) from None
        except BaseException:
            self._free.append(bundle)
            raise

    async def _worker_on(self, node: _Node, bundle: int) -> RayMember:
        await node.has_weights.wait()
        member = RayMember(*await forked(node, self._entrance, self._kind.name), node, bundle)
        node.members.add(member)
        return member

    async def reason(self, member: Member) -> str:
        """Why a worker ended, in words, with its node. Kills it if it has only closed its connection."""
        assert isinstance(member, RayMember)
        node = member.host
        member.kill()
        node.members.discard(member)
        self._free.append(member.bundle)
        try:
            answer = await node.ask(Frame("end", {"pid": member.pid}))
        except ConnectionError as error:
            return f"{error}"
        return f"{answer.fields['why']}, on node {node.name}"

    async def retire(self, member: Member) -> None:
        """End a worker that serves nothing any more, and the agent of a node that has none left. Gives the CPU back,
        unless it is one of the first, or the node's agent needs it: Ray ends all actors of a placement group."""
        await self.reason(member)
        assert isinstance(member, RayMember)
        node, bundle = member.host, member.bundle
        if not node.members and not node.lost:
            self._dismiss_node(node, "it has no workers")
        if bundle in self._single and bundle in self._free and (node.lost or node.bundle != bundle):
            self._free.remove(bundle)
            await self._call(self._cluster.ray.util.remove_placement_group, self._single.pop(bundle))

    def check(self) -> None:
        """Raises WorkerLostError if the cluster's head has ended."""
        if self._head_missed >= HEAD_MISSED:
            raise head_lost(self._head)

    # --- weights ------------------------------------------------------------------------------------------------------

    async def share(self, shared: SharedTensors) -> None:
        """Copy this memory to all nodes. A node that comes later gets it before its first worker."""
        self._shared[shared.memory.path] = shared
        await asyncio.gather(*(self._give(node, shared) for node in self._nodes.values()))

    async def _give(self, node: _Node, shared: SharedTensors) -> None:
        path = shared.memory.path
        data = np.frombuffer(shared.memory.view, np.uint8)
        with contextlib.suppress(ConnectionError):  # its workers will start on other nodes
            answer = await node.ask(Frame("weights", {"path": path}, {"bytes": data}))
            if self._shared.get(path) is shared:
                node.memory[path] = answer.fields["path"]
            else:  # withdrawn meanwhile
                node.tell(Frame("forget", {"path": path}))

    def withdraw(self, shared: SharedTensors) -> None:
        path = shared.memory.path
        self._shared.pop(path, None)
        for node in self._nodes.values():
            if node.memory.pop(path, None) is not None:
                node.tell(Frame("forget", {"path": path}))

    # --- the end ------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End all workers and agents, and leave the cluster. A second call does nothing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for node in list(self._nodes.values()):
            self._dismiss_node(node, "the run has ended")
        await asyncio.get_running_loop().run_in_executor(None, self.end)

    def end(self) -> None:
        """Leave the cluster: Ray ends the agents, and these end the workers."""
        self.client.end()

    def __enter__(self) -> RaySupply:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    # --- the cluster --------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Connect to the cluster, listen for its nodes, and reserve a CPU for each worker."""
        cluster = await self.client.connection()
        self._server = await asyncio.start_server(
            self._entrance.greet, cluster.host, 0, limit=1 << 20, backlog=max(BACKLOG, self._workers)
        )
        port: int = self._server.sockets[0].getsockname()[1]
        self._driver = DriverAddress(cluster.host, port, self._entrance.secret, os.getcwd())
        self._cluster: RayConnection = cluster
        self._head = await self._call(lambda: str(cluster.ray.get_runtime_context().gcs_address))
        self._group = await self._call(self._reserve)
        await self._room()
        self._run(self._probe())

    def _reserve(self) -> Any:
        bundles = [self._kind.bundle] * self._workers
        return self._cluster.ray.util.placement_group(bundles, strategy=self._kind.strategy)

    async def _one_more(self) -> int:
        """A bundle for one more worker. Waits until the cluster has a CPU for it, for example on a node that joins."""
        group = await self._call(lambda: self._cluster.ray.util.placement_group([self._kind.bundle]))
        try:
            waited = 0.0
            while not await self._call(group.wait, 0.1):
                await asyncio.sleep(ASK_S)
                if waited < QUIET_S <= waited + ASK_S:
                    why = f"The Ray cluster has no free CPU for one more worker ({await self._call(self._free_now)})"
                    self.events.event("workers", event="no room", why=f"{why}; it starts when there is one")
                waited += ASK_S
        except BaseException:
            self.client.later(self._cluster.ray.util.remove_placement_group, group)
            raise
        self._numbers += 1
        self._single[self._numbers] = group
        return self._numbers

    async def _room(self) -> None:
        """Wait until the cluster has a CPU for each worker, and a GPU if it needs one."""
        waited, quiet, kind = 0.0, True, self._kind
        lacks = f"no {self._workers} free {kind.scarce}s"
        while not await self._call(self._group.wait, 1.0):
            waited += 1.0
            if waited >= QUIET_S and quiet:
                quiet = False
                why = f"The Ray cluster has {lacks} for {kind.name}s yet ({await self._call(self._free_now)})"
                self.events.event("workers", event="no room", why=f"{why}; pvg waits for at most {ROOM_S:g} s")
            if waited >= ROOM_S:
                found = await self._call(self._free_now)
                raise MissingRequirementError(
                    f"The Ray cluster had {lacks} for {kind.name}s in {ROOM_S:g} s ({found}).",
                    f"Use fewer {kind.name}s (-s {kind.setting}=N), or add a node: ray start --address HOST:PORT",
                )

    def _free_now(self) -> str:
        ray, what = self._cluster.ray, self._kind.scarce
        free, all_ = ray.available_resources().get(what, 0.0), ray.cluster_resources().get(what, 0.0)
        return f"it has {all_:g}, of which {free:g} are free"

    def _node_id(self, bundle: int) -> str:
        """Ray's id of the node that has a bundle now."""
        group, index = self._reserved(bundle)
        table = self._cluster.ray.util.placement_group_table(group)
        return str(table["bundles_to_node_id"].get(index, ""))

    def _reserved(self, bundle: int) -> tuple[Any, int]:
        """The placement group of a bundle, and its index there."""
        return (self._single[bundle], 0) if bundle in self._single else (self._group, bundle)

    # --- nodes --------------------------------------------------------------------------------------------------------

    async def _node_of(self, bundle: int) -> _Node:
        """The node for a worker, with an agent. Raises ConnectionError if there is none at the moment."""
        while True:
            place = await self._call(self._node_id, bundle)
            key = self._key(place, bundle)
            async with self._entering[key]:
                if key in self._nodes:
                    return self._nodes[key]
                if await self._call(self._node_id, bundle) == place:
                    return await self._enter(bundle)

    def _key(self, node: str, bundle: int) -> str:
        return f"{node}/{bundle}" if self._kind.gpus else node

    async def _enter(self, bundle: int) -> _Node:
        """Start an agent where Ray has put the bundle, or will put it."""
        key, expected = self._entrance.expect()
        actor, reference = await self._call(self._create, bundle, key)
        ended = asyncio.wrap_future(reference.future())
        ended.add_done_callback(lambda done: done.cancelled() or done.exception())  # its end may concern no one
        patience = GRACE_S if self._losses and self._nodes else AGENT_S
        try:
            await asyncio.wait({expected, ended}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if expected.done():
                return await self._greeted(*expected.result(), actor, ended, bundle)
            if ended.done():
                raise self._failure(ended)
        except BaseException:
            self._dismiss(actor)
            raise
        finally:
            self._entrance.forget(key)
        self._dismiss(actor)
        if not self._nodes or not self._losses or self._kind.gpus:
            raise ConnectionError(f"no agent has started in {patience:g} s")
        node = min(self._nodes.values(), key=lambda node: len(node.members))
        why = f"Ray has no room for {self._kind.name} {bundle}, so it shares node {node.name}"
        self.events.event("workers", event="node shared", node=node.name, why=why)
        return node

    def _create(self, bundle: int, key: int) -> tuple[Any, Any]:
        ray = self._cluster.ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, index = self._reserved(bundle)
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": place}
        if self._kind.gpus:
            options["num_gpus"] = self._kind.gpus
        actor = ray.remote(NodeAgent).options(**options).remote()
        return actor, actor.serve.remote(self._driver, key)

    async def _greeted(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        actor: Any,
        ended: asyncio.Future[None],
        bundle: int,
    ) -> _Node:
        """The node of an agent that has connected; it is in this bundle."""
        hello = await greeting(reader)
        key = self._key(hello.fields["node"], bundle)
        known = self._nodes.get(key)
        if known is not None:  # of another bundle
            writer.close()
            self._dismiss(actor)
            return known
        name = await self._call(self._cluster.node_name, hello.fields["node"])
        refuse_other_versions(name, hello.fields)
        note_other_processor(name, hello.fields, self.events)
        node = _Node(name, writer, key, actor, ended, bundle)
        self._nodes[node.key] = node
        self._run(self._listen(node, reader))
        self.events.event("workers", event="node joined", node=name, processor=hello.fields["processor"])
        try:
            await asyncio.gather(*(self._give(node, shared) for shared in list(self._shared.values())))
        finally:
            node.has_weights.set()
        return node

    def _failure(self, ended: asyncio.Future[None]) -> Exception:
        """Why an actor ended before it has connected: ConnectionError if another attempt may help."""
        exceptions, error = self._cluster.ray.exceptions, ended.exception()
        text = self._cluster.cause(error)
        if isinstance(error, exceptions.RayTaskError):
            remedy = f"Every node must reach the driver at {self._driver.host}, and have pvg with the extra cluster"
            return MissingRequirementError(f"A node of the Ray cluster cannot work: {text}.", remedy)
        if "ModuleNotFoundError" in str(error) or "ImportError" in str(error):
            return MissingRequirementError(
                f"A node of the Ray cluster cannot import pvg: {text}.",
                "Install pvg on all nodes, with the same version",
            )
        return ConnectionError(f"an agent could not start: {text}")

    async def _listen(self, node: _Node, reader: asyncio.StreamReader) -> None:
        """Take an agent's frames until its connection ends."""
        await node.listen(reader, self.events)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.wait({node.ended})), CAUSE_S)
        why = self._cluster.cause(node.ended.exception()) if node.ended.done() else "its connection broke"
        self._lose(node, f"its node {node.name} was lost: {why}")

    def _lose(self, node: _Node, why: str) -> None:
        """Give a node up: its workers start on other nodes."""
        if node.lost:
            return
        node.lose(why)
        self._losses += 1
        del self._nodes[node.key]
        self.events.event("workers", event="node lost", node=node.name, why=why, workers=len(node.members))
        for member in node.members:
            member.writer.transport.abort()
        self._dismiss(node.actor)

    async def _probe(self) -> None:
        """Give up nodes that do not report. Counts probes, not seconds: this process may have been stopped too."""
        while True:
            await asyncio.sleep(PROBE_S)
            self._head_missed = 0 if await answers(self._head) else self._head_missed + 1
            for node in list(self._nodes.values()):
                node.missed += 1
                if node.missed > PROBES_MISSED:
                    self._lose(node, f"its node {node.name} does not answer")

    # --- connections --------------------------------------------------------------------------------------------------

    def _log(self, line: str) -> None:
        """Log what Ray would print. Ray calls this from a thread."""
        self.events.event("workers", event="ray", text=line)

    def _dismiss_node(self, node: _Node, why: str) -> None:
        """Use a node no longer."""
        node.lost = why
        del self._nodes[node.key]
        node.writer.close()
        self._dismiss(node.actor)

    def _run(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def refuse_other_versions(name: str, found: Mapping[str, str]) -> None:
    """Raises MissingRequirementError for a node whose results would differ, or on which anyone can run code. `found`:
    what its agent has reported."""
    refuse_other_packages(name, found)
    if found["auth"].lower() != "token":
        raise MissingRequirementError(
            f"Node {name} does not require a token, so anyone who reaches it can run code there.",
            "Start all nodes with token authentication: RAY_AUTH_MODE=token ray start ...",
        )
