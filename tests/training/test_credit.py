"""Credit rules: hand-computed numbers, and a slow reference that goes row by row."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.errors import TrainingDivergedError
from pvg.training.credit import CREDIT, advantages, zero_signal_groups

pytestmark = pytest.mark.slow

HELPFUL, SNEAKY = 1, 0
NORMALISED = ("grpo", "dapo", "gspo", "cispo")

# Group 0: rewards 1, 0, 0, 1: mean 1/2, deviations +-1/2, population std 1/2.
# Group 1: rewards 3, 0, 0:    mean 1, deviations 2, -1, -1, population variance (4 + 1 + 1)/3 = 2.
REWARDS = np.array([1.0, 3.0, 0.0, 0.0, 0.0, 0.0, 1.0])
GROUPS = np.array([0, 1, 0, 1, 1, 0, 0])
ROLES = np.full(7, HELPFUL)


@pytest.mark.parametrize("loss", tuple(CREDIT))
def test_roles_that_share_a_group_id_do_not_mix(loss):
    # Helpful 0, 1 and sneaky 10, 11 under one group id: either role's pair is centred on its own mean.
    found = advantages(loss, np.array([0.0, 10.0, 1.0, 11.0]), np.zeros(4), np.array([HELPFUL, SNEAKY] * 2))
    assert found[0] == found[1] < 0 < found[2] == found[3]
    apart = advantages(loss, np.array([0.0, 10.0, 1.0, 11.0]), np.array([0, 1] * 2), np.array([HELPFUL, SNEAKY] * 2))
    np.testing.assert_array_equal(found, apart)


@pytest.mark.parametrize("loss", tuple(CREDIT))
def test_equal_rewards_give_exactly_nothing(loss):
    # 3 x 0.1 / 3 is not 0.1 in floating point; the advantage must still be 0.
    found = advantages(loss, np.array([0.1, 0.1, 0.1, 1.0, 2.0]), np.array([4, 4, 4, 9, 9]), np.zeros(5))
    assert not found[:3].any()
    assert found[3:].all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_reward_is_named(value):
    rewards = REWARDS.copy()
    rewards[4] = value
    with pytest.raises(TrainingDivergedError, match=rf"reward of row 4 \(group 1, role 1\) is {value}"):
        advantages("grpo", rewards, GROUPS, ROLES)


def test_signal_by_hand():
    rewards, groups = np.array([1.0, 1.0, 0.0, 2.0, 5.0]), np.array([3, 3, 7, 7, 8])
    roles = np.ones(5)
    assert zero_signal_groups(rewards, groups, roles) == pytest.approx(2 / 3)
    assert zero_signal_groups(np.zeros(0), np.zeros(0), np.zeros(0)) == 0.0
    # Different rewards, but each alone in its role: no signal.
    assert zero_signal_groups(np.array([0.0, 1.0]), np.zeros(2), np.array([0, 1])) == 1.0


def slow_advantages(loss, rewards, groups, roles):
    """Row by row, with lists."""
    found, centred = [], []
    for reward, group, role in zip(rewards, groups, roles, strict=True):
        mates = [r for r, g, o in zip(rewards, groups, roles, strict=True) if (g, o) == (group, role)]
        mean = sum(mates) / len(mates)
        std = math.sqrt(sum((r - mean) ** 2 for r in mates) / len(mates))
        centred.append(reward - mean)
        if loss in NORMALISED:
            found.append((reward - mean) / (std + 1e-6))
        elif loss == "rloo":
            others = (sum(mates) - reward) / (len(mates) - 1) if len(mates) > 1 else reward
            found.append(reward - others)
        else:
            found.append(reward - mean)
    if loss == "reinforce_pp":
        mean = sum(centred) / len(centred)
        std = math.sqrt(sum((c - mean) ** 2 for c in centred) / len(centred))
        found = [(c - mean) / (std + 1e-6) for c in centred]
    return found


# Rewards in steps of 1/8: exact sums, so that equal rewards are equal in the reference too.
ROWS = st.lists(st.tuples(st.integers(-40, 40), st.integers(-3, 3), st.sampled_from([0, 1])), min_size=1, max_size=40)


@pytest.mark.parametrize("loss", tuple(CREDIT))
@settings(deadline=None)
@given(rows=ROWS)
def test_agrees_with_the_slow_reference(loss, rows):
    rewards, groups, roles = ([row[0] / 8 for row in rows], [row[1] for row in rows], [row[2] for row in rows])
    found = advantages(loss, np.array(rewards), np.array(groups), np.array(roles))
    np.testing.assert_allclose(found, slow_advantages(loss, rewards, groups, roles), rtol=1e-5, atol=1e-6)
