"""An optimizer step of a verifier on long solutions: the peak memory beside what pvg plan predicts.

The verifier is adapters on a model of the shape of Qwen2.5-1.5B. A step has one pair; each solution is a micro-batch.
Meanwhile a ballast takes the memory that vLLM would take; all figures include it.
"""

from __future__ import annotations

import asyncio
from contextlib import closing

import numpy as np
import torch

from benchmarks.gpu.results import Results
from benchmarks.gpu.sizes import Sizes, random_model
from benchmarks.gpu.steps import RANK, RepeatedBatch, StepVariant, planned_gb, trainer_of
from pvg.config.load import build_experiment
from pvg.errors import MissingRequirementError
from pvg.models.adapters import attach_adapters
from pvg.models.heads import build_verifier
from pvg.models.language_model import LanguageModel
from pvg.verifier.data import VerifierBatch
from pvg.verifier.losses import PairObjective


def measure(results: Results, sizes: Sizes, device: torch.device) -> None:
    ballast = torch.empty(sizes.ballast, dtype=torch.uint8, device=device)
    for dtype in ("bfloat16", "float32"):
        with random_model(sizes.whole, device, getattr(torch, dtype)) as model:
            for tokens in sizes.lengths:
                for checkpointing in (True, False):
                    recomputed = ", layers recomputed" if checkpointing else ""
                    name = f"solutions of {tokens} tokens, {dtype}{recomputed}"
                    variant = StepVariant(name, RANK, dtype, dtype, checkpointing, micro_batch_tokens=tokens)
                    measure_pair(results, sizes, model, variant)
    del ballast


def measure_pair(results: Results, sizes: Sizes, model: LanguageModel, variant: StepVariant) -> None:
    tokens, device = variant.micro_batch_tokens, model.device
    settings = {"head": "scalar", "adapters": {"rank": variant.rank}, "micro_batch_tokens": tokens}
    section, random = build_experiment({"verifier": settings}).verifier, np.random.default_rng(0)
    batch = VerifierBatch(
        sequences=list(random.integers(2, sizes.whole.vocabulary, (2, tokens)).astype(np.int32)),
        prompt_lengths_N=np.array([sizes.prompt] * 2, dtype=np.int32),
        pairs_M2=np.array([[0, 1]], dtype=np.int32),
        references_N=None,
    )
    planned = planned_gb(model, variant, tokens, sizes.prompt, tokens - sizes.prompt, last=True) + sizes.ballast / 1e9
    adapted = attach_adapters(model, variant.rank, float(variant.rank), seed=0)
    with closing(build_verifier(section, adapted)) as verifier:
        objective = PairObjective(section, model.tokenizer.pad_id, longest_packed=verifier.longest_packed)
        trainer = trainer_of(verifier, objective, RepeatedBatch(batch), variant, "verifier")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            asyncio.run(trainer.step())
        except MissingRequirementError:
            results.note(f"{variant.name}: out of memory; planned {planned:.3g} GB.")
        else:
            results.peak(variant.name, device, planned)
    if device.type == "cuda":
        torch.cuda.empty_cache()
