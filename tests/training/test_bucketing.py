"""The slow side of `training.bucketing`: rows in arrival order, more padding, the same loss and gradient."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_policy import policy_batch
from transformers import LlamaConfig, LlamaForCausalLM

from pvg.config.sections import Rollouts, Training
from pvg.errors import ConfigurationError
from pvg.models.padding import token_budget_batches
from pvg.training.losses import PolicyObjective


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=60), st.integers(40, 200), st.none() | st.integers(1, 9))
def test_in_arrival_order_every_batch_is_sized_for_the_longest_row_of_all(lengths, budget, max_rows):
    batches = token_budget_batches(lengths, budget, max_rows, by_length=False)
    assert (np.concatenate(batches).tolist() if batches else []) == list(range(len(lengths)))
    most = min(budget // max(1, max(lengths, default=1)), max_rows or budget)
    assert all(len(rows) == most for rows in batches[:-1])
    assert all(1 <= len(rows) <= most for rows in batches)


def test_by_hand():
    # 5 is the longest: two rows fit into 10.
    batches = token_budget_batches([4, 1, 5, 3, 4], 10, by_length=False)
    assert [rows.tolist() for rows in batches] == [[0, 1], [2, 3], [4]]
    with pytest.raises(ConfigurationError, match=r"11 tokens \(row 2\) is over the token budget of 10"):
        token_budget_batches([3, 4, 11], 10, by_length=False)


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=12,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def mixed_batch():
    """48 rows, short and long ones in turns, with a reference and off policy."""
    random = np.random.default_rng(0)
    lengths = [int(random.integers(3, 8) if row % 2 else random.integers(24, 31)) for row in range(48)]
    sequences = [random.integers(3, 12, length) for length in lengths]
    logprobs = [random.normal(-2.4, 0.3, length - 2) for length in lengths]
    reference = [random.normal(-2.4, 0.3, length - 2) for length in lengths]
    groups = [row // 4 for row in range(48)]
    return policy_batch(
        sequences, [2] * 48, random.normal(0, 1, 48), groups=groups, sampled=logprobs, reference=reference
    )


def objective(loss="grpo", **others):
    section = Training(loss=loss, kl={"coefficient": 0.1}, micro_batch_tokens=200, shared_prompts=False, **others)
    return PolicyObjective(section, Rollouts(max_tokens=32), pad_id=0)


def trained_on(objective_, module, batch):
    """Loss and gradient over all micro-batches, and the positions that went through the model."""
    module.zero_grad()
    parts = objective_.split(objective_.prepare(batch))
    total = 0.0
    for part in parts:
        loss, _ = objective_(module, part)
        loss.backward()
        total += loss.item()
    gradient = torch.cat([weight.grad.flatten() for weight in module.parameters()])
    return total, gradient, sum(len(part) * int(part.lengths_N.max()) for part in parts)


@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
def test_loss_and_gradient_are_the_same_and_the_padding_is_not(loss):
    module, batch = llama(), mixed_batch()
    fast_loss, fast_gradient, fast_positions = trained_on(objective(loss), module, batch)
    slow_loss, slow_gradient, slow_positions = trained_on(objective(loss, bucketing=False), module, batch)
    assert slow_loss == pytest.approx(fast_loss, rel=1e-5)
    assert float((slow_gradient - fast_gradient).norm() / fast_gradient.norm()) < 1e-5
    assert slow_positions > 1.4 * fast_positions


def test_the_most_rows_of_a_micro_batch_hold_on_the_slow_side_too():
    limited = objective(bucketing=False, micro_batch_rollouts=3)
    parts = limited.split(limited.prepare(mixed_batch()))
    assert [len(part) for part in parts] == [3] * 16
    batch = mixed_batch()
    assert [row.tolist() for part in parts for row in part.sequences] == [row.tolist() for row in batch.sequences]


def test_recomputed_logprobs_are_the_same_on_both_sides():
    module, batch = llama(), mixed_batch()
    widths = []
    module.get_input_embeddings().register_forward_pre_hook(
        lambda _module, arguments: widths.append(arguments[0].shape)
    )
    fast, forwards = objective().recompute(module, batch), len(widths)
    slow = objective(bucketing=False).recompute(module, batch)
    assert len(widths) - forwards == 8  # six rows of at most 30 tokens fit into 200
    assert [len(row) for row in slow] == batch.completion_lengths_N.tolist()
    for one, other in zip(fast, slow, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
