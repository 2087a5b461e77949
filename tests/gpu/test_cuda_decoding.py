"""Sampling on a GPU: the tokens of a CPU, steps as CUDA graphs, and new weights that the graphs use."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu.parity import requests_of
from benchmarks.gpu.sizes import SMALL, random_model
from pvg.models.adapters import attach_adapters
from pvg.models.compute import allow_tf32
from pvg.models.language_model import LanguageModel
from pvg.rollout.device_rows import DeviceRows
from pvg.rollout.engine import Completion, GenerationRequest
from pvg.rollout.torch_engine import TorchEngine
from pvg.servers.publishing import WeightUpdate

CPU = torch.device("cpu")
REQUESTS = requests_of(SMALL, SMALL.whole.vocabulary, 40)


def model_on(device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> LanguageModel:
    """The same weights on every device."""
    allow_tf32(device, ["float32"])
    model = random_model(SMALL.whole, CPU, dtype, seed)
    model.module.to(device)
    return model


def sampled(
    model: LanguageModel, requests: Sequence[GenerationRequest], update: LanguageModel | None = None, **how: Any
) -> tuple[list[Completion], TorchEngine]:
    """Closes `model`. `update`: sample once before, then load these weights."""

    async def play() -> tuple[list[Completion], TorchEngine]:
        with ThreadPoolExecutor(1) as executor:
            engine = TorchEngine(model, max_rows=16, max_in_flight=100, executor=executor, **how)
            found = await asyncio.gather(*map(engine.generate, requests))
            if update is not None:
                tensors, adapter = update.policy()
                await engine.load_weights(WeightUpdate(1, tensors, adapter=adapter))
                found = await asyncio.gather(*map(engine.generate, requests))
            rows = engine._rows
            await engine.close()
            engine._rows = rows  # for the caller to look at
            return list(found), engine

    return asyncio.run(play())


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Rounding may turn a tie, and then the row goes another way."""
    same = [np.array_equal(one.token_ids, other.token_ids) for one, other in zip(found, expected, strict=True)]
    assert np.mean(same) >= 0.9
    for one, other, equal in zip(found, expected, same, strict=True):
        if equal:
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-3)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("continuous", [True, False])
def test_the_tokens_are_those_of_a_cpu(lean: bool, continuous: bool, device: torch.device) -> None:
    found, engine = sampled(model_on(device), REQUESTS, lean=lean, continuous=continuous)
    expected, _ = sampled(model_on(CPU), REQUESTS)
    assert_same(found, expected)
    assert engine.decoding == ("lean" if lean else "module")


def test_temperatures(device: torch.device) -> None:
    wanted = [replace(request, sampling=replace(request.sampling, temperature=0.5)) for request in REQUESTS]
    assert_same(sampled(model_on(device), wanted)[0], sampled(model_on(CPU), wanted)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_recorded(dtype: torch.dtype, cuda: torch.device) -> None:
    _, engine = sampled(model_on(cuda, dtype), REQUESTS)
    rows = engine._rows
    assert isinstance(rows, DeviceRows)
    assert rows.graphs.refusal == ""
    assert rows.graphs.recorded > 0


def test_new_weights_reach_recorded_steps(device: torch.device) -> None:
    with model_on(device, seed=1) as other:
        found, _ = sampled(model_on(device), REQUESTS, update=other)
    assert_same(found, sampled(model_on(CPU, seed=1), REQUESTS)[0])


def test_new_adapters_beside_16_bits_reach_recorded_steps(device: torch.device) -> None:
    with model_on(device, torch.bfloat16) as base, attach_adapters(base, 4, 8.0, 0) as learner:
        engine_model = learner.sampler()
        for name, weight in learner.module.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.05)
        found, engine = sampled(engine_model, REQUESTS, update=learner)
        assert_same(found, sampled(learner.sampler(), REQUESTS)[0])
        before, _ = sampled(attach_adapters(base, 4, 8.0, 0).sampler(), REQUESTS)
    assert engine.decoding == "lean"
    assert [one.token_ids.tolist() for one in found] != [one.token_ids.tolist() for one in before]


def test_another_gpu_stays_unused(cuda: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1 - min(cuda.index or 0, 1))
    idle = torch.device("cuda", 1 - (other.index or 0))
    before = torch.cuda.memory_allocated(idle)
    torch.cuda.reset_peak_memory_stats(idle)
    _, engine = sampled(model_on(other), REQUESTS)
    assert isinstance(engine._rows, DeviceRows)
    assert engine._rows.graphs.refusal == ""
    assert torch.cuda.max_memory_allocated(idle) == before
