"""Trainer ranks on a Ray cluster of two simulated nodes compute the same bits as local ones, also when ranks and nodes
are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from new_process import in_new_process
from simulated_nodes import SimulatedNodes, simulated_nodes
from test_ray_servers import KEY, Servers, stand_in
from test_ray_workers import QUICK, weights
from test_trainer_ranks import SETTINGS, Training, addresses, batch, experiment, model_folder, training

from pvg.errors import PvgError
from pvg.models import open_model
from pvg.training.trainer import trainable_parameters
from pvg.workers import rank_group as rank_group_module
from pvg.workers import ray_supply
from pvg.workers.rank_group import RankGroup
from pvg.workers.ranks import ModelInRanks, rank_fields
from pvg.workers.ray_supply import RANKS, RANKS_ON_GPUS, RaySupply

__all__ = ["model_folder"]  # a fixture

STEPS = 7


async def disturbed(found: Training, nodes: SimulatedNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Play the steps. Meanwhile a rank is killed, one hangs, and two nodes are killed; a third one has joined."""
    group, events = found.group, found.events
    assert sorted(group.nodes) == ["first", "second"]
    await found.play(1)
    await found.commit()
    await found.play(1)
    for rank, how in ((1, signal.SIGKILL), (0, signal.SIGSTOP)):
        playing = asyncio.create_task(found.play(1))
        await asyncio.sleep(0.005)
        os.kill(group.pids[rank], how)
        await playing
    (second,) = nodes.cluster.worker_nodes
    third = nodes.add(1)
    for node, left in ((second, ["first", "third"]), (third, ["first", "first"])):
        playing = asyncio.create_task(found.play(1))
        await asyncio.sleep(0.005)
        nodes.kill(node)
        await playing
        if sorted(group.nodes) != left:  # it died after the last answer of its rank
            await found.commit()
        assert sorted(group.nodes) == left
        monkeypatch.setattr(ray_supply, "GRACE_S", 1.0)  # nothing has room for the rank of the third one
    await found.play(1)
    assert len(events.of("node shared")) == 1
    assert [lost["node"] for lost in events.of("node lost")] == ["second", "third"]
    why = [lost["why"] for lost in events.of("rank lost")]
    assert [text.partition(",")[0] for text in why[:2]] == ["killed by SIGKILL"] * 2
    assert all("on node first" in text or "on node second" in text for text in why[:2])
    assert ["its node second was lost" in why[2], "its node third was lost" in why[3]] == [True, True]
    assert [hangs["node"] for hangs in events.of("rank hangs")] == [why[1].rpartition(" ")[2]]


async def refused(group: RankGroup, source: Path) -> None:
    """An error in a rank names its node."""
    chosen = experiment(source)
    fields = rank_fields(chosen.training, chosen.rollout, chosen.models)
    fields["model"] = {**fields["model"], "source": str(source / "missing")}
    with open_model(chosen.models.prover, torch.device("cpu")) as learner:
        learner.require_gradients()
        model = ModelInRanks(group, fields, SETTINGS, trainable_parameters(learner.module), lambda: None)
        with pytest.raises(PvgError, match=r"^On node (first|second): .*missing"):
            await model.prepare()
        assert not group.running
        await model.close()


@pytest.mark.drill
@in_new_process
def test_ranks_on_two_nodes_train_the_same_bits_whatever_dies(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group_module, "PROBE_S", 0.5)
    monkeypatch.setattr(ray_supply, "GRACE_S", 100.0)
    chosen, batches = experiment(model_folder), [batch(seed) for seed in range(STEPS)]

    async def expected() -> Training:
        group = RankGroup(2, "cpu")
        try:
            async with training(group, chosen, 2, batches) as local:
                await local.play(STEPS)
                await local.commit()
                return local
        finally:
            await group.close()

    async def on_nodes(nodes: SimulatedNodes) -> Training:
        group = RankGroup(2, "cpu", supply=RaySupply(2, nodes.address, of=RANKS))
        try:
            await group.ready()
            await refused(group, model_folder)
            async with training(group, chosen, 2, batches) as found:
                assert addresses(group.pids) == {"127.0.0.1"}
                await disturbed(found, nodes, monkeypatch)
                await found.commit()
                return found
        finally:
            await group.close()

    local = asyncio.run(asyncio.wait_for(expected(), 100))
    with simulated_nodes([1, 1], QUICK) as nodes:
        found = asyncio.run(asyncio.wait_for(on_nodes(nodes), 300))
    assert found.bits == local.bits
    assert [m["loss"] for m in found.metrics] == [m["loss"] for m in local.metrics]
    state, same = found.committed[-1], local.committed[-1]
    assert state[1] == same[1]
    assert state[0].keys() == same[0].keys()
    for name, tensor in same[0].items():
        assert torch.equal(state[0][name], tensor), name


async def beside_servers(nodes: SimulatedNodes, root: Path, model: Path) -> None:
    """Ranks and vLLM servers use one connection to the cluster."""
    async with Servers(nodes, root) as use:
        await use.drill.publish(0)
        await use.both_up()
        group = RankGroup(2, "cpu", supply=RaySupply(2, of=RANKS, client=use.servers.client.another()))
        async with training(group, experiment(model), 2, [batch(0)]) as found:
            assert sorted(group.nodes) == ["first", "second"]
            await found.play(1)
        await group.close()
        await use.drill.publish(1)  # the servers have not left with the ranks


async def on_gpus(nodes: SimulatedNodes) -> None:
    """Ray counts the GPUs that a node says it has, and shows each rank its own. Both ranks use the same node."""
    supply = RaySupply(2, nodes.address, of=RANKS_ON_GPUS)
    try:
        members = await asyncio.gather(supply.start(), supply.start())
        assert [member.names["node"] for member in members] == ["third", "third"]
        environments = [psutil.Process(member.pid).environ() for member in members]
        assert {env["CUDA_VISIBLE_DEVICES"] for env in environments} == {"0", "1"}
        # It is killed and loses its connection at once. It ends because of the one or of the other.
        assert (await supply.reason(members[0])).endswith(", on node third")
        again = await supply.start()  # the same GPU is free again
        assert psutil.Process(again.pid).environ()["CUDA_VISIBLE_DEVICES"] == environments[0]["CUDA_VISIBLE_DEVICES"]
    finally:
        await supply.close()


@pytest.mark.drill
@in_new_process
def test_ranks_share_a_cluster_with_servers_and_see_the_gpus_that_ray_reserves(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PVG_VLLM_PYTHON", str(stand_in(tmp_path / "vllm")))
    monkeypatch.setenv("PVG_CONTROL_KEY", KEY)
    with simulated_nodes([2, 2], QUICK) as nodes:
        asyncio.run(asyncio.wait_for(beside_servers(nodes, tmp_path / "root", model_folder), 300))
        nodes.add(2, num_gpus=2)
        asyncio.run(asyncio.wait_for(on_gpus(nodes), 300))


@pytest.mark.drill
def test_a_game_whose_ranks_and_worker_share_a_cluster_has_the_weights_of_a_local_one(tmp_path: Path) -> None:
    """`pvg train --cluster ray` starts one cluster for both."""
    settings = [
        "game.rounds=1",
        "training.steps=3",
        "verifier.steps=2",
        "game.mint_problems=16",
        "store.commit_every=2",
    ]
    settings += ["cluster.workers=1", "cluster.trainer_ranks=2", f"store.root={tmp_path}"]
    given = [word for text in settings for word in ("-s", text)]
    for cluster in ("local", "ray"):
        command = ["-c", "from pvg_cli.main import app; app()", "train", "--name", cluster, "--cluster", cluster]
        done = subprocess.run([sys.executable, *command, *given, "--json"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["status"] == "complete"
        log = (tmp_path / cluster / "events.log").read_text()
        assert ("nodes=" in log) == (cluster == "ray")  # where the ranks are
    assert weights(tmp_path / "ray") == weights(tmp_path / "local") != {}
