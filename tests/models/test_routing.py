"""Experts recorded and replayed: the same numbers with one's own, other numbers with others, and gradients."""

from __future__ import annotations

import pytest
import torch
from tiny_experts import CHOSEN, EXPERTS, KINDS, LAYERS, tiny_experts
from transformers import LlamaConfig, LlamaForCausalLM

from pvg.errors import ConfigurationError
from pvg.models.routing import recorded_experts, replayed_experts, routers_of

IDS = torch.arange(2, 14)[None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_of_ones_own_choice_changes_no_bit(kind: str) -> None:
    module = tiny_experts(kind)
    with torch.no_grad():
        plain = module(input_ids=IDS).logits
        with recorded_experts(module) as recorder:
            assert torch.equal(module(input_ids=IDS).logits, plain)
            experts = recorder.take()
        assert experts.shape == (IDS.numel(), LAYERS, CHOSEN)
        assert len(experts.unique()) == EXPERTS
        with replayed_experts(module, experts.to(torch.uint8)):
            assert torch.equal(module(input_ids=IDS).logits, plain)
        with replayed_experts(module, (experts + 1) % EXPERTS):
            assert not torch.allclose(module(input_ids=IDS).logits, plain, atol=1e-2)
        assert torch.equal(module(input_ids=IDS).logits, plain)  # nothing is left behind


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_experts_are_weighed_by_the_routers_of_today(kind: str) -> None:
    """By hand, for one token of one layer: softmax of all logits, of the chosen ones, and their share if so."""
    module = tiny_experts(kind)
    router = routers_of(module)[0]
    hidden = torch.randn(3, 32)
    choices = torch.tensor([[[4, 1]], [[0, 2]], [[3, 0]]]).expand(3, LAYERS, 2)
    with torch.no_grad(), replayed_experts(module, choices):
        _, weights, chosen = router(hidden)
    probabilities = (hidden.double() @ router.weight.double().T).softmax(dim=-1)
    for token, (first, second) in enumerate(choices[:, 0].tolist()):
        expected = probabilities[token, [first, second]]
        expected = expected if kind == "qwen2_moe" else expected / expected.sum()
        torch.testing.assert_close(weights[token].double(), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(chosen, choices[:, 0])


def test_models_without_experts_and_experts_of_other_models_are_refused() -> None:
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM is not a mixture of experts"):
        routers_of(llama)
    with (
        pytest.raises(ConfigurationError, match="have experts of 3 layers, 2 per token"),
        replayed_experts(tiny_experts(), torch.zeros(4, 3, 2, dtype=torch.uint8)),
    ):
        pass
