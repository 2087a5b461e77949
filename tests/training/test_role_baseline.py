"""rae: baselines by hand, without the start's bias, and the same after JSON."""

from __future__ import annotations

import math

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.records import Role
from pvg.training.credit import RoleBaseline

pytestmark = pytest.mark.slow

H, S = Role.HELPFUL, Role.SNEAKY


def observed(baseline: RoleBaseline, rows: list[tuple[Role, float]]) -> list[float]:
    return baseline.observe([role for role, _ in rows], np.array([reward for _, reward in rows])).tolist()


def test_baselines_by_hand() -> None:
    baseline = RoleBaseline()
    assert math.isnan(baseline.value(H))
    # First batch: the mean of the others. 3: (1 + 2)/2; 1: (3 + 2)/2; 2: (3 + 1)/2. Alone: its own reward.
    assert observed(baseline, [(H, 3.0), (H, 1.0), (S, -4.0), (H, 2.0)]) == [1.5, 2.5, -4.0, 2.0]
    assert baseline.value(H) == pytest.approx(2.0)  # the batch's mean, not a twentieth of it
    assert baseline.value(S) == pytest.approx(-4.0)
    # Second: both rows get what was known before, whatever they bring.
    assert observed(baseline, [(H, 10.0), (H, 20.0)]) == pytest.approx([2.0, 2.0])
    # (0.95 x 0.05 x 2 + 0.05 x 15) / (1 - 0.95^2)
    expected = (0.95 * 0.05 * 2 + 0.05 * 15) / (1 - 0.95**2)
    assert baseline.value(H) == pytest.approx(expected)
    assert baseline.value(S) == pytest.approx(-4.0)  # untouched
    assert observed(baseline, [(H, 0.0)]) == pytest.approx([expected])
    for role in (H, S):
        assert observed(RoleBaseline(), [(role, 3.0), (role, 1.0)]) == [1.0, 3.0]
    assert observed(RoleBaseline(), [(H, 0.1)] * 3) == [0.1] * 3  # (3 x 0.1 - 0.1) / 2 is not 0.1


REWARDS = st.lists(st.tuples(st.sampled_from([H, S]), st.integers(-8, 8).map(lambda n: n / 4)), min_size=1, max_size=9)


@settings(deadline=None)
@given(rows=REWARDS, row=st.integers(0, 8), other=st.integers(-9, 9), batches=st.lists(REWARDS, max_size=3))
def test_no_baseline_depends_on_the_reward_that_it_is_taken_from(rows, row, other, batches) -> None:
    """Which is what makes it a baseline and no bias, in the first batch as in the later ones."""
    first, second = RoleBaseline(), RoleBaseline()
    for batch in batches:
        observed(first, batch)
        observed(second, batch)
    row = row % len(rows)
    changed = [(role, other if place == row else reward) for place, (role, reward) in enumerate(rows)]
    role = rows[row][0]
    of_role = [reward for place, (of, reward) in enumerate(rows) if of is role and place != row]
    known = any(of is role for batch in batches for of, _ in batch)
    if known or of_role:
        assert observed(first, rows)[row] == pytest.approx(observed(second, changed)[row])
    elif not known:  # alone, and nothing known: whatever it is paid, the advantage is 0
        assert observed(second, changed)[row] == other


@settings(deadline=None)
@given(batches=st.lists(REWARDS, max_size=5), cut=st.integers(0, 5))
def test_after_json_it_goes_on_bit_by_bit(batches, cut) -> None:
    whole, first, resumed = RoleBaseline(), RoleBaseline(), RoleBaseline()
    for rows in batches[:cut]:
        observed(whole, rows)
        observed(first, rows)
    resumed.load_state(orjson.loads(orjson.dumps(first.state())))
    for rows in batches[cut:]:
        assert observed(whole, rows) == observed(resumed, rows)
    assert whole.state() == resumed.state()
