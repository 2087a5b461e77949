"""A mixture of experts through the torch engine to the trainer's forward pass: what was sampled is what is learnt."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

for folder in ("models", "rollout"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
from tiny_experts import CHOSEN, KINDS, LAYERS, tiny_experts  # noqa: E402
from tiny_policies import generate, prompts, requests, tiny_model  # noqa: E402

from pvg.config.rollout import Rollouts  # noqa: E402
from pvg.config.training import Training  # noqa: E402
from pvg.models.routing import recorded_experts, routers_of  # noqa: E402
from pvg.rollout.engine import Completion, GenerationRequest, Sampling  # noqa: E402
from pvg.training.batch import PolicyBatch  # noqa: E402
from pvg.training.forward import ForwardSettings, batch_logprobs  # noqa: E402
from pvg.training.losses import PolicyObjective  # noqa: E402

pytestmark = pytest.mark.slow

HOW = Sampling(7, (1,))
SHARED, PADDED = (ForwardSettings(1.0, 4096, 0, shared_prompts=shared, router_replay=True) for shared in (True, False))


def asked(count: int = 6) -> list[GenerationRequest]:
    """Prompts of 1 to 5 tokens, each for two requests."""
    found = [prompt for prompt in prompts(count, 1, 5) for _ in range(2)]
    return requests(found, HOW)


def sampled(kind: str, **options: Any) -> list[Completion]:
    model = tiny_model(module=tiny_experts(kind))
    return generate(asked(), model=model, routed_experts=True, **options)


def batch_of(completions: list[Completion]) -> PolicyBatch:
    pairs = list(zip(asked(), completions, strict=True))
    return PolicyBatch(
        sequences=[np.concatenate([request.prompt_ids, found.token_ids]) for request, found in pairs],
        prompt_lengths=np.array([len(request.prompt_ids) for request, _ in pairs], np.int32),
        sampled_logprobs=[found.logprobs for _, found in pairs],
        reference_logprobs=None,
        advantages_N=np.linspace(-1, 1, len(pairs)).astype(np.float32),
        role_ids_N=np.zeros(len(pairs), np.int8),
        group_ids_N=np.arange(len(pairs), dtype=np.int32) // 2,
        versions_N=np.zeros(len(pairs), np.int32),
        routed_experts=[found.routed_experts for _, found in pairs if found.routed_experts is not None],
    )


def own_choice(module: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    """Of one row alone, in one forward pass."""
    with torch.no_grad(), recorded_experts(module) as recorder:
        module(input_ids=torch.from_numpy(ids[None, :-1].astype(np.int64)), use_cache=False)
        return recorder.take().numpy()


@pytest.mark.parametrize("switches", [{}, {"max_rows": 5}, {"max_rows": 1}])
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_tells_the_experts_of_every_token_but_the_last(kind: str, switches: dict[str, Any]) -> None:
    module = tiny_experts(kind)
    for request, found in zip(asked(), sampled(kind, **switches), strict=True):
        experts = found.routed_experts
        assert experts is not None
        assert experts.dtype == np.uint8
        ids = np.concatenate([request.prompt_ids, found.token_ids])
        assert experts.shape == (len(ids) - 1, LAYERS, CHOSEN)
        assert experts.tolist() == own_choice(module, ids).tolist()


def test_more_experts_than_a_byte_can_number_are_told_and_replayed() -> None:
    module = tiny_experts("qwen3_moe", experts=300)
    batch = batch_of(generate(asked(), model=tiny_model(module=module), routed_experts=True))
    assert batch.routed_experts is not None
    for ids, experts in zip(batch.sequences, batch.routed_experts, strict=True):
        assert experts.dtype == np.uint16
        assert experts.tolist() == own_choice(module, ids).tolist()
    assert max(experts.max() for experts in batch.routed_experts) > 255
    for how in (SHARED, PADDED):
        with torch.no_grad():
            found = batch_logprobs(module, batch, how).numpy()
        np.testing.assert_allclose(found, batch.on_positions(batch.sampled_logprobs), atol=1e-5)


def moved(kind: str, by: float) -> torch.nn.Module:
    """The model whose routers have moved by so much."""
    module, random = tiny_experts(kind), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for router in routers_of(module):
            router.weight += by * torch.randn(router.weight.shape, generator=random)
    return module


@pytest.mark.parametrize("how", [SHARED, PADDED], ids=["shared", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_the_samplers_weights_the_log_probs_are_the_samplers(kind: str, how: ForwardSettings) -> None:
    batch = batch_of(sampled(kind))
    with torch.no_grad():
        found = batch_logprobs(tiny_experts(kind), batch, how).numpy()
    np.testing.assert_allclose(found, batch.on_positions(batch.sampled_logprobs), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_router_that_has_moved_is_replayed_alike_in_both_layouts(kind: str) -> None:
    batch, module = batch_of(sampled(kind)), moved(kind, 0.3)
    assert any(
        own_choice(module, ids).tolist() != experts.tolist()
        for ids, experts in zip(batch.sequences, batch.routed_experts or [], strict=True)
    )
    with torch.no_grad():
        shared, padded = (batch_logprobs(module, batch, how) for how in (SHARED, PADDED))
        free = batch_logprobs(module, batch, replace(SHARED, router_replay=False))
    torch.testing.assert_close(shared, padded, atol=1e-5, rtol=1e-5)
    assert (shared - free).abs().max() > 1e-3


def test_the_policy_loss_learns_with_replayed_experts_in_any_micro_batches() -> None:
    batch, module = batch_of(sampled("mixtral")), moved("mixtral", 0.1)
    found = []
    for tokens in (16_384, 40):
        training = Training(router_replay=True, micro_batch_tokens=tokens, kl={"coefficient": 0.0})
        objective = PolicyObjective(training, Rollouts(max_tokens=7), pad_id=0)
        module.zero_grad()
        parts = objective.split(objective.prepare(batch))
        assert (len(parts) > 1) == (tokens == 40)
        for part in parts:
            loss, _ = objective(module, part)
            loss.backward()
        found.append([router.weight.grad.clone() for router in routers_of(module)])  # type: ignore[union-attr]
    for whole, parts in zip(*found, strict=True):
        assert whole.abs().max() > 0
        torch.testing.assert_close(whole, parts, atol=1e-6, rtol=1e-4)
