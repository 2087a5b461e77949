"""Tokens that an environment wrote are read and not learned from: no gradient, no log-prob, no part in any mean."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from table_policy import TablePolicy, policy_batch
from test_policy_losses import NAMES, evaluate, objective
from transformers import LlamaConfig, LlamaForCausalLM

from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.training.losses import PolicyObjective

# Position t is predicted by row t - 1. Row A: prompt 0, solution at 1 and 2, question at 3, answer at 4. Row B: prompt
# of one, solution at 1 to 2. So row 2 of the table predicts nothing but the question.
TABLE = [[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25], [0.1, 0.4, 0.4, 0.1]]
MASKS = [[True, True, False, True], [True, True]]


def masked(sampled=None, reference=None):
    batch = policy_batch([[0, 3, 1, 2, 1], [0, 2, 0]], [1, 1], [1.0, -2.0])
    given = [[-1.0, -1.5, -0.5], [-0.7, -0.9]] if sampled is None else sampled
    columns = [np.asarray(row, dtype=np.float32) for row in given]
    return replace_all(batch, columns, MASKS, reference)


def replace_all(batch, sampled, masks, reference=None):
    batch.sampled_logprobs = sampled
    batch.sampled_masks = [np.asarray(mask, dtype=bool) for mask in masks]
    batch.reference_logprobs = reference
    batch.__post_init__()
    return batch


@pytest.mark.parametrize("loss", NAMES)
def test_a_question_has_no_gradient_and_no_part_in_the_loss(loss):
    reference = [np.asarray(row, dtype=np.float32) for row in ([-1.2, -1.4, -0.6], [-0.8, -0.8])]
    settings = {"kl": 0.1} if loss not in ("dapo",) else {}
    policy = TablePolicy(TABLE)
    _, _, metrics = evaluate(objective(loss, **settings), policy, masked(reference=reference))
    gradient_LV = policy.table_LV.grad.clone()
    assert not gradient_LV[2].any()
    assert gradient_LV[[0, 1, 3]].abs().sum(dim=1).min() > 0

    other = TablePolicy([*TABLE[:2], [0.97, 0.01, 0.01, 0.01], TABLE[3]])
    total, _, told = evaluate(objective(loss, **settings), other, masked(reference=reference))
    assert total == pytest.approx(evaluate(objective(loss, **settings), policy, masked(reference=reference))[0])
    assert told == pytest.approx(metrics)
    torch.testing.assert_close(other.table_LV.grad[[0, 1, 3]], gradient_LV[[0, 1, 3]])


def test_grpo_by_hand_counts_three_tokens_of_the_first_row():
    # Ratios of 1 everywhere: the objective is A on each sampled token, its mean over a row A, the loss -(1 - 2) / 2. A
    # question that was counted would make the first row's mean another one.
    policy = TablePolicy(TABLE)
    own = policy.logprobs(masked())
    sampled = [own[0][np.array(MASKS[0])], own[1]]
    total, _, metrics = evaluate(objective("grpo"), policy, masked(sampled=sampled))
    assert total == pytest.approx(0.5, abs=1e-6)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["entropy"] == pytest.approx(-np.concatenate(sampled).mean(), abs=1e-5)
    # And row weights: 1 / (2 x 3) and 1 / (2 x 2).
    weights_N = objective("grpo").prepare(masked()).row_weights_N
    np.testing.assert_allclose(weights_N, [1 / 6, 1 / 4])


@pytest.mark.parametrize("shared", [True, False])
def test_every_way_to_compute_log_probs_agrees_and_a_full_mask_changes_no_bit(shared):
    torch.manual_seed(3)
    module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, initializer_range=0.3, attn_implementation="sdpa",
        )
    )  # fmt: skip
    section = Training(loss="gspo", kl={"coefficient": 0.1}, shared_prompts=shared)
    target = PolicyObjective(section, Rollouts(max_tokens=8), pad_id=0)
    rows = [[1, 2, 3, 4, 5, 6], [1, 2, 7, 6], [1, 3, 2, 2, 5]]
    masks = [[True, True, False, True], [True, False], [False, True, True]]

    def batch(masked_too):
        made = policy_batch(rows, [2, 2, 2], [1.0, -1.0, 0.5])
        kept = masks if masked_too else [[True] * len(mask) for mask in masks]
        silent = [np.full(int(np.sum(mask)), -2.0, dtype=np.float32) for mask in kept]
        return replace_all(made, silent, kept, reference=[row - 0.25 for row in silent])

    def gradients(given):
        module.zero_grad()
        loss, _ = target(module, target.prepare(given))
        loss.backward()
        return loss.item(), torch.cat([weight.grad.flatten() for weight in module.parameters()])

    full = batch(False)
    plain = replace(full, sampled_masks=None)
    for one, other in zip(gradients(full), gradients(plain), strict=True):
        assert one == other if isinstance(one, float) else torch.equal(one, other)

    # An independent reference: the sampled tokens' log-probs by themselves, from the model's logits.
    loss, found = gradients(batch(True))
    module.zero_grad()
    expected = torch.zeros(())
    for row, mask, advantage in zip(rows, masks, [1.0, -1.0, 0.5], strict=True):
        logits_LV = module(input_ids=torch.tensor([row])).logits[0]
        own = torch.log_softmax(logits_LV, dim=-1)[torch.arange(len(row) - 1), row[1:]][1:][torch.tensor(mask)]
        ratio = (own + 2.0).mean().exp()
        held = ratio.clamp(1 - 3e-4, 1 + 4e-4)
        gain = torch.minimum(ratio * advantage, held * advantage)
        # k3's value is left out: the gradient of the KL term is that of k2 (pvg.training.losses).
        expected = expected - gain / 3 + (0.1 * 0.5 * (own + 2.25) ** 2).mean() / 3
    expected.backward()
    wanted = torch.cat([weight.grad.flatten() for weight in module.parameters()])
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-4)
    assert np.isfinite(loss)
