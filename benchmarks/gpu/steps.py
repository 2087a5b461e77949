"""Optimizer steps of a model of the shape of Qwen2.5-1.5B with random weights on one device, change by change.

A step is what the game does with a batch: packed rows, loss, gradient and AdamW. An MFU is operations per second over
the measured rate of a large bfloat16 product: the useful one counts each prompt for each of its rows, the hardware one
what is computed (pvg.bench.workloads.trainer.operations_of). The profiler's table has the operators of the last step
that take the most time of the device by themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from torch import nn

from benchmarks.gpu.results import Results
from benchmarks.gpu.sizes import Sizes, random_model, random_rows
from pvg.bench.workloads.trainer import ModelSize, matmul_gflops, operations_of, wait_for
from pvg.config.load import build_experiment
from pvg.models.adapters import attach_adapters
from pvg.models.language_model import LanguageModel
from pvg.models.logprobs import device_bytes
from pvg.models.packing import Trie
from pvg.planning.memory import BYTES, ModelInTraining, shape_from, training_parts
from pvg.training.batch import PolicyBatch
from pvg.training.forward import ForwardSettings
from pvg.training.losses import PolicyObjective
from pvg.training.trainer import OptimizerSettings, Trainer

BatchT = TypeVar("BatchT")
ResultT = TypeVar("ResultT")
RANK = 16
SHOWN = 12  # operators


@dataclass(frozen=True, slots=True)
class StepVariant:
    """How a step is computed. `rank`: of adapters; 0: all weights learn, in float32. `dtype`: of frozen weights."""

    name: str
    rank: int = RANK
    dtype: str = "bfloat16"
    precision: str = "bfloat16"
    checkpointing: bool = False
    shared: bool = True
    fused: bool = True
    micro_batch_tokens: int = 16_384


VARIANTS = (
    StepVariant("each row with its own prompt", shared=False, fused=False),
    StepVariant("what rows share once", fused=False),
    StepVariant("own norms and rotary embeddings", fused=True),
    StepVariant("layers recomputed", checkpointing=True),
)
MORE = StepVariant("four times the rows")


def measure(results: Results, sizes: Sizes, device: torch.device) -> None:
    rate = matmul_gflops("bfloat16", str(device)) * 1e9
    results.figure("bfloat16 product of two large matrices", rate / 1e12, "TFLOP/s")
    with random_model(sizes.whole, device, torch.bfloat16) as model:
        for variant in VARIANTS:
            measure_steps(results, sizes, model, variant, rate)
        measure_steps(results, replace(sizes, groups=4 * sizes.groups), model, MORE, rate, profiled=True)


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


class RepeatedBatch(Generic[BatchT]):
    """A BatchSource of one batch."""

    def __init__(self, batch: BatchT) -> None:
        self.batch = batch

    async def next_batch(self) -> BatchT:
        return self.batch


def planned_gb(
    model: LanguageModel, variant: StepVariant, positions: int, prompt: int, completion: int, *, last: bool = False
) -> float:
    """What pvg plan predicts for the model, its gradients, optimizer and activations. `last`: as in Pass."""
    shape = shape_from(model.module.config, model.name)
    own = ModelInTraining(shape, variant.rank, variant.dtype, variant.precision, variant.checkpointing, last=last)
    parts = training_parts(own, positions, prompt, completion, device_bytes(model.device) or None)
    return (sum(parts.values()) + (shape.parameters * BYTES[variant.dtype] if variant.rank else 0)) / 1e9


def learner_of(model: LanguageModel, rank: int) -> AbstractContextManager[LanguageModel]:
    """What trains: adapters on `model`, or the model itself."""
    if rank:
        return attach_adapters(model, rank, float(rank), seed=0)
    model.require_gradients()
    return nullcontext(model)


def trainer_of(
    module: nn.Module,
    objective: Any,
    source: Any,
    variant: StepVariant,
    section: Literal["training", "verifier"] = "training",
) -> Trainer[Any]:
    return Trainer(
        module,
        objective,
        OptimizerSettings(learning_rate=1e-5),
        source,
        executor=Inline(),
        precision=variant.precision,
        gradient_checkpointing=variant.checkpointing,
        section=section,
    )


def objective_of(sizes: Sizes, model: LanguageModel, variant: StepVariant) -> tuple[PolicyObjective, ForwardSettings]:
    training = {
        "kl": {"coefficient": 0.0},
        "shared_prompts": variant.shared,
        "micro_batch_tokens": variant.micro_batch_tokens,
    }
    experiment = build_experiment({"training": training, "rollout": {"max_tokens": sizes.tokens}})
    what = experiment.training, experiment.rollout, model.tokenizer.pad_id, variant.precision
    settings = ForwardSettings.of(what[0], what[1].temperature, *what[2:], fused_layers=variant.fused)
    return PolicyObjective(*what, fused_layers=variant.fused), settings


def measure_steps(
    results: Results, sizes: Sizes, model: LanguageModel, variant: StepVariant, rate: float, *, profiled: bool = False
) -> None:
    """`rate`: operations per second of a large product."""
    name, device, batch = variant.name, model.device, batch_of(sizes)
    objective, settings = objective_of(sizes, model, variant)
    with learner_of(model, variant.rank) as learner:
        trainer = trainer_of(learner.module, objective, RepeatedBatch(batch), variant)
        step_s, report = asyncio.run(timed(trainer, sizes.steps, device))
        results.figure(f"{name}: one step of {len(batch)} rows", step_s, "s")
        results.figure(f"{name}: micro-batches of a step", report["micro_batches"], "")
        size, frozen = ModelSize.of(model), variant.rank > 0
        counted = operations_of(size, batch, settings, frozen=frozen, checkpointed=variant.checkpointing)
        goal = ">= 0.5" if variant is MORE else ""
        results.figure(f"{name}: useful MFU", counted.useful / step_s / rate, "of the measured rate")
        results.figure(f"{name}: hardware MFU", counted.hardware / step_s / rate, "of the measured rate", goal=goal)
        packed = int(Trie.of(batch.sequences, batch.prompt_lengths).lengths_S.sum())
        positions = min(variant.micro_batch_tokens, packed)
        planned = planned_gb(model, variant, positions, sizes.prompt, sizes.tokens) if variant.shared else None
        results.peak(name, device, planned)
        if profiled:
            profile(results, "two steps", lambda: asyncio.run(timed(trainer, 1, device)), device)


class Inline(Executor):
    """Computes in the calling thread, which the profiler watches."""

    def submit(self, work: Callable[..., ResultT], /, *arguments: Any, **named: Any) -> Future[ResultT]:
        found = Future[ResultT]()
        found.set_result(work(*arguments, **named))
        return found


async def timed(trainer: Trainer[Any], steps: int, device: torch.device) -> tuple[float, dict[str, float]]:
    """The median seconds of a step after a first one, and the metrics of the last. The peak of a GPU's memory is that
    of these steps."""
    await trainer.step()  # also the checks of the model, and the libraries' own start
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, metrics = list[float](), dict[str, float]()
    for _ in range(steps):
        wait_for(str(device))
        began = time.perf_counter()
        report = await trainer.step()
        wait_for(str(device))
        seconds.append(time.perf_counter() - began)
        assert report is not None
        metrics = report.metrics
    return float(np.median(seconds)), metrics


def profile(results: Results, what: str, work: Callable[[], object], device: torch.device) -> None:
    with torch.profiler.profile(acc_events=True) as profiler:
        work()
    spent = f"self_{'device' if device.type == 'cuda' else 'cpu'}_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -float(getattr(event, spent)))
    for event in events[:SHOWN]:
        spent_s = float(getattr(event, spent)) / 1e6
        results.figure(f"profile of {what}: {event.key[:80]}", spent_s, f"s in {event.count} calls")
