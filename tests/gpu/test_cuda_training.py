"""Training on a GPU: the weights of a CPU, the measured memory, and clocks and numbers of the right GPU."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu.sizes import SMALL, random_model
from benchmarks.gpu.steps import RepeatedBatch, batch_of
from pvg.config.load import build_experiment
from pvg.models.compute import allow_tf32
from pvg.telemetry.device import gpu_number, peak_memory
from pvg.telemetry.spans import CudaClock
from pvg.training.batch import PolicyBatch
from pvg.training.losses import PolicyObjective
from pvg.training.trainer import OptimizerSettings, StepReport, Trainer

CPU = torch.device("cpu")


@contextmanager
def trainer_on(
    device: torch.device, precision: str = "float32", **training: Any
) -> Iterator[tuple[Trainer[PolicyBatch], nn.Module]]:
    """A trainer whose batches are all the same, and its model."""
    allow_tf32(device, "float32")
    experiment = build_experiment(
        {"training": {"kl": {"coefficient": 0.0}, **training}, "rollout": {"max_tokens": SMALL.tokens}}
    )
    with ThreadPoolExecutor(1) as executor, random_model(SMALL.whole, CPU, torch.float32) as model:
        module = model.module.to(device).requires_grad_(True)
        objective = PolicyObjective(experiment.training, experiment.rollout, model.tokenizer.pad_id, precision)
        yield (
            Trainer(
                module,
                objective,
                OptimizerSettings(learning_rate=1e-3),
                RepeatedBatch(batch_of(SMALL)),
                executor=executor,
                precision=precision,
                waits_for="batches",
            ),
            module,
        )


async def steps(trainer: Trainer[PolicyBatch], count: int) -> list[StepReport]:
    found = [await trainer.step() for _ in range(count)]
    return [report for report in found if report is not None]


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().cpu().clone() for name, weight in module.named_parameters()}


def trained(
    device: torch.device, precision: str = "float32", **training: Any
) -> tuple[dict[str, Tensor], list[StepReport]]:
    """The weights after three steps."""
    with trainer_on(device, precision, **training) as (trainer, module):
        reports = asyncio.run(steps(trainer, 3))
        return weights_of(module), reports


def test_a_copy_of_the_state_is_that_of_its_step_and_its_memory_is_used_again(device: torch.device) -> None:
    with trainer_on(device) as (trainer, module):
        for copied in ({}, trainer.state()[0]):
            asyncio.run(steps(trainer, 1))
            expected = weights_of(module)
            found, _ = trainer.state()
            asyncio.run(steps(trainer, 1))
            assert all(torch.equal(found[f"model.{name}"], weight) for name, weight in expected.items())
            assert all(found[name] is tensor for name, tensor in copied.items())
            assert all(tensor.is_pinned() == (device.type == "cuda") for tensor in found.values())


@pytest.mark.parametrize("shared_prompts", [True, False])
def test_the_losses_are_those_of_a_cpu(shared_prompts: bool, device: torch.device) -> None:
    found, expected = (trained(place, shared_prompts=shared_prompts)[1] for place in (device, CPU))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.metrics["grad_norm"], other.metrics["grad_norm"], rtol=2e-2)


def test_workers_on_the_gpu_play_a_game(cuda: torch.device, tmp_path: Path) -> None:
    """The policy's first gradient is that of a game in one process."""
    norms = []
    for cluster in ("none", "local"):
        settings = {"models.device": str(cuda), "cluster": cluster, "game.rounds": 1, "training.steps": 2}
        settings |= {"verifier.steps": 2, "store.root": tmp_path, "name": cluster}
        words = [word for key, value in settings.items() for word in ("-s", f"{key}={value}")]
        subprocess.run([sys.executable, "-P", "-m", "pvg", "train", *words], check=True)
        records = map(json.loads, (tmp_path / cluster / "metrics.jsonl").read_text().splitlines())
        norms.append(
            [r["metrics"]["grad_norm"] for r in records if r["kind"] == "step" and r["phase"] == "train_prover"]
        )
    np.testing.assert_allclose(norms[1][0], norms[0][0], rtol=0.3)


def test_reduced_precision_trains(device: torch.device) -> None:
    weights, reports = trained(device, precision="bfloat16")
    assert all(bool(torch.isfinite(weight).all()) for weight in weights.values())
    exact = trained(device)[1]
    np.testing.assert_allclose(reports[0].metrics["grad_norm"], exact[0].metrics["grad_norm"], rtol=0.1)


def test_the_clock_measures_the_work_of_its_gpu(cuda: torch.device) -> None:
    clock, left = CudaClock(cuda), torch.ones(2048, 2048, device=cuda)
    start = clock.mark()
    for _ in range(20):
        left = left @ left * 1e-3
    end = clock.mark()
    torch.cuda.synchronize(cuda)
    seconds = clock.elapsed_s(start, end)
    assert seconds is not None
    assert seconds > 0


def test_the_gpu_has_a_number_in_the_charts(cuda: torch.device) -> None:
    assert gpu_number(cuda) is not None
    assert peak_memory()["gpu_bytes"] > 0
