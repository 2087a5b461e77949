"""Weights and the nodes of a cluster, in the orders that races allow. Agents and connections are real; Ray is not.

The agents of these tests confirm weights only when the test lets them. So a test decides what happens before that.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pvg.workers import node_agent, ray_cluster
from pvg.workers.frames import Frame, receive, send
from pvg.workers.links import connect
from pvg.workers.node_agent import DriverAddress
from pvg.workers.ray_cluster import RayConnection
from pvg.workers.ray_supply import RaySupply
from pvg.workers.shared import SharedTensors

pytestmark = pytest.mark.slow

NODE = "a-node"
PATIENCE_S = 20.0


class SlowAgent:
    """Answers as `NodeAgent` does, but confirms weights only after `allowed`. `seen`: what it has done, in order."""

    def __init__(self) -> None:
        self.allowed = asyncio.Event()
        self.asked = asyncio.Event()
        self.forgotten = asyncio.Event()
        self.seen: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._workers: list[Any] = []

    async def serve(self, driver: DriverAddress, key: int) -> None:
        self._driver = driver
        reader, self._writer = await self._connected(key)
        send(self._writer, Frame("hello", {**node_agent.versions(), "node": NODE}))
        while (frame := await receive(reader)) is not None:
            task = asyncio.create_task(self._answer(frame))
            self._tasks.add(task)

    async def _connected(self, key: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        driver = self._driver
        connection = await asyncio.to_thread(connect, driver.host, driver.port, driver.secret, key)
        return await asyncio.open_connection(sock=connection)

    async def _answer(self, frame: Frame) -> None:
        fields: dict[str, Any] = {}
        if frame.kind == "weights":
            self.asked.set()
            await self.allowed.wait()
            fields = {"path": f"on-node:{frame.fields['path']}"}
        elif frame.kind == "fork":
            self._workers.append(await self._connected(frame.fields["key"]))
            fields = {"pid": 2**22 + len(self._workers)}
        elif frame.kind == "forget":
            self.forgotten.set()
        self.seen.append(frame.kind)
        if "id" in frame.fields:
            send(self._writer, Frame("answer", {**fields, "id": frame.fields["id"]}))

    async def told(self) -> Frame:
        """The next frame that the driver sends to the first worker."""
        frame = await receive(self._workers[0][0])
        assert frame is not None
        return frame


@asynccontextmanager
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[RaySupply, SlowAgent, dict[int, str]]]:
    """A supply of two workers whose cluster has one node. The last item: the nodes of the bundles that are known."""
    agent, places, loop = SlowAgent(), {0: "", 1: ""}, asyncio.get_running_loop()
    serving: list[Any] = []

    def create(_supply: RaySupply, _bundle: int, key: int) -> tuple[Any, Any]:
        serving.append(asyncio.run_coroutine_threadsafe(agent.serve(_supply._driver, key), loop))
        return "actor", SimpleNamespace(future=Future)

    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    head = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    ray = SimpleNamespace(
        get_runtime_context=lambda: SimpleNamespace(gcs_address=head),
        util=SimpleNamespace(
            placement_group=lambda *_, **__: SimpleNamespace(wait=lambda _: True),
            placement_group_table=lambda _: {"bundles_to_node_id": dict(places)},
        ),
        nodes=lambda: [{"NodeID": NODE, "NodeName": "first"}],
        exceptions=SimpleNamespace(ActorUnavailableError=ConnectionError),
        kill=lambda _: None,
        shutdown=lambda: None,
    )
    monkeypatch.setitem(os.environ, "RAY_AUTH_MODE", "token")
    monkeypatch.setattr(ray_cluster, "open_cluster", lambda *_: RayConnection(ray, "127.0.0.1"))
    monkeypatch.setattr(RaySupply, "_create", create)
    supply = RaySupply(2)
    try:
        yield supply, agent, places
    finally:
        await supply.close()
        server.close()
        await asyncio.gather(*map(asyncio.wrap_future, serving), return_exceptions=True)


def test_no_worker_of_a_new_node_starts_before_the_node_has_the_weights(monkeypatch):
    """The node joins for one bundle. Meanwhile Ray puts the other bundle on the same node."""

    async def run() -> None:
        async with cluster(monkeypatch) as (supply, agent, places):
            shared = SharedTensors({"weight": torch.arange(4.0)})
            await supply.share(shared)
            first = asyncio.create_task(supply.start())
            await agent.asked.wait()
            places[1] = NODE
            second = asyncio.create_task(supply.start())
            await asyncio.wait({second}, timeout=0.5)  # time for a start that does not wait
            agent.allowed.set()
            for member in await asyncio.gather(first, second):
                member.send(Frame("load", {"place": shared.place}))
            assert agent.seen == ["weights", "fork", "fork"]
            assert (await agent.told()).fields["place"]["path"] == f"on-node:{shared.memory.path}"
            shared.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_weights_that_are_withdrawn_on_their_way_are_forgotten_on_the_node(monkeypatch):
    """A model is closed while a node that joins gets its weights. The node must not keep them for the whole run."""

    async def run() -> None:
        async with cluster(monkeypatch) as (supply, agent, _places):
            shared = SharedTensors({"weight": torch.arange(4.0)})
            await supply.share(shared)
            start = asyncio.create_task(supply.start())
            await agent.asked.wait()
            supply.withdraw(shared)
            agent.allowed.set()
            await start
            await agent.forgotten.wait()
            assert supply._nodes[NODE].memory == {}
            shared.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
