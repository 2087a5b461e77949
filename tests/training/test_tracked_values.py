"""spo: the tracked values against the Beta of game.md written out, and its advantages by hand and row by row."""

from __future__ import annotations

import math

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.records import Role
from pvg.training.credit import EPSILON, LEVEL_DECAY, PRIOR, RHO_LEAST, RHO_MOST, ValueTracker, tracked_advantages

pytestmark = pytest.mark.slow

H, S = Role.HELPFUL, Role.SNEAKY


def observed(tracker: ValueTracker, rows: list[tuple[str, Role, float, int]]) -> list[float]:
    keys = [(problem, role) for problem, role, _, _ in rows]
    rewards, versions = np.array([row[2] for row in rows]), np.array([row[3] for row in rows], dtype=np.int32)
    return tracker.observe(keys, rewards, versions).tolist()


def test_values_by_hand() -> None:
    tracker = ValueTracker(half_life=10.0)
    assert math.isnan(tracker.value(("a", H)))
    # The first batch: its mean 1/2 is the level, 8 rollouts strong. The policy has not moved: rho = 0.96.
    assert observed(tracker, [("a", H, 1.0, 3), ("b", H, 0.0, 3)]) == [0.5, 0.5]
    count = 0.96 * 8 + 1  # 8.68
    assert tracker.value(("a", H)) == pytest.approx((0.96 * 4 + 1) / count)
    assert tracker.value(("b", H)) == pytest.approx((0.96 * 4) / count)
    # One version later rho = 2^-0.1 = 0.933; b is not touched, a new problem starts from the level.
    before = tracker.value(("a", H))
    assert observed(tracker, [("a", H, 0.0, 4), ("c", H, 1.0, 4)]) == [before, 0.5]
    rho = 2**-0.1
    alpha, beta = rho * (0.96 * 4 + 1), rho * (0.96 * 4) + 1
    assert tracker.value(("a", H)) == pytest.approx(alpha / (alpha + beta))
    # Thirty versions later: 2^-3 is below the clamp.
    alpha, beta = RHO_LEAST * alpha + 1, RHO_LEAST * beta
    observed(tracker, [("a", H, 1.0, 34)])
    assert tracker.value(("a", H)) == pytest.approx(alpha / (alpha + beta))
    # The level has seen batches of mean 1/2, 1/2 and 1.
    assert tracker.value(("new", H)) == pytest.approx(0.5 + 0.05 * 0.5)
    assert math.isnan(tracker.value(("a", S)))


ROWS = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from([H, S]), st.sampled_from([0.0, 0.25, 1.0]), st.integers(0, 9)
        ),
        min_size=1,
        max_size=6,
    ),
    max_size=6,
)


@settings(deadline=None)
@given(batches=ROWS, half_life=st.sampled_from([3.0, 20.0, 100.0]))
def test_agrees_with_the_fading_beta_of_the_paper(batches: list, half_life: float) -> None:
    """alpha and beta written out, batch after batch; the levels apart."""
    tracker = ValueTracker(half_life)
    counts: dict[tuple[str, Role], list[float]] = {}
    levels: dict[Role, float] = {}
    for rows in batches:
        means = {role: [row[2] for row in rows if row[1] is role] for role in Role}
        means = {role: sum(rewards) / len(rewards) for role, rewards in means.items() if rewards}
        for role, mean in means.items():
            levels.setdefault(role, mean)
        expected = [
            counts[row[:2]][0] / sum(counts[row[:2]][:2]) if row[:2] in counts else levels[row[1]] for row in rows
        ]
        assert observed(tracker, rows) == pytest.approx(expected, abs=1e-12)
        for problem, role, reward, version in rows:
            level = levels[role]
            alpha, beta, last = counts.get((problem, role), [PRIOR * level, PRIOR * (1 - level), version])
            rho = min(max(2 ** (-max(0, version - last) / half_life), RHO_LEAST), RHO_MOST)
            counts[problem, role] = [rho * alpha + reward, rho * beta + 1 - reward, max(version, last)]
        for role, mean in means.items():
            levels[role] = LEVEL_DECAY * levels[role] + (1 - LEVEL_DECAY) * mean


@settings(deadline=None)
@given(batches=ROWS, cut=st.integers(0, 6))
def test_a_tracker_that_went_through_json_goes_on_bit_by_bit(batches: list, cut: int) -> None:
    whole, first, resumed = ValueTracker(7.0), ValueTracker(7.0), ValueTracker(7.0)
    for rows in batches[:cut]:
        observed(whole, rows)
        observed(first, rows)
    resumed.load_state(orjson.loads(orjson.dumps(first.state())))
    for rows in batches[cut:]:
        assert observed(whole, rows) == observed(resumed, rows)
    assert whole.state() == resumed.state()


# --- advantages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fewest", [0, 1])
def test_a_row_counts_by_its_tokens_and_at_least_once(fewest: int) -> None:
    # Surprises 0 once and 4 three times: mean 3, variance (9 + 3) / 4 = 3.
    found = tracked_advantages(np.array([0.0, 4.0]), np.zeros(2), np.array([fewest, 3]), np.zeros(2))
    assert found.tolist() == pytest.approx([-(3**0.5), 1 / 3**0.5], abs=1e-5)
    assert found.dtype == tracked_advantages(*[np.zeros(0)] * 4).dtype == np.float32


@settings(deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(-8, 8), st.integers(-8, 8), st.integers(1, 50), st.sampled_from([0, 1])),
        min_size=1,
        max_size=30,
    )
)
def test_advantages_agree_with_tokens_counted_one_by_one(rows: list) -> None:
    """A row of n tokens is n tokens of the same surprise: plain means over tokens."""
    tokens = [(role, (reward - value) / 8) for reward, value, count, role in rows for _ in range(count)]
    means = {}
    for role in (0, 1):
        own = [surprise for of, surprise in tokens if of == role]
        means[role] = sum(own) / len(own) if own else 0.0
    deviation = math.sqrt(sum((surprise - means[role]) ** 2 for role, surprise in tokens) / len(tokens))
    expected = [((reward - value) / 8 - means[role]) / (deviation + EPSILON) for reward, value, _, role in rows]
    rewards, values, counts, roles = np.array(rows).T
    found = tracked_advantages(rewards / 8, values / 8, counts, roles)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
