"""Importance weights by hand, per level and kind; in the loss: denominators, gradients, splits, and the one step."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from table_policy import TablePolicy
from test_policy_losses import A1, A2, B1, NAMES, PROBABILITIES, evaluate, hand_batch, objective, random_batch
from test_policy_losses import random_policy as drawn_policy

from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.training.losses import (
    LOSSES,
    PolicyObjective,
    geometric_ratio,
    importance_metrics,
    importance_weights,
    outside,
    token_ratio,
)


def rows(values):
    return [np.asarray(row, dtype=np.float32) for row in values]


def test_ratios_by_level_by_hand():
    # Row 0: log ratios ln 2 and ln 8 (and a place outside the completion); row 1: 30.
    logs_BL = torch.tensor([[0.0, math.log(2), math.log(8)], [0.0, 30.0, 0.0]])
    mask_BL = torch.tensor([[False, True, True], [False, True, False]])
    for ratio, wanted in ((token_ratio, [2.0, 8.0]), (geometric_ratio, [4.0, 4.0])):
        found_BL = ratio(logs_BL, mask_BL)
        torch.testing.assert_close(found_BL[0][mask_BL[0]], torch.tensor(wanted))
        assert torch.isfinite(found_BL).all()


def test_weights_by_kind_by_hand():
    ratios = torch.tensor([0.1, 0.5, 1.0, 5.0, 7.0, math.inf])
    assert importance_weights(ratios, "none", 0.5, 5.0).tolist() == [1.0] * 6
    assert importance_weights(ratios, "truncated", 0.5, 5.0).tolist() == pytest.approx([0.1, 0.5, 1, 5, 5, 5])
    assert importance_weights(ratios, "masked", 0.5, 5.0).tolist() == [0.0, 0.5, 1.0, 5.0, 0.0, 0.0]
    assert outside(ratios, "truncated", 0.5, 5.0).tolist() == [False] * 4 + [True] * 2
    mask_1L = torch.tensor([[True] * 5 + [False]])  # what is not the policy's own counts nowhere
    found = importance_metrics(ratios[None], mask_1L, 5, "masked", 0.5, 5.0).result()
    assert found["start_ratio_mean"] == pytest.approx(13.6 / 5)
    assert found["start_ratio_max"] == pytest.approx(7.0)
    assert found["start_outside"] == pytest.approx(2 / 5)
    found = importance_metrics(ratios[None], mask_1L, 5, "truncated", 0.5, 5.0).result()
    assert found["start_outside"] == pytest.approx(1 / 5)
    assert importance_metrics(ratios[None], ~mask_1L & mask_1L, 0, "masked", 0.5, 5.0).result() == {}


# The rows of `hand_batch`: pi / pi_sampled is 1.5 and 0.5 (A, advantage 1) and 0.5 (B, advantage -2). In the only step
# of a batch pi is pi_start: every ratio that is clipped is 1, and the weights are these.
WEIGHTED = {
    ("truncated", token_ratio): ([1.2, 0.5], [0.5]),
    ("truncated", geometric_ratio): ([math.sqrt(0.75)] * 2, [0.5]),
    ("masked", token_ratio): ([0.0, 0.0], [0.0]),  # 1.5 is over 1.2, 0.5 is below 0.7
    ("masked", geometric_ratio): ([math.sqrt(0.75)] * 2, [0.0]),
}


@pytest.mark.parametrize(("kind", "ratio"), WEIGHTED)
def test_the_loss_of_the_only_step_by_hand(kind, ratio, monkeypatch):
    monkeypatch.setitem(LOSSES, "reinforce_pp", replace(LOSSES["reinforce_pp"], ratio=ratio))
    weighing = objective("reinforce_pp", importance=kind, bounds=(0.7, 1.2))
    total, gradient, metrics = evaluate(weighing, TablePolicy(PROBABILITIES), hand_batch())
    of_a, of_b = WEIGHTED[kind, ratio]
    # Three tokens, whether they are masked or not: the denominator is what it was.
    assert total == pytest.approx(-(sum(of_a) - 2 * sum(of_b)) / 3, rel=1e-5, abs=1e-7)
    # d/d logit 3 at position 0: A's first token is 3 (0.4 of it), B's is 2. The weights carry no gradient.
    expected = -(of_a[0] * (1 - 0.4) - 2 * of_b[0] * (0 - 0.4)) / 3
    assert gradient[3].item() == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert metrics["ratio_max"] == pytest.approx(1.5, rel=1e-5)  # raw
    assert metrics["clipped"] == 0.0


@pytest.mark.parametrize(("precision", "by_default"), [("float32", "none"), ("bfloat16", "truncated")])
def test_passes_in_bfloat16_are_weighted_by_default(precision, by_default):
    def gradient(importance):
        section = Training(loss="grpo", kl={"coefficient": 0.0}, importance=importance, shared_prompts=False)
        found = PolicyObjective(section, Rollouts(max_tokens=4), 0, precision)
        return evaluate(found, TablePolicy(PROBABILITIES), hand_batch())[1]

    torch.testing.assert_close(gradient("auto"), gradient(by_default))
    assert not torch.equal(gradient("none"), gradient("truncated"))


@pytest.mark.parametrize("loss", NAMES)
def test_where_sampler_and_trainer_agree_it_is_the_plain_loss(loss):
    policy = drawn_policy(4)
    batch = random_batch(policy, 4, 6, 5, 9)
    batch = replace(batch, sampled_logprobs=rows(policy.logprobs(batch)))
    plain, gradient, _ = evaluate(objective(loss), policy, batch)
    for kind in ("truncated", "masked"):
        total, found, metrics = evaluate(objective(loss, importance=kind), policy, batch)
        assert total == pytest.approx(plain, rel=1e-4, abs=1e-6)
        assert torch.allclose(found, gradient, rtol=1e-4, atol=1e-6)
        assert metrics["start_outside"] == 0.0


def test_over_several_steps_it_needs_the_log_probs_at_batch_start():
    several = objective("grpo", importance="masked", minibatches=2)
    assert several.needs_start
    assert not objective("grpo", importance="masked").needs_start
    assert not objective("grpo", importance="none", minibatches=2).needs_start
    with pytest.raises(ValueError, match="require proximal_logprobs"):
        several.prepare(hand_batch())
    # With them, those count, not what the policy is by now: at the start A's first was 1.25 times as likely.
    start = rows([[A1 - math.log(1.2), A2], [B1]])
    batch = replace(hand_batch(), proximal_logprobs=start)
    total, _, metrics = evaluate(
        objective("reinforce_pp", importance="truncated", minibatches=2), TablePolicy(PROBABILITIES), batch
    )
    # A: 1.25 x min(1.2, 1.2) and 0.5 x 1; B: 0.5 x -2.
    assert total == pytest.approx(-(1.25 * 1.2 + 0.5 - 1.0) / 3, rel=1e-5)
    assert metrics["start_ratio_max"] == pytest.approx(1.25, rel=1e-5)
