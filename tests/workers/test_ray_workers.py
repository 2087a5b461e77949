"""Workers on a Ray cluster of two simulated nodes compute the same bits as local ones, also when a node is killed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from new_process import in_new_process
from simulated_nodes import SimulatedNodes, simulated_nodes
from test_worker_processes import experiment, sampled, workers_of
from worker_stand_ins import RecordedEvents

from pvg.errors import MissingRequirementError
from pvg.models import open_model
from pvg.servers.publishing import WeightUpdate
from pvg.workers import pool as pool_module
from pvg.workers import ray_cluster, ray_supply
from pvg.workers.local import LocalSupply
from pvg.workers.pool import Supply, WorkerPool
from pvg.workers.ray_cluster import open_cluster
from pvg.workers.ray_supply import RaySupply

# A dead node is noticed after three seconds, not fifteen.
QUICK = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}


def nodes_of(pool: WorkerPool) -> list[str]:
    return sorted(shard.worker.member.names["node"] for shard in pool._shards if shard.worker.member is not None)


async def results(supply: Supply) -> list[list[bytes]]:
    """What two workers sample with the first and with other weights."""
    pool = WorkerPool(experiment(2), supply)
    await pool.start()
    try:
        first = await sampled(pool, 0)
        await pool.load_policy(WeightUpdate(7, other_weights()))
        return [first, await sampled(pool, 1)]
    finally:
        await pool.close()


def other_weights() -> dict[str, torch.Tensor]:
    with open_model(experiment(2).models.prover, torch.device("cpu")) as model:
        return {name: weight + 0.01 for name, weight in model.weights().items()}


async def on_the_cluster(monkeypatch, nodes: SimulatedNodes, expected: list[list[bytes]]) -> None:
    events = RecordedEvents()
    pool = WorkerPool(experiment(2), RaySupply(2, nodes.address), events)
    await pool.start()
    try:
        assert nodes_of(pool) == ["first", "second"]
        assert await sampled(pool, 0) == expected[0]
        await pool.load_policy(WeightUpdate(7, other_weights()))
        assert await sampled(pool, 1) == expected[1]
        for number, how in enumerate([signal.SIGKILL, signal.SIGSTOP], start=2):
            asked = asyncio.create_task(sampled(pool, number))
            await asyncio.sleep(0.02)
            os.kill(workers_of(pool)[0], how)
            assert await asked == expected[1]
        died, hung = (lost["why"] for lost in events.of("lost"))
        assert died.startswith("its process has died (")
        assert hung == "it did not answer, so pvg killed it"
        # A third node has room for the worker of the second one.
        (second,) = nodes.cluster.worker_nodes
        third = nodes.add(1)
        assert await sampled_without(pool, nodes, second) == expected[1]
        assert nodes_of(pool) == ["first", "third"]
        assert not events.of("node shared")
        monkeypatch.setattr(ray_supply, "GRACE_S", 1.0)
        # Nothing has room for the worker of the third one, so a node that is left gets it.
        assert await sampled_without(pool, nodes, third) == expected[1]
        # Until then the other worker may have sampled everything.
        while nodes_of(pool) != ["first", "first"]:  # noqa: ASYNC110 (the pool has no event for it)
            await asyncio.sleep(0.1)
        assert len(events.of("node shared")) == 1
        print([lost["why"] for lost in events.of("lost")])
        # For three seconds Ray may start the successor on the node that has died: it is lost before it runs anywhere.
        assert [lost["node"] for lost in events.of("lost")[2:] if lost["node"] != "?"] == ["second", "third"]
    finally:
        await pool.close()


async def sampled_without(pool: WorkerPool, nodes: SimulatedNodes, node: Any) -> list[bytes]:
    """What the workers sample while a node is killed."""
    asked = asyncio.create_task(sampled(pool, 5))
    await asyncio.sleep(0.02)
    nodes.kill(node)
    return await asked


@pytest.mark.drill
@in_new_process
def test_a_cluster_of_two_nodes_computes_the_same_bits(monkeypatch):
    monkeypatch.setattr(pool_module, "PROBE_S", 0.5)
    monkeypatch.setattr(ray_supply, "GRACE_S", 100.0)
    expected = asyncio.run(results(LocalSupply()))
    assert expected[0] != expected[1]
    with simulated_nodes([1, 1], QUICK) as nodes:
        asyncio.run(asyncio.wait_for(on_the_cluster(monkeypatch, nodes, expected), 600))
        for wrong in ({"RAY_AUTH_TOKEN": "0" * 64}, {"RAY_AUTH_TOKEN_PATH": os.devnull}):
            with monkeypatch.context() as changed:
                for name, value in wrong.items():
                    changed.setenv(name, value)
                with pytest.raises(MissingRequirementError, match=r"cannot join .*oken"):
                    open_cluster(2, nodes.address, print)


async def on_gpus(monkeypatch, nodes: SimulatedNodes) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1,0")
    supply = RaySupply(2, nodes.address, gpus=1)
    supply.events = events = RecordedEvents()
    try:
        own = ["2", "1", "0"][await asyncio.to_thread(supply.own_gpu)]
        members = [await supply.start() for _ in range(2)]
        assert sorted([own, *(member.names["gpus"] for member in members)]) == ["0", "1", "2"]
        assert [event["device"] for event in events.of("node joined")] == ["GPUs"]
        # The GPUs are used up. Also after a loss, a worker waits for one, and does not compute on a CPU.
        monkeypatch.setattr(ray_cluster, "ROOM_S", 2.0)
        monkeypatch.setattr(ray_supply, "GRACE_S", 0.1)
        says = r"no node for a worker with 1 CPU and 1 GPU in .* 0 of 3 GPUs are free"
        with pytest.raises(MissingRequirementError, match=says):
            await supply.start(successor=True)
    finally:
        await asyncio.to_thread(supply.end)
    # Ray has counted GPUs that torch does not find.
    monkeypatch.setattr(ray_cluster, "ROOM_S", 300.0)
    pool = WorkerPool(experiment(2), RaySupply(2, nodes.address, gpus=1), device="cuda")
    with pytest.raises(MissingRequirementError, match="finds no GPU for a worker"):
        await pool.start()
    await pool.close()


@pytest.mark.drill
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPUs of this test are only numbers; it needs none")
@in_new_process
def test_each_worker_gets_a_gpu_that_neither_the_trainer_nor_another_one_has(monkeypatch):
    with simulated_nodes([4], QUICK, gpus=3) as nodes:
        asyncio.run(asyncio.wait_for(on_gpus(monkeypatch, nodes), 600))


def weights(run: Path) -> dict[str, str]:
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in run.rglob("*.safetensors")
    }


@pytest.mark.drill
def test_a_game_on_a_cluster_that_pvg_starts_has_the_weights_of_local_workers(tmp_path):
    settings = ["game.rounds=1", "training.steps=3", "verifier.steps=2", "game.mint_problems=16", "cluster.workers=2"]
    given = [word for text in [*settings, f"store.root={tmp_path}"] for word in ("-s", text)]
    for cluster in ("local", "ray"):
        command = [sys.executable, "-m", "pvg", "train", "--name", cluster, "--cluster", cluster, *given]
        subprocess.run(command, capture_output=True, check=True)
    assert weights(tmp_path / "ray") == weights(tmp_path / "local") != {}


SIGNALLED = """
import asyncio, os, signal, time
from pvg.workers.ray_cluster import RayClient
signal.signal(signal.SIGTERM, lambda *_: print("committing", flush=True))
client = RayClient(1, None)
asyncio.run(client.connection())
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(5.0)
client.end()
print("committed")
"""


@pytest.mark.drill
def test_sigterm_leaves_a_run_time_to_commit():
    """Ray's own handler would abort the process 3 s after the signal."""
    done = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["committing", "committed"]


async def with_a_node_that_joins(monkeypatch, nodes: SimulatedNodes, expected: list[bytes]) -> None:
    monkeypatch.setattr(pool_module, "LOOK_S", 1000.0)  # this test alone decides
    monkeypatch.setattr("pvg.telemetry.events.QUIET_S", 1.0)
    monkeypatch.setattr(ray_supply, "GRACE_S", 1.0)
    events = RecordedEvents()
    pool = WorkerPool(experiment(2, min_workers=1), RaySupply(2, nodes.address), events)
    await pool.start()
    try:
        coming = asyncio.create_task(pool.add("chance", {}))
        while not any("room for" in event["why"] for event in events.of("waits")):
            assert await sampled(pool, 0) == expected  # the run continues with its other workers
        second = nodes.add(1)
        await coming
        assert nodes_of(pool) == ["first", "second"]
        assert await sampled(pool, 1) == expected
        await pool.remove(1, "chance")
        assert nodes_of(pool) == ["first", "first"]
        assert await sampled(pool, 2) == expected
        await pool.add("chance", {})  # Ray has the CPU back
        assert nodes_of(pool) == ["first", "second"]
        assert await sampled_without(pool, nodes, second) == expected
        assert nodes_of(pool) == ["first", "first"]
        assert await sampled(pool, 3) == expected
        await pool.remove(1, "chance")
        events.seen.clear()
        coming = asyncio.create_task(pool.add("chance", {}))
        while not any("room for" in event["why"] for event in events.of("waits")):  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.1)
        coming.cancel()  # the run ends while a worker waits for room
        await asyncio.gather(coming, return_exceptions=True)
    finally:
        await pool.close()


@pytest.mark.drill
@in_new_process
def test_a_node_that_joins_gets_a_worker_and_one_that_leaves_changes_no_bit(monkeypatch):
    monkeypatch.setattr(pool_module, "PROBE_S", 0.5)
    expected = asyncio.run(results(LocalSupply()))[0]
    with simulated_nodes([1], QUICK) as nodes:
        asyncio.run(asyncio.wait_for(with_a_node_that_joins(monkeypatch, nodes, expected), 600))
