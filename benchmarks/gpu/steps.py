"""Optimizer steps on one device: low-rank adapters on a model of the shape of Qwen2.5-1.5B with random weights.

A step is what the game does with a batch: packed rows, loss, gradient and AdamW. The MFU is the required operations per
second over the measured rate of a large bfloat16 product. Frozen weights need no gradient of their own, so their linear
layers count twice a forward pass and not three times. Recomputed layers and padding count as time only.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.results import Results
from benchmarks.gpu.sizes import Sizes, random_model, random_rows
from pvg.bench.workloads.trainer import ModelSize, matmul_gflops, wait_for
from pvg.config.load import build_experiment
from pvg.models.adapters import attach_adapters
from pvg.models.language_model import LanguageModel
from pvg.telemetry.spans import submit_in
from pvg.training.batch import PolicyBatch
from pvg.training.losses import PolicyObjective
from pvg.training.trainer import OptimizerSettings, Trainer

RANK = 16


def measure(results: Results, sizes: Sizes, device: torch.device) -> None:
    rate = matmul_gflops("bfloat16", str(device))
    results.figure("bfloat16 product of two large matrices", rate / 1e3, "TFLOP/s")
    for checkpointing in (False, True):
        name = "adapters, layers recomputed" if checkpointing else "adapters"
        measure_adapters(results, name, sizes, device, rate, checkpointing)


def batch_of(sizes: Sizes, seed: int = 0) -> PolicyBatch:
    """Random tokens, log-probs and advantages."""
    random = np.random.default_rng(seed)
    sequences, prompt_lengths = random_rows(sizes, sizes.whole.vocabulary, seed)
    rows = len(sequences)
    # Those of nearly uniform samples, so that the ratios are far from 1 and the clip works.
    logprobs = [
        random.normal(-np.log(sizes.whole.vocabulary), 1.0, len(ids) - start).astype(np.float32)
        for ids, start in zip(sequences, prompt_lengths, strict=True)
    ]
    return PolicyBatch(
        sequences=sequences,
        prompt_lengths=prompt_lengths,
        sampled_logprobs=logprobs,
        reference_logprobs=None,
        advantages_N=random.choice(np.array([-1.0, 1.0], dtype=np.float32), rows),
        role_ids_N=np.zeros(rows, dtype=np.int8),
        group_ids_N=(np.arange(rows) // sizes.members).astype(np.int32),
        versions_N=np.zeros(rows, dtype=np.int32),
    )


class RepeatedBatch:
    """A BatchSource of one batch."""

    def __init__(self, batch: PolicyBatch) -> None:
        self._batch = batch

    async def next_batch(self) -> PolicyBatch:
        return self._batch


def measure_adapters(
    results: Results, name: str, sizes: Sizes, device: torch.device, rate: float, checkpointing: bool
) -> None:
    experiment = build_experiment(
        {
            "models": {"precision": "bfloat16"},
            "training": {
                "kl": {"coefficient": 0.0},
                "gradient_checkpointing": checkpointing,
                "micro_batch_tokens": 16_384,
            },
            "rollout": {"max_tokens": sizes.tokens},
        }
    )
    training, batch = experiment.training, batch_of(sizes)
    with (
        ThreadPoolExecutor(1) as executor,
        random_model(sizes.whole, device, torch.bfloat16) as model,
        attach_adapters(model, RANK, float(RANK), seed=0) as learner,
    ):
        trainer = Trainer(
            learner.module,
            PolicyObjective(training, experiment.rollout, learner.tokenizer.pad_id, experiment.models.compute_dtype),
            OptimizerSettings(learning_rate=1e-5),
            RepeatedBatch(batch),
            executor=executor,
            precision=experiment.models.compute_dtype,
            gradient_checkpointing=checkpointing,
            waits_for="batches",
        )
        seconds, micro_batches = asyncio.run(_steps(trainer, sizes.steps, executor, device))
        step_s = float(np.median(seconds))
        tokens = int(batch.lengths_N.sum())
        results.figure(f"{name}: parameters", model.num_parameters / 1e6, "million")
        results.figure(f"{name}: one step of {len(batch)} rows", step_s, "s")
        results.figure(f"{name}: micro-batches of a step", micro_batches, "")
        results.figure(f"{name}: tokens, each prompt for each of its rows", tokens / step_s, "tokens/s")
        results.figure(f"{name}: MFU", _flops(model, batch) / step_s / 1e9 / rate, "of the measured rate")
        if device.type == "cuda":
            results.figure(f"{name}: peak memory", torch.cuda.max_memory_allocated(device) / 1e9, "GB")


async def _steps(
    trainer: Trainer[PolicyBatch], steps: int, executor: ThreadPoolExecutor, device: torch.device
) -> tuple[list[float], float]:
    """The seconds of each step after a first one, and the micro-batches of the last."""
    await trainer.step()  # also the checks of the model, and the libraries' own start
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    wait = partial(wait_for, str(device))
    seconds, micro_batches = list[float](), 0.0
    for _ in range(steps):
        await submit_in(executor, wait)
        began = time.perf_counter()
        report = await trainer.step()
        await submit_in(executor, wait)
        seconds.append(time.perf_counter() - began)
        assert report is not None
        micro_batches = report.metrics["micro_batches"]
    return seconds, micro_batches


def _flops(model: LanguageModel, batch: PolicyBatch) -> float:
    """Required operations of a step (see the module)."""
    size, lengths_N = ModelSize.of(model), batch.lengths_N.astype(np.float64)
    tokens, predicted = float(lengths_N.sum()), float(batch.completion_lengths_N.sum())
    linear = size.forward(tokens, predicted, 0.0)
    attention = size.forward(0.0, 0.0, float(np.square(lengths_N).sum()))
    return 2.0 * linear + 3.0 * attention
