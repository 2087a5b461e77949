"""Stale rows clipped around the policy at batch start: by hand, equal to the plain loss where nothing moved."""

import math
from dataclasses import replace

import numpy as np
import pytest
from table_policy import TablePolicy
from test_policy_losses import A1, A2, B1, NAMES, PROBABILITIES, evaluate, hand_batch, objective


def columns(rows):
    return [np.asarray(row, dtype=np.float32) for row in rows]


# The rows of `hand_batch`: pi / pi_sampled is 1.5 and 0.5 (A, advantage 1), 0.5 (B, advantage -2). At batch start the
# policy gave A's tokens 1.25 and 2 times the sampler's probability and B's the same: so pi / pi_start is 1.2, 0.25 and
# 0.5, and the weights are 1.25, 2 and 1.
START = [[A1 - math.log(1.2), A2 - math.log(0.25)], [B1 - math.log(0.5)]]
DECOUPLED = {
    # A: 1.25 x min(1.2, 1.2) and 2 x min(0.25, 0.8), mean 1.0. B: 1 x min(0.5 x -2, 0.8 x -2) = -1.6.
    "grpo": -(1.0 - 1.6) / 2,
    "dr_grpo": -(1.5 + 0.5 - 1.6) / (2 * 4),
    "dapo": -(1.5 + 0.5 - 1.6) / 3,
    # A: s = sqrt(1.2 x 0.25), below the clip, weighted with sqrt(1.25 x 2). B: 0.9997 x -2.
    "gspo": -(math.sqrt(2.5) * math.sqrt(0.3) - 2 * 0.9997) / 2,
    # stopgrad(r) A log p with the weights: 1.25 x 1.2 and 2 x 0.25.
    "cispo": -(1.5 * A1 + 0.5 * A2 - 2 * 0.5 * B1) / 3,
    # No separate ratio: only the weights.
    "rloo": -((1.25 * A1 + 2 * A2) - 2 * B1) / 2,
    "reinforce_pp": -(1.5 + 0.5 - 1.6) / 3,
    "spo": -(1.5 + 0.5 - 1.6) / 3,
    "rae": -(1.5 + 0.5 - 1.6) / (2 * 4),
}


@pytest.mark.parametrize("loss", NAMES)
def test_by_hand(loss):
    batch = replace(hand_batch(), proximal_logprobs=columns(START))
    total, _, metrics = evaluate(objective(loss, importance="decoupled"), TablePolicy(PROBABILITIES), batch)
    assert total == pytest.approx(DECOUPLED[loss], rel=1e-4)
    # The raw ratios: of the policy as it is to the sampler, and of the policy at batch start to the sampler.
    assert metrics["ratio_max"] == pytest.approx(1.5, rel=1e-5)
    assert metrics["ratio_mean"] == pytest.approx((1.5 + 0.5 + 0.5) / 3, rel=1e-5)
    moved = [math.sqrt(2.5), math.sqrt(2.5), 1.0] if loss == "gspo" else [1.25, 2.0, 1.0]
    assert metrics["start_ratio_max"] == pytest.approx(max(moved), rel=1e-5)
    assert metrics["start_ratio_mean"] == pytest.approx(sum(moved) / 3, rel=1e-5)
    assert metrics["start_outside"] == 0.0


@pytest.mark.parametrize("loss", NAMES)
def test_on_fresh_data_it_is_the_plain_loss_bit_by_bit(loss):
    policy, batch = TablePolicy(PROBABILITIES), hand_batch()
    plain, plain_gradient, _ = evaluate(objective(loss), policy, batch)
    fresh = replace(batch, proximal_logprobs=[row.copy() for row in batch.sampled_logprobs])
    for other in (batch, fresh):  # without stale rows, and with none that has moved
        total, gradient, _ = evaluate(objective(loss, importance="decoupled"), policy, other)
        assert total == plain
        assert (gradient == plain_gradient).all()


@pytest.mark.parametrize("loss", NAMES)
def test_in_the_one_step_of_a_batch_the_forward_pass_knows_the_log_probs_at_batch_start(loss):
    policy, batch = TablePolicy(PROBABILITIES), hand_batch()
    stale_N = np.array([True, False])
    one_step = replace(batch, stale_N=stale_N)
    # A is stale: at batch start the policy is the one that is trained. B is fresh: it is clipped around the sampler.
    known = replace(batch, proximal_logprobs=columns([[A1, A2], batch.sampled_logprobs[1]]))
    loss_ = objective(loss, importance="decoupled", bounds=(0.5, 1.2))
    total, gradient, metrics = evaluate(loss_, policy, known)
    for rows in (None, [[1], [0]]):
        found, found_gradient, found_metrics = evaluate(loss_, policy, one_step, rows)
        assert found == pytest.approx(total, rel=1e-5)
        assert np.allclose(found_gradient, gradient, rtol=1e-5, atol=1e-7)
        assert found_metrics["start_ratio_max"] == pytest.approx(metrics["start_ratio_max"], rel=1e-5)
        assert found_metrics["start_outside"] == pytest.approx(metrics["start_outside"])
