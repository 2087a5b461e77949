"""Log-probs, gradients, attention and scores on a GPU, against a CPU or the other way to compute them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

from benchmarks.gpu.parity import check_attention, check_chunks, check_training
from benchmarks.gpu.results import Results
from benchmarks.gpu.sizes import DEEP, SMALL, random_model, random_rows
from pvg.models.compute import allow_tf32, autocast
from pvg.models.heads import ScalarHead
from pvg.models.logprobs import check_logits
from pvg.models.packing import pack_rows, why_not_varlen
from pvg.models.shared_prompts import check_packing
from pvg.rollout.lean import LeanDecoder
from pvg.verifier.scorer import ScoreCache, ScoreInput, TorchBackend, digest_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("check", [check_training, check_attention, check_chunks])
def test_fast_code_agrees_with_plain_code(check: partial[None], device: torch.device) -> None:
    allow_tf32(device, "float32")
    results = Results("test")
    check(results, SMALL, device)
    assert not [found for found in results.checks if not found["passed"]]


def test_packed_rows_need_no_mask_in_bfloat16(cuda: torch.device) -> None:
    sequences, prompt_lengths = random_rows(SMALL, SMALL.whole.vocabulary)
    packed = pack_rows(sequences, prompt_lengths, cuda)
    query_TE = torch.zeros(packed.ids_1T.shape[1], 64, dtype=torch.bfloat16, device=cuda)
    if torch.cuda.get_device_capability(cuda) < (8, 0):
        pytest.skip("needs an Ampere GPU, for flash attention")
    assert why_not_varlen(query_TE, 4) is None


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_scores_are_those_of_a_cpu(precision: str, tolerance: float, device: torch.device) -> None:
    allow_tf32(device, "float32")
    sequences, prompt_lengths = random_rows(SMALL, SMALL.whole.vocabulary)
    inputs = [
        ScoreInput(ids, int(start), digest_of(ids, int(start)), "r")
        for ids, start in zip(sequences, prompt_lengths, strict=True)
    ]

    def scores(place: torch.device) -> np.ndarray:
        model = random_model(SMALL.whole, CPU, torch.float32)
        model.module.to(place)
        head = ScalarHead(model)
        head.start_elsewhere(seed=3)

        async def score() -> np.ndarray:
            with ThreadPoolExecutor(1) as executor:
                backend = TorchBackend(
                    head, "t", ScoreCache(10), token_budget=10_000, executor=executor, precision=precision
                )
                return (await backend.submit(inputs)).scores

        found = asyncio.run(score())
        head.close()
        return found

    np.testing.assert_allclose(scores(device), scores(CPU), atol=tolerance)


def test_scoring_computes_in_the_precision_of_the_training(cuda: torch.device) -> None:
    left = torch.ones(8, 8, device=cuda)
    with autocast("bfloat16", cuda):
        assert (left @ left).dtype == torch.bfloat16
    with autocast("float32", cuda):
        assert (left @ left).dtype == torch.float32


def test_the_checks_of_fast_code_allow_tf32(cuda: torch.device) -> None:
    allow_tf32(cuda, "bfloat16")
    with random_model(DEEP, cuda, torch.float32) as model:
        LeanDecoder.over(model.module)
        check_packing(model.module, fused_layers=True)
        check_logits(model.module)


def test_tf32_only_where_the_precision_is_reduced(cuda: torch.device) -> None:
    generator = torch.Generator(cuda).manual_seed(0)
    left, right = (torch.randn(512, 512, device=cuda, generator=generator) for _ in range(2))
    exact = (left.double() @ right.double()).float()
    errors = []
    for precision in ("bfloat16", "float32"):
        allow_tf32(cuda, precision)
        errors.append(float((left @ right - exact).abs().mean()))
    assert errors[1] < 1e-4
    if torch.cuda.get_device_capability(cuda) >= (8, 0):
        assert errors[0] > 5 * errors[1]


def test_weights_that_leave_a_gpu_leave_its_memory_to_other_processes(cuda: torch.device) -> None:
    before = torch.cuda.memory_reserved(cuda)
    with random_model(SMALL.whole, cuda, torch.float32) as model:
        assert torch.cuda.memory_reserved(cuda) > before
        model.move(CPU)
        assert torch.cuda.memory_reserved(cuda) <= before
