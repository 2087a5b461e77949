"""What a user can do wrong with a Ray cluster is an error with a remedy. None of these tests starts Ray."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from worker_stand_ins import RecordedEvents

import pvg
from pvg.errors import MissingRequirementError, PvgError, UsageError, WorkerLostError
from pvg.telemetry.device import processor
from pvg.workers import ray_cluster, ray_servers
from pvg.workers.ray_cluster import RayActor, RayClient, open_cluster, refuse_other_versions
from pvg.workers.ray_servers import ServerAgent, ServerOrder
from pvg.workers.ray_supply import RaySupply


@pytest.fixture(autouse=True)
def no_token(monkeypatch, tmp_path):
    """A machine without a token. The environment is restored, because `open_cluster` changes it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "")
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.delenv(name, raising=False)


def refusal(address: str | None) -> PvgError:
    with pytest.raises(PvgError) as raised:
        open_cluster(2, address, print)
    return raised.value


def test_without_ray_there_is_a_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    error = refusal(None)
    assert "Ray is not installed" in error.message
    assert "[cluster]" in error.remedy


@pytest.mark.parametrize("address", ["10.0.0.1", ":6379", "ray://a:10001", "10.0.0.1:port", "..:6379", "x:65536"])
def test_what_is_no_address_is_refused(address):
    error = refusal(address)
    assert isinstance(error, UsageError)
    assert "HOST:PORT" in error.remedy


def test_a_cluster_without_authentication_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "only clusters with token authentication" in refusal("127.0.0.1:6379").message


def test_an_address_where_no_cluster_answers_is_refused():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        error = refusal(f"127.0.0.1:{unused.getsockname()[1]}")
    assert "No Ray cluster answers" in error.message
    assert "ray start --head" in error.remedy


def test_a_node_with_other_versions_or_without_a_token_is_refused():
    fit = {"node": "n1", "pvg": pvg.__version__, "torch": metadata.version("torch"), "auth": "token"}
    refuse_other_versions(fit)
    for wrong, says in (({"torch": "1.0"}, "has torch 1.0"), ({"pvg": "0"}, "has pvg 0"), ({"auth": ""}, "a token")):
        with pytest.raises(MissingRequirementError, match=says):
            refuse_other_versions({**fit, **wrong})


@pytest.fixture
def hanging(monkeypatch) -> Iterator[threading.Event]:
    """The limits are short, and a call of Ray may wait for this event."""
    monkeypatch.setattr(ray_cluster, "CALL_S", 0.1)
    monkeypatch.setattr(ray_cluster, "LEAVE_S", 0.1)
    monkeypatch.setattr("pvg.telemetry.events.QUIET_S", 0.01)
    never = threading.Event()
    yield never
    never.set()


def test_a_call_of_ray_that_hangs_is_named_and_neither_it_nor_the_end_is_waited_for(monkeypatch, hanging):
    """As with a head of the cluster that was stopped (SIGSTOP). The processes of an own cluster are killed."""
    killed: list[str] = []
    monkeypatch.setattr(ray_cluster, "open_cluster", lambda *_: SimpleNamespace(shutdown=hanging.wait))
    monkeypatch.setattr(ray_cluster, "kill_own_head", lambda: killed.append("head"))
    client = RayClient(2, "10.0.0.1:6379", events := RecordedEvents())
    with pytest.raises(WorkerLostError, match=r"10\.0\.0\.1:6379 does not answer"):
        asyncio.run(client.call(hanging.wait))
    with pytest.raises(WorkerLostError, match=r"10\.0\.0\.1:6379 does not answer"):
        client.own_gpu()
    assert ["10.0.0.1:6379" in event["why"] for event in events.of("waits")] == [True, True]
    client.end()
    assert killed == ["head"]


@pytest.mark.parametrize("hangs", [True, False])
def test_a_head_that_hangs_or_refuses_is_noticed(monkeypatch, hanging, hangs):
    """A stopped head still accepts connections, so the question must be one that it answers."""
    answers = iter(["up", "up"])

    def nodes() -> str:
        if (found := next(answers, None)) is None:
            assert hangs, "the head has ended"
            hanging.wait()
        return str(found)

    monkeypatch.setattr(ray_cluster, "open_cluster", lambda *_: SimpleNamespace(nodes=nodes, shutdown=lambda: None))
    monkeypatch.setattr(ray_cluster, "PROBE_S", 0.01)
    client = RayClient(2, "10.0.0.1:6379")
    with pytest.raises(WorkerLostError, match=r"10\.0\.0\.1:6379 does not answer"):
        asyncio.run(client.watch())
    assert next(answers, None) is None
    client.end()


def test_a_cluster_whose_start_hangs_is_named_and_not_waited_for_without_end(monkeypatch, hanging):
    monkeypatch.setattr(ray_cluster, "open_cluster", lambda *_: hanging.wait())
    monkeypatch.setattr(ray_cluster, "ROOM_S", 0.1)
    client = RayClient(2, "10.0.0.1:6379", events := RecordedEvents())
    with pytest.raises(WorkerLostError, match=r"10\.0\.0\.1:6379 does not answer"):
        asyncio.run(client.connection())
    assert ["the start of the Ray cluster at 10.0.0.1:6379" in event["why"] for event in events.of("waits")] == [True]
    client.end()


def test_the_agent_of_a_server_ends_quietly_when_it_is_stopped(monkeypatch, tmp_path, hanging):
    monkeypatch.setenv(ray_servers.KEY_VARIABLE, "")
    monkeypatch.setattr(ray_servers, "hello", lambda: {"address": "127.0.0.1"})
    monkeypatch.setattr(ray_servers, "find_interpreter", lambda: hanging.wait(0.05))

    async def stopped() -> list[dict[str, str]]:
        agent, seen = ServerAgent(ServerOrder({}, str(Path.cwd()), "", "key", str(tmp_path), 0, None)), []
        async for news in agent.serve():
            seen.append(news)
            await agent.stop()
        return seen

    assert asyncio.run(stopped()) == [{"address": "127.0.0.1"}]


async def no_frames() -> AsyncIterator[None]:
    """An actor that finds no room."""
    await asyncio.Event().wait()
    yield


class FullCluster:
    """In place of the module ray."""

    def __init__(self) -> None:
        self.frames = no_frames
        self.started: list[object] = []
        self.killed: list[object] = []
        self.exceptions = SimpleNamespace(RayError=OSError)
        self.kill = self.killed.append
        self.nodes, self.shutdown = list, lambda: None

    def remote(self, _: type) -> SimpleNamespace:
        def start(_: object) -> SimpleNamespace:
            serve = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.frames))
            self.started.append(actor := SimpleNamespace(serve=serve))
            return actor

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0, "GPU": 2.0}


@pytest.fixture
def full(monkeypatch) -> FullCluster:
    ray = FullCluster()
    monkeypatch.setattr(ray_cluster, "open_cluster", lambda *_: ray)
    return ray


def test_an_actor_that_starts_after_its_caller_has_left_is_killed(full):
    """The thread that calls Ray is busy when the caller leaves, as with the weights of a large model."""

    async def left() -> None:
        client, busy = RayClient(2, None), threading.Event()
        await client.connection()
        other = asyncio.create_task(client.call(busy.wait))
        starting = asyncio.create_task(client.started(object, None, {"num_cpus": 1}, RayActor))
        for _ in range(20):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        busy.set()
        await other
        for _ in range(2):  # then the thread has started the actor, and then it has killed it
            await client.call(int)
        await asyncio.to_thread(client.end)

    asyncio.run(left())
    assert full.killed == full.started
    assert len(full.started) == 1


def test_a_worker_gets_no_probe_while_it_imports_torch(full):
    """Until then it may answer none for longer than a worker that hangs has."""
    found = {"node": "n1", "pid": 7, "processor": processor(), "auth": "token", "gpus": ""}
    found |= {"pvg": pvg.__version__, "torch": metadata.version("torch")}

    async def start() -> None:
        imported, supply = asyncio.Event(), RaySupply(2)
        supply.events = events = RecordedEvents()

        async def frames() -> AsyncIterator[Awaitable[object]]:
            yield asyncio.sleep(0, found)
            await imported.wait()
            yield asyncio.sleep(0, b"")

        full.frames = frames
        starting = asyncio.create_task(supply.start())
        while not events.of("node joined"):  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.001)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not starting.done()
        imported.set()
        assert (await starting).names["pid"] == 7
        await asyncio.to_thread(supply.end)

    asyncio.run(asyncio.wait_for(start(), 60))


def test_a_cluster_without_room_is_named_and_not_waited_for_without_end(monkeypatch, full):
    monkeypatch.setattr(ray_cluster, "ROOM_S", 0.1)
    monkeypatch.setattr("pvg.telemetry.events.QUIET_S", 0.01)
    events = RecordedEvents()

    async def refused() -> None:
        supply = RaySupply(2)
        supply.events = events
        with pytest.raises(
            MissingRequirementError, match=r"no node for a worker with 1 CPU in .* \(1 of 4 CPUs are free\)"
        ):
            await supply.start()
        await asyncio.to_thread(supply.end)

    asyncio.run(refused())
    assert events.of("waits")[0]["why"] == "room for a worker on the Ray cluster, for at most 0.1 s"
    assert full.killed == full.started
