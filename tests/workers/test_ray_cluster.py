"""What a user can do wrong with a Ray cluster is an error with a remedy. None of these tests starts Ray."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from worker_stand_ins import RecordedEvents

import pvg
from pvg.errors import MissingRequirementError, PvgError, UsageError, WorkerLostError
from pvg.workers import ray_cluster, server_agent
from pvg.workers.ray_cluster import RayClient, end_session, open_cluster, refuse_other_versions
from pvg.workers.ray_supply import RaySupply
from pvg.workers.server_agent import ServerAgent, ServerOrder


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
    missing = refusal("127.0.0.1:6379")
    assert "no token" in missing.message
    assert "ray get-auth-token --generate" in missing.remedy
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "only clusters with token authentication" in refusal("127.0.0.1:6379").message


def test_an_address_where_no_cluster_answers_is_refused(monkeypatch, tmp_path):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        error = refusal(f"127.0.0.1:{unused.getsockname()[1]}")
    assert "No Ray cluster answers" in error.message
    assert "ray start --head" in error.remedy


def test_what_is_left_of_a_session_is_killed_and_nothing_else(tmp_path):
    """An agent of Ray stays for a minute after its head was killed. Its command line is only a name."""
    session, other = tmp_path / "session_1", tmp_path / "session_12"

    def process(name: str, output: Path) -> subprocess.Popen[bytes]:
        output.parent.mkdir(exist_ok=True)
        with output.open("wb") as file:
            return subprocess.Popen([name, "600"], executable="/bin/sleep", stdout=file)

    left = [process("ray::DashboardAgent", session / "agent.out")]
    kept = [process("ray::DashboardAgent", other / "agent.out"), process("tail", session / "copy")]
    left.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", f"--session-dir={session}"]))
    try:
        end_session(str(session))
        assert [one.wait(timeout=20) for one in left] == [-signal.SIGKILL] * 2
        assert [one.poll() for one in kept] == [None, None]
    finally:
        for one in [*left, *kept]:
            one.kill()
            one.wait()


def test_a_node_with_other_versions_or_without_a_token_is_refused():
    fit = {"pvg": pvg.__version__, "torch": metadata.version("torch"), "auth": "token"}
    refuse_other_versions("n1", fit)
    for wrong, says in (({"torch": "1.0"}, "has torch 1.0"), ({"pvg": "0"}, "has pvg 0"), ({"auth": ""}, "a token")):
        with pytest.raises(MissingRequirementError, match=says):
            refuse_other_versions("n1", {**fit, **wrong})


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
    connection = SimpleNamespace(close=hanging.wait, session="session_1")
    monkeypatch.setattr(ray_cluster, "open_cluster", lambda *_: connection)
    monkeypatch.setattr(ray_cluster, "end_session", killed.append)
    client = RayClient(2, "10.0.0.1:6379", events := RecordedEvents())
    with pytest.raises(WorkerLostError, match=r"10\.0\.0\.1:6379 does not answer"):
        asyncio.run(client.call(hanging.wait))
    with pytest.raises(WorkerLostError, match=r"10\.0\.0\.1:6379 does not answer"):
        client.own_gpu()
    assert ["10.0.0.1:6379" in event["why"] for event in events.of("waits")] == [True, True]
    client.end()
    assert killed == ["session_1"]


def test_a_cluster_whose_start_hangs_is_named_and_not_waited_for_without_end(monkeypatch, hanging):
    monkeypatch.setattr(ray_cluster, "open_cluster", lambda *_: hanging.wait())
    monkeypatch.setattr(ray_cluster, "ROOM_S", 0.1)
    client = RayClient(2, "10.0.0.1:6379", events := RecordedEvents())
    with pytest.raises(WorkerLostError, match=r"10\.0\.0\.1:6379 does not answer"):
        asyncio.run(client.connection())
    assert ["10.0.0.1:6379 to start" in event["why"] for event in events.of("waits")] == [True]
    client.end()


def test_the_agent_of_a_server_ends_quietly_when_it_is_stopped(monkeypatch, tmp_path, hanging):
    monkeypatch.setenv(server_agent.KEY_VARIABLE, "")
    monkeypatch.setattr(server_agent, "ray_node", lambda: "node")
    monkeypatch.setattr(server_agent, "find_interpreter", lambda: hanging.wait(0.05))

    async def stopped() -> list[str]:
        agent, seen = ServerAgent(ServerOrder({}, str(Path.cwd()), "", "key", str(tmp_path), 0, None)), []
        async for news in agent.serve():
            seen.append(news["news"])
            await agent.stop()
        return seen

    assert asyncio.run(stopped()) == ["hello"]


def test_a_cluster_without_room_is_named_and_not_waited_for_without_end(monkeypatch):
    ray = SimpleNamespace(
        util=SimpleNamespace(
            placement_group=lambda *_, **__: SimpleNamespace(wait=lambda limit_s: False),
            remove_placement_group=lambda _: None,
        ),
        available_resources=lambda: {"CPU": 1.0},
        cluster_resources=lambda: {"CPU": 4.0},
    )
    connection = SimpleNamespace(ray=ray, session=None, close=lambda: None)
    monkeypatch.setattr(ray_cluster, "open_cluster", lambda *_: connection)
    monkeypatch.setattr(ray_cluster, "ROOM_S", 0.1)
    monkeypatch.setattr("pvg.telemetry.events.QUIET_S", 0.01)
    events = RecordedEvents()
    with RaySupply(2) as supply:
        supply.events = events
        says = r"had no room for 2 workers in 0\.1 s \(1 of 4 CPUs are free\)"
        with pytest.raises(MissingRequirementError, match=says):
            asyncio.run(supply.ready())
    assert events.of("waits")[0]["why"] == "room for 2 workers on the Ray cluster, for at most 0.1 s"
