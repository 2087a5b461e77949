"""What the players of a run are opened with."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pvg.config.load import build_experiment
from pvg.errors import MissingRequirementError
from pvg.game import players
from pvg.game.parts import BatchLogprobs
from pvg.game.states import Phase
from pvg.models import compute
from pvg.models.compute import ComputeExecutor
from pvg.models.sources import open_learner
from pvg.planning.memory import memory_of, read_shape
from pvg.tasks import open_task
from pvg.training.batch import PolicyBatch
from pvg.training.losses import PolicyObjective
from pvg.workers import ray_cluster

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_threads_of_one_experiment_do_not_stay_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep over models.threads opens one after the other in one process; 0 is the model's default each time."""
    monkeypatch.setattr(compute, "ALL_THREADS", 2)

    async def opened(threads: int) -> list[int]:
        experiment = build_experiment({"models": {"threads": threads}})
        found = players.Players(experiment, open_task(experiment.task))
        try:
            return [found.threads, await found.compute(torch.get_num_threads)]
        finally:
            await found.close()

    assert [asyncio.run(opened(threads)) for threads in (2, 0, 2)] == [[2, 2], [1, 1], [2, 2]]
    monkeypatch.setattr(compute, "WIDE", 128)  # the embedded prover's own width
    assert [asyncio.run(opened(threads)) for threads in (1, 0, 1)] == [[1, 1], [2, 2], [1, 1]]


def test_variants_that_share_an_executor_share_the_threads_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "ALL_THREADS", 3)
    with compute.compute_executor(0) as executor:
        assert executor.settle(64) == executor.settle(4096) == 1
    with compute.compute_executor(0) as executor:
        assert executor.settle(4096) == executor.settle(64) == 3
        assert executor.submit(torch.get_num_threads).result() == ComputeExecutor.in_use == 3
    with compute.compute_executor(2) as executor:
        assert executor.settle(4096) == 2


POOLS = """
import os
import torch
from pvg.models.compute import compute_executor

def count():
    return len(os.listdir("/proc/self/task"))

def work():  # far above the size from which torch works in parallel
    torch.ones(4_000_000).mul_(2.0)

before = count()
with compute_executor(3) as executor:
    executor.submit(work).result()
    pool = count()
    work()
    print(pool - before, count() - pool)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs the counters of Linux")
def test_the_compute_thread_alone_has_a_pool() -> None:
    """A second pool puts both to sleep between operations (pvg.models.compute). In a process that has none yet."""
    found = subprocess.run([sys.executable, "-c", POOLS], capture_output=True, text=True, check=True, timeout=300)
    grown, second = map(int, found.stdout.split())
    assert grown == 3  # the compute thread and two more for its pool of three
    assert second == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout": {"engine": "vllm"}, "cluster": {"kind": "ray", "gpus_per_worker": 1}},
        {"cluster": {"kind": "ray", "workers": 2}},
    ],
)
def test_the_trainer_on_a_ray_cluster_uses_the_gpu_that_ray_has_reserved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Otherwise Ray would give it to a server or a worker too."""
    opened: list[torch.device] = []

    def open_model(_source: object, device: torch.device, _dtype: str) -> None:
        opened.append(device)
        raise MissingRequirementError("this test has no GPU")

    monkeypatch.setattr(ray_cluster, "open_cluster", lambda *_: SimpleNamespace(shutdown=lambda: None))
    monkeypatch.setattr(ray_cluster.RayClient, "own_gpu", lambda _: 3)
    monkeypatch.setattr(players, "pick_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(players, "open_model", open_model)
    experiment = build_experiment({**settings, "weights": {"root": str(tmp_path)}})
    with pytest.raises(MissingRequirementError, match="no GPU"):
        players.Players(experiment, open_task(experiment.task))
    assert opened == [torch.device("cuda", 3)]


@pytest.mark.parametrize("ranks", [None, 4])
@pytest.mark.parametrize(("kl", "adapters"), [(0.0, 0), (0.02, 0), (0.0, 2)], ids=["alone", "kl", "verifier on base"])
def test_a_gpu_has_the_models_that_the_plan_counts(ranks: int | None, kl: float, adapters: int) -> None:
    """In each phase that trains. "meta", whose tensors have no memory, stands for the GPU; it unties the head."""
    models = {player: {"source": "embedded:modchain-prover"} for player in ("prover", "verifier")}
    data = {
        "models": {**models, "device": "cpu", "precision": "bfloat16"},
        "training": {"kl": {"coefficient": kl}},
        "verifier": {"head": "scalar", "adapters": {"rank": adapters}},
        "cluster": {"kind": "none"} if ranks is None else {"kind": "local", "workers": 0, "trainer_ranks": ranks},
    }
    experiment = build_experiment(data)
    shape = read_shape("embedded:modchain-prover", print)
    memory = list(memory_of(experiment, shape, shape, prompt_tokens=16, slots=16, gpu_bytes=80e9))
    counted = {plan.stage: plan.parts for plan in memory}

    def held(*modules: torch.nn.Module) -> int:
        weights = {weight for module in modules for weight in module.parameters() if weight.is_meta}
        return sum(weight.nbytes for weight in weights)

    async def play(phase: Phase) -> None:
        found = players.Players(experiment, open_task(experiment.task))
        found.device = torch.device("meta")
        try:
            learner = open_learner(found, 0, found.learner_device)  # now: nothing can be read from "meta"
            await found.place_base(phase)
            if phase is Phase.TRAIN_PROVER:
                parts, verifier = counted["train the prover"], found.open_frozen_verifier()
                objective = PolicyObjective(experiment.training, experiment.rollout, 0)
                logprobs = BatchLogprobs(found, objective, learner)
                await logprobs.prepare()
                weights = held(found.base.module, learner.module, verifier, logprobs.reference.module)
                await logprobs.close()
                # The parts of ranks are not the learner's.
                trained = parts["trained weights"] if ranks is None else 0
                assert weights == pytest.approx(parts["base prover"] + parts["verifier"] + trained, rel=0.02)
            else:
                parts, verifier = counted["train the verifier"], found.open_verifier()
                names = ("base prover", "verifier's initial weights", "trained weights")
                expected = sum(parts[name] for name in names)
                assert held(found.base.module, verifier) == pytest.approx(expected, rel=0.01)
            verifier.close()
            learner.close()
        finally:
            await found.close()

    for phase in (Phase.TRAIN_VERIFIER, Phase.TRAIN_PROVER):
        asyncio.run(play(phase))


@pytest.mark.parametrize("shared", [False, True])
def test_a_reference_in_the_precision_of_passes_gives_the_same_bits(shared: bool) -> None:
    data = {"models": {"device": "cpu", "precision": "bfloat16"}, "training": {"shared_prompts": shared}}
    experiment = build_experiment(data)
    rows, prompt = [(np.arange(30 + row) % 12).astype(np.int32) for row in range(6)], 8
    batch = PolicyBatch(
        sequences=rows,
        prompt_lengths=np.full(len(rows), prompt, np.int32),
        sampled_logprobs=[np.zeros(len(row) - prompt, np.float32) for row in rows],
        reference_logprobs=None,
        advantages_N=np.ones(len(rows), np.float32),
        role_ids_N=np.zeros(len(rows), np.int8),
        group_ids_N=np.zeros(len(rows), np.int32),
        versions_N=np.zeros(len(rows), np.int32),
    )

    async def play() -> list[PolicyBatch]:
        found = players.Players(experiment, open_task(experiment.task))
        try:
            objective = PolicyObjective(experiment.training, experiment.rollout, 0, "bfloat16")
            logprobs = BatchLogprobs(found, objective, found.base)
            plain = await logprobs.add(batch)
            found.device = torch.device("cpu", 0)  # another one than the base's
            await logprobs.prepare()
            assert logprobs.reference is not found.base
            copied = await logprobs.add(batch)
            await logprobs.close()
            return [plain, copied]
        finally:
            await found.close()

    plain, copied = asyncio.run(play())
    assert plain.reference_logprobs is not None
    assert copied.reference_logprobs is not None
    for expected, logprobs in zip(plain.reference_logprobs, copied.reference_logprobs, strict=True):
        np.testing.assert_array_equal(logprobs, expected)
