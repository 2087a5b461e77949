"""A GRPO step of pvg beside one of TRL's GRPOTrainer on one device, and the memory of a long row at a large vocabulary.

Both steps sample a completion for each row with a model of the shape of Qwen2.5-1.5B and train adapters on it once:
bfloat16, no KL, no recomputed layers, no vLLM. pvg's own step has the update of the sampler's weights. TRL is measured
where it is installed. The long row is scored, and then passes forward and backward, with the sizes of gemma-3-1b; TRL
1.15 publishes 10.3 GiB for this.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.parity import decoded, opened, requests_of
from benchmarks.gpu.results import Results
from benchmarks.gpu.sizes import Sizes, random_model
from benchmarks.gpu.steps import RANK, RepeatedBatch, StepVariant, batch_of, learner_of, objective_of, trainer_of
from benchmarks.peers.trl_environment import arguments
from pvg.bench.workloads.trainer import wait_for
from pvg.models.embedded_training import modchain_tokenizer
from pvg.rollout.lean import LeanDecoder
from pvg.training.forward import recompute_logprobs
from pvg.training.trainer import accumulate, checkpoint_layers

STEPS = 3  # the first one is not counted
TRL_1_15_GB = 11.06


def measure(results: Results, sizes: Sizes, device: torch.device) -> None:
    for variant in (StepVariant("adapters"), StepVariant("all weights", 0, "float32")):
        long_row(results, sizes, device, replace(variant, micro_batch_tokens=sizes.long))
    own_s, own_gb = pvg_step(results, sizes, device)
    if find_spec("trl") is None:
        results.note("TRL is not installed, so there is no comparison with it.")
        return
    trl_s, trl_gb = trl_step(results, sizes, device)
    results.figure("time of TRL's step", trl_s / own_s, "of pvg's", goal=">= 2")
    results.figure("memory of TRL's step", trl_gb / own_gb, "of pvg's", goal=">= 1")


def long_row(results: Results, sizes: Sizes, device: torch.device, variant: StepVariant) -> None:
    tokens, vocabulary = sizes.long, sizes.wide.vocabulary
    batch = replace(
        batch_of(replace(sizes, groups=1, members=1)),
        sequences=[np.random.default_rng(0).integers(2, vocabulary, tokens).astype(np.int32)],
        prompt_lengths=np.array([2], dtype=np.int32),
        sampled_logprobs=[np.full(tokens - 2, -np.log(vocabulary), dtype=np.float32)],
    )
    with (
        random_model(sizes.wide, device, getattr(torch, variant.dtype)) as model,
        learner_of(model, variant.rank) as learner,
    ):
        objective, settings = objective_of(replace(sizes, tokens=tokens - 2), model, variant)
        checkpoint_layers(learner.module)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        recompute_logprobs(learner.module, batch, settings)
        accumulate(learner.module, objective, objective.split(objective.prepare(batch)), variant.precision)
        name = f"{variant.name}: {tokens} tokens, vocabulary of {vocabulary}"
        results.peak(name, device, goal=f"<= {TRL_1_15_GB}")


def pvg_step(results: Results, sizes: Sizes, device: torch.device) -> tuple[float, float]:
    """Seconds and GB of a step."""
    source, requests = RepeatedBatch(batch_of(sizes)), requests_of(sizes, sizes.whole.vocabulary)
    requests = [replace(one, sampling=replace(one.sampling, max_tokens=sizes.tokens)) for one in requests]
    variant, seconds = StepVariant("pvg"), list[float]()
    with (
        random_model(sizes.whole, device, torch.bfloat16) as model,
        learner_of(model, RANK) as learner,
        learner.copy() as sampler,
    ):
        trainer = trainer_of(learner.module, objective_of(sizes, model, variant)[0], source, variant)
        rows = opened(LeanDecoder.over(sampler.module), len(requests))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for _ in range(STEPS):
            began = time.perf_counter()
            sampler.load_weights(learner.weights())
            found = decoded(rows, requests)
            source.batch = replace(
                source.batch,
                sequences=[np.append(one.prompt_ids, row.token_ids) for one, row in zip(requests, found, strict=True)],
                prompt_lengths=np.array([len(request.prompt_ids) for request in requests], dtype=np.int32),
                sampled_logprobs=[row.logprobs for row in found],
            )
            asyncio.run(trainer.step())
            wait_for(str(device))
            seconds.append(time.perf_counter() - began)
    step_s = float(np.median(seconds[1:]))
    results.figure(f"pvg: a step with {sizes.rows} rows sampled", step_s, "s")
    return step_s, results.peak("pvg", device)


def trl_step(results: Results, sizes: Sizes, device: torch.device) -> tuple[float, float]:
    """As `pvg_step`."""
    from peft import LoraConfig
    from transformers import TrainerCallback

    # Not everyone who checks the types of this file has them.
    datasets, trl, ends = import_module("datasets"), import_module("trl"), list[float]()

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            wait_for(str(device))
            ends.append(time.perf_counter())

    random = np.random.default_rng(0)
    prompts = ["".join(map(str, random.integers(0, 10, sizes.prompt))) for _ in range(sizes.groups)]
    with tempfile.TemporaryDirectory() as folder, random_model(sizes.whole, device, torch.bfloat16) as model:
        settings = arguments(Path(folder)) | {
            "use_cpu": device.type == "cpu",
            "bf16": True,
            "max_steps": STEPS,
            "per_device_train_batch_size": sizes.rows,
            "num_generations": sizes.members,
            "max_completion_length": sizes.tokens,
            "beta": 0.0,
        }
        trainer = trl.GRPOTrainer(
            model=model.module,
            reward_funcs=lambda completions, **_: [float(len(text) % 2) for text in completions],
            args=trl.GRPOConfig(**settings),
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
            processing_class=modchain_tokenizer(),
            peft_config=LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear"),
            callbacks=[Clock()],
        )
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        trainer.train()
    step_s = float(np.median(np.diff(ends)))
    results.figure(f"TRL: a step with {sizes.rows} rows sampled", step_s, "s")
    return step_s, results.peak("TRL", device)
