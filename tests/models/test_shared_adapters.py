"""Adapters on another model's own weights: in memory once, and no forward pass sees another's adapters."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import pytest
import torch
from tiny_ensembles import inputs, language
from torch import Tensor, nn

from pvg.config.training import Verifier
from pvg.models.adapters import AdaptedModel, attach_adapters
from pvg.models.heads import HEADS, VerifierModel, build_verifier
from pvg.models.language_model import LanguageModel, ModelClosedError

SCORING = [head for head in HEADS if head != "generative"]  # heads with a score per forward pass

pytestmark = pytest.mark.slow

RANK, ALPHA = 4, 8.0
IDS = torch.arange(2, 19)[None]


def logits(module: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = module(input_ids=IDS, use_cache=False).logits
    return found


def moved(parameters: Iterable[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in parameters:
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))


def adapters(model: LanguageModel, seed: int) -> AdaptedModel:
    """On the weights of `model`, as after some training."""
    found = attach_adapters(model, RANK, ALPHA, seed)
    moved((p for p in found.module.parameters() if p.requires_grad), seed)
    return found


def judge(head: str, base: LanguageModel, seed: int) -> VerifierModel:
    adapted = attach_adapters(base, RANK, ALPHA, seed, section="verifier")
    verifier = build_verifier(Verifier(head=head), adapted)  # type: ignore[arg-type]
    moved(verifier.trainable_state().values(), seed)
    return verifier


def test_no_forward_pass_sees_anothers_adapters() -> None:
    """In any order of turns, each computes the same as a model with separate weights."""
    base, isolated = language("implicit"), language("implicit")
    plain = logits(isolated.module)
    prover, verifier = adapters(base, 1), judge("implicit", base, 2)
    prover_alone = adapters(isolated.copy(), 1)
    verifier_alone = judge("implicit", isolated, 2)
    expected = logits(prover_alone.module)
    assert (expected - plain).abs().max() > 0.1
    rows = inputs(6)
    with torch.no_grad():
        scores_B = verifier_alone(*rows)
    assert scores_B.abs().max() > 0.1
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(verifier(*rows), scores_B)
        assert torch.equal(logits(prover.module), expected)
        assert torch.equal(logits(base.module), plain)
        # A training step of one moves neither the others nor the base.
        loss = verifier(*rows).square().sum() + prover.module(input_ids=IDS).logits.square().mean()
        loss.backward()
    assert all(p.grad is None for p in base.module.parameters())
    moved((p for p in prover.module.parameters() if p.requires_grad), 9)
    assert not torch.equal(logits(prover.module), expected)
    with torch.no_grad():
        assert torch.equal(verifier(*rows), scores_B)
    assert torch.equal(logits(base.module), plain)


@pytest.mark.parametrize("head", SCORING)
def test_what_is_saved_of_a_verifier_is_its_adapters_and_its_head(head: str) -> None:
    base = language(head)
    verifier, heads_own = (
        judge(head, base, 3),
        {"scalar": {"weight_D", "bias"}, "implicit": {"bias"}, "yes_token": set()},
    )
    state = verifier.trainable_state()
    assert {name for name in state if ".lora_" not in name} == heads_own[head]
    assert sum(".lora_" in name for name in state) == 2 * 2 * 7  # A and B of seven layers in two blocks
    again = build_verifier(  # type: ignore[arg-type]
        Verifier(head=head), attach_adapters(base, RANK, ALPHA, 77)
    )
    again.load_trainable_state(state)
    assert again.version() == verifier.version()
    with torch.no_grad():
        assert torch.equal(again(*inputs(5)), verifier(*inputs(5)))


def test_closing_frees_what_is_its_own_and_the_rest_with_the_last_owner() -> None:
    base = language("implicit")
    verifier = judge("implicit", base, 2)
    adapter = weakref.ref(next(p for name, p in verifier.named_parameters() if ".lora_" in name))
    frozen = weakref.ref(next(base.module.parameters()))
    verifier.close()
    gc.collect()
    assert adapter() is None
    assert frozen() is not None
    logits(base.module)
    base.close()
    gc.collect()
    assert frozen() is None
    with pytest.raises(ModelClosedError):
        verifier.start_model()
