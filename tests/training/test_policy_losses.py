"""Policy losses: numbers worked out by hand, a slow reference, directions, and micro-batches that add up."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_policy import TablePolicy, policy_batch, small_llama

from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.errors import TrainingDivergedError
from pvg.telemetry.metrics import Metrics
from pvg.training.losses import LOSSES, WEIGHT_BOUNDS, PolicyObjective

pytestmark = pytest.mark.slow

NAMES = tuple(LOSSES)


def objective(loss, *, kl=0.0, max_tokens=4, temperature=1.0, bounds=WEIGHT_BOUNDS, **others):
    table = {"coefficient": kl} if isinstance(kl, float) else kl
    section = Training(loss=loss, **({"kl": table, "shared_prompts": False} | others))  # a table has no attention
    found = PolicyObjective(section, Rollouts(max_tokens=max_tokens, temperature=temperature), pad_id=0)
    found.weight_bounds = bounds
    return found


def evaluate(objective_, policy, batch, parts=None):
    """Loss, gradients and metrics of a prepared batch, summed over `parts` (row numbers; None: unsplit)."""
    batch = objective_.prepare(batch)
    policy.zero_grad()
    metrics, total = Metrics(), 0.0
    for rows in [np.arange(len(batch))] if parts is None else parts:
        loss, found = objective_(policy, batch.select(np.asarray(rows)))
        loss.backward()
        total += loss.item()
        metrics.merge(found)
    gradients = [weight.grad.clone() for weight in policy.parameters() if weight.grad is not None]
    return total, torch.cat([gradient.flatten() for gradient in gradients]), metrics.result()


# --- by hand -------------------------------------------------------------------------------------------------------

# Two rows after a prompt of one token. Row A: advantage 1, tokens of probability 0.4 and 0.25, ratios 1.5 and 0.5.
# Row B: advantage -2, one token of probability 0.3, ratio 0.5.
PROBABILITIES = [[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]]
A1, A2, B1 = math.log(0.4), math.log(0.25), math.log(0.3)


def hand_batch(reference=None):
    sampled = [[A1 - math.log(1.5), A2 - math.log(0.5)], [B1 - math.log(0.5)]]
    return policy_batch([[0, 3, 1], [0, 2]], [1, 1], [1.0, -2.0], sampled=sampled, reference=reference)


BY_HAND = {
    # A: min(1.5, 1.2) = 1.2 and min(0.5, 0.8) = 0.5, mean 0.85. B: min(0.5 x -2, 0.8 x -2) = -1.6.
    "grpo": -(0.85 - 1.6) / 2,
    # The same terms, 1.2 + 0.5 - 1.6, over 2 rows x 4 tokens at most.
    "dr_grpo": -(1.2 + 0.5 - 1.6) / (2 * 4),
    # The upper clip is 1.28: 1.28 + 0.5 - 1.6 over 3 tokens.
    "dapo": -(1.28 + 0.5 - 1.6) / 3,
    # A: s = sqrt(1.5 x 0.5), below 1 + 4e-4, so free. B: s = 0.5, held at 1 - 3e-4: 0.9997 x -2 is the smaller.
    "gspo": -(math.sqrt(0.75) - 2 * 0.9997) / 2,
    # No ratio reaches the cap of 5: r A log p summed over 3 tokens.
    "cispo": -(1.5 * A1 + 0.5 * A2 - 2 * 0.5 * B1) / 3,
    # A log p of the sequences, over 2 of them.
    "rloo": -((A1 + A2) - 2 * B1) / 2,
    # As grpo's terms, over 3 tokens.
    "reinforce_pp": -(1.2 + 0.5 - 1.6) / 3,
    "spo": -(1.2 + 0.5 - 1.6) / 3,
    # As dr_grpo's: 2 rows x 4 tokens at most.
    "rae": -(1.2 + 0.5 - 1.6) / (2 * 4),
}
# Tokens whose gradient the clip took, of 3: A's first at 1.2 or 1.28, B's; gspo: B's only.
CLIPPED = {"grpo": 2, "dr_grpo": 2, "dapo": 2, "gspo": 1, "cispo": 0, "rloo": 0, "reinforce_pp": 2, "spo": 2, "rae": 2}


@pytest.mark.parametrize("loss", NAMES)
def test_by_hand(loss):
    total, _, metrics = evaluate(objective(loss), TablePolicy(PROBABILITIES), hand_batch())
    assert total == pytest.approx(BY_HAND[loss], rel=1e-5)
    assert metrics["loss"] == pytest.approx(BY_HAND[loss], rel=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1.5, rel=1e-5)
    assert metrics["ratio_mean"] == pytest.approx((1.5 + 0.5 + 0.5) / 3, rel=1e-5)
    assert metrics["entropy"] == pytest.approx(-(A1 + A2 + B1) / 3, rel=1e-5)
    assert metrics["clipped"] == pytest.approx(CLIPPED[loss] / 3)
    assert metrics["padding"] == pytest.approx(1 / 6)  # of 2 rows x 3 positions
    assert "kl" not in metrics  # there is no reference to measure it against


def test_a_configured_clip_overrides_the_default():
    # Clip to [0.6, 1.4]: A: 1.4 + 0.5, mean 0.95; B: min(-1, 0.6 x -2) = -1.2.
    total, _, _ = evaluate(
        objective({"kind": "grpo", "clip_low": 0.4, "clip_high": 0.4}), TablePolicy(PROBABILITIES), hand_batch()
    )
    assert total == pytest.approx(-(0.95 - 1.2) / 2, rel=1e-5)
    # cispo's cap is 1 + clip_high = 1.2: only A's first token is above it, and keeps a gradient.
    total, gradient, metrics = evaluate(
        objective({"kind": "cispo", "clip_high": 0.2}), TablePolicy(PROBABILITIES), hand_batch()
    )
    assert total == pytest.approx(-(1.2 * A1 + 0.5 * A2 - 2 * 0.5 * B1) / 3, rel=1e-5)
    assert metrics["clipped"] == pytest.approx(1 / 3)
    # d/d logit(3) at position 0: from A 1.2 (1 - 0.4), from B -1 (0 - 0.4).
    assert gradient[3].item() == pytest.approx(-(1.2 * 0.6 + 0.4) / 3, rel=1e-4)


# d = log p - log ref: A: ln 2 and 0; B: -ln 2. k3 = 1/2 + ln 2 - 1, 0 and 2 - ln 2 - 1.
REFERENCE = [[A1 - math.log(2), A2], [B1 + math.log(2)]]
K3_A, K3_B = math.log(2) - 0.5, 1 - math.log(2)
PENALTY = {
    "grpo": (K3_A / 2 + K3_B) / 2,  # mean of sequence means
    "dr_grpo": (K3_A + K3_B) / (2 * 4),
    "dapo": 0.0,  # has no KL term
    "gspo": (K3_A / 2 + K3_B) / 2,
    "cispo": (K3_A + K3_B) / 3,  # mean of tokens
    "rloo": (K3_A + K3_B) / 2,  # mean of sequence sums
    "reinforce_pp": (K3_A + K3_B) / 3,
    "spo": (K3_A + K3_B) / 3,
    "rae": (K3_A + K3_B) / (2 * 4),
}


@pytest.mark.parametrize("loss", NAMES)
def test_the_penalty_is_aggregated_like_the_policy_term(loss):
    priced = objective(loss, kl=0.3)
    assert priced.needs_reference == (loss != "dapo")
    total, _, metrics = evaluate(priced, TablePolicy(PROBABILITIES), hand_batch(REFERENCE))
    assert total == pytest.approx(BY_HAND[loss] + 0.3 * PENALTY[loss], rel=1e-5)
    assert metrics["kl"] == pytest.approx((K3_A + K3_B) / 3, rel=1e-5)


def test_dapo_leaves_silent_groups_out_of_its_denominator():
    # Group 7 is silent; group 8 is not, though one of its rows has advantage 0. Two tokens count, not three.
    batch = policy_batch([[0, 3], [0, 2], [0, 1]], [1] * 3, [0.0, 1.0, 0.0], groups=[7, 8, 8])
    dapo = objective("dapo")
    prepared = dapo.prepare(batch)
    assert prepared.row_weights_N.tolist() == [0.0, 0.5, 0.5]
    assert sum(len(part) for part in dapo.split(prepared)) == 2
    # The same group id in the other role is another group.
    other = replace(batch, role_ids_N=np.array([1, 1, 0], dtype=np.int8))
    assert dapo.prepare(other).row_weights_N.tolist() == [0.0, 1.0, 0.0]
    silent = dapo.prepare(replace(batch, advantages_N=np.zeros(3, dtype=np.float32)))
    assert dapo.split(silent) == []


# --- a slow reference ----------------------------------------------------------------------------------------------


def slow_loss(loss, policy, batch, beta, max_tokens):
    """Row by row and token by token, in float64."""
    low, high = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}.get(loss, (0.2, 0.2))
    rows = []  # per row: list of per-token values
    for number, logprobs in enumerate(policy.logprobs(batch)):
        advantage = float(batch.advantages_N[number])
        ratios = [math.exp(p - old) for p, old in zip(logprobs, batch.sampled_logprobs[number], strict=True)]
        if loss == "gspo":
            ratios = [math.prod(ratios) ** (1 / len(ratios))] * len(ratios)
        values = []
        for t, ratio in enumerate(ratios):
            if loss == "cispo":
                value = min(ratio, 5.0) * advantage * logprobs[t]
            elif loss == "rloo":
                value = advantage * logprobs[t]
            else:
                held = max(1 - low, min(1 + high, ratio)) * advantage
                value = min(ratio * advantage, held)
            if loss != "dapo":
                difference = logprobs[t] - batch.reference_logprobs[number][t]
                value -= beta * (math.exp(-difference) + difference - 1)
            values.append(value)
        rows.append(values)
    if loss == "dapo":
        live = {int(g) for g, a in zip(batch.group_ids_N, batch.advantages_N, strict=True) if a != 0}
        rows = [values for values, group in zip(rows, batch.group_ids_N, strict=True) if int(group) in live]
        if not rows:
            return 0.0
    if loss in ("grpo", "gspo"):
        return -sum(sum(values) / len(values) for values in rows) / len(rows)
    if loss in ("dr_grpo", "rae"):
        return -sum(map(sum, rows)) / (len(rows) * max_tokens)
    if loss == "rloo":
        return -sum(map(sum, rows)) / len(rows)
    return -sum(map(sum, rows)) / sum(map(len, rows))


def random_batch(policy, seed, rows, vocabulary, longest):
    generator = np.random.default_rng(seed)
    prompts = generator.integers(1, longest - 1, rows)
    totals = [int(generator.integers(prompt + 1, longest + 1)) for prompt in prompts]
    batch = policy_batch(
        [generator.integers(0, vocabulary, total) for total in totals],
        prompts,
        generator.choice([-1.5, -0.5, 0.0, 1.0, 2.0], rows),
        groups=generator.integers(0, 3, rows),
    )
    near = [values.astype(np.float32) for values in policy.logprobs(batch)]
    sampled = [(row + generator.normal(0, 0.3, len(row))).astype(np.float32) for row in near]
    reference = [(row + generator.normal(0, 0.5, len(row))).astype(np.float32) for row in near]
    return replace(batch, sampled_logprobs=sampled, reference_logprobs=reference)


def random_policy(seed):
    generator = np.random.default_rng(seed)
    return TablePolicy(generator.dirichlet(np.full(5, 2.0), size=11))


@pytest.mark.parametrize("loss", NAMES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 9))
def test_agrees_with_the_slow_reference(loss, seed, rows):
    policy = random_policy(seed)
    batch = random_batch(policy, seed, rows, 5, 9)
    total, _, _ = evaluate(objective(loss, kl=0.1, max_tokens=9), policy, batch)
    assert total == pytest.approx(slow_loss(loss, policy, batch, 0.1, 9), rel=1e-4, abs=1e-5)


# --- micro-batches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("importance", ["none", "truncated", "masked", "decoupled"])
@pytest.mark.parametrize("loss", NAMES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_any_split_adds_up_to_the_unsplit_batch(loss, importance, seed, data):
    policy = random_policy(seed)
    batch = random_batch(policy, seed, 8, 5, 9)
    if importance == "decoupled":
        batch = replace(batch, proximal_logprobs=batch.reference_logprobs)
    parts_N = np.array(data.draw(st.lists(st.integers(0, 4), min_size=8, max_size=8)))
    parts = [np.flatnonzero(parts_N == part) for part in np.unique(parts_N)]
    weighing = {"importance": importance, "bounds": (0.8, 1.1)}
    priced = objective(loss, kl=0.1, max_tokens=9, **weighing)
    whole, whole_gradient, whole_metrics = evaluate(priced, policy, batch)
    split, split_gradient, split_metrics = evaluate(priced, policy, batch, parts)
    assert split == pytest.approx(whole, rel=1e-5, abs=1e-6)
    # Rounding is relative to the rows' terms, which may cancel in the sum: hence the floor.
    assert (split_gradient - whole_gradient).norm() <= 2e-6 * max(0.1, whole_gradient.norm())
    del split_metrics["padding"], whole_metrics["padding"]  # it is the split's doing
    assert split_metrics == pytest.approx(whole_metrics, rel=1e-5, abs=1e-6)


@pytest.fixture(scope="module")
def llama():
    return small_llama(5)


# --- recomputing ---------------------------------------------------------------------------------------------------


def test_recomputed_logprobs_are_those_of_the_loss(llama):
    """With sampled := recomputed, every ratio is 1; in any batching, and in the batch's order."""
    batch = random_batch(random_policy(1), 1, 9, 5, 12)
    small, large = objective("grpo", micro_batch_tokens=12), objective("grpo")
    recomputed = small.recompute(llama, batch)
    for row, other in zip(recomputed, large.recompute(llama, batch), strict=True):
        np.testing.assert_allclose(row, other, atol=1e-5)
    _, _, metrics = evaluate(large, llama, replace(batch, sampled_logprobs=recomputed))
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    table = random_policy(1)
    for row, by_numpy in zip(large.recompute(table, batch.select(np.arange(9))), table.logprobs(batch), strict=True):
        np.testing.assert_allclose(row, by_numpy, atol=1e-5)


# --- faults --------------------------------------------------------------------------------------------------------


def test_broken_rows_are_named():
    batch = hand_batch(REFERENCE)
    broken = replace(batch, advantages_N=np.array([1.0, math.nan], dtype=np.float32))
    with pytest.raises(TrainingDivergedError, match=r"Row 1 of the batch \(group 1\) has an advantage"):
        objective("grpo").prepare(broken)
    sampled = [np.array([-1.0, -math.inf], dtype=np.float32), batch.sampled_logprobs[1]]
    with pytest.raises(TrainingDivergedError, match=r"Row 0 .* has a sampled log-prob"):
        objective("grpo").prepare(replace(batch, sampled_logprobs=sampled))
