"""Intervals against numbers computed by hand, and against slow references."""

from __future__ import annotations

import numpy as np
import pytest

from pvg.verifier.intervals import change_point, draws, mean_of, share_of, wilson


def test_wilson_by_hand():
    # p = 0.8, n = 10, z = 1.96: centre (0.8 + 0.19207) / 1.38415, half-width sqrt(0.016 + 0.0096036) * 1.96 / 1.38415
    low, high = wilson(0.8, 10)
    assert low == pytest.approx(0.49016, abs=1e-4)
    assert high == pytest.approx(0.94332, abs=1e-4)


def test_wilson_at_the_ends():
    assert wilson(0.0, 10) == (0.0, pytest.approx(0.27753, abs=1e-4))  # z^2 / (n + z^2)
    assert wilson(1.0, 10) == (pytest.approx(0.72247, abs=1e-4), 1.0)
    with pytest.raises(ValueError, match="nothing"):
        wilson(0.5, 0)


def test_a_share_of_one_solution_per_problem_by_hand():
    holds_N = np.array([True] * 8 + [False] * 2)
    found = share_of(holds_N, np.arange(10))
    # One solution per problem: Var = 10/9 * (8 * 0.04 + 2 * 0.64) / 100, so n* = 0.16 / Var = 9.
    assert (found.low, found.high) == pytest.approx(wilson(0.8, 9))
    assert (found.value, found.n, found.problems) == (pytest.approx(0.8), 10, 10)


def test_solutions_that_agree_within_problems_count_once_per_problem():
    holds_N = np.repeat([True, True, True, False], 8)
    clustered = share_of(holds_N, np.repeat(np.arange(4), 8))
    # e_k = 8 - 0.75*8 = 2 (three times) and -6: Var = 4/3 * 48 / 32^2 = 1/16, n* = 0.1875 * 16 = 3.
    assert (clustered.low, clustered.high) == pytest.approx(wilson(0.75, 3))
    assert clustered.n == 32


def test_a_share_of_one_rests_on_its_problems_not_on_its_solutions():
    found = share_of(np.ones(40, dtype=bool), np.repeat(np.arange(5), 8))
    assert (found.low, found.high) == pytest.approx(wilson(1.0, 5))


def test_draws_are_resamples_and_repeat():
    weights_BP = draws(7, 50, seed=3)
    assert weights_BP.shape == (50, 7)
    assert (weights_BP.sum(axis=1) == 7).all()
    assert np.array_equal(weights_BP, draws(7, 50, seed=3))
    assert not np.array_equal(weights_BP, draws(7, 50, seed=4))


def test_the_mean_of_a_ratio_is_that_of_its_resamples():
    values_N, problems_N = np.array([1.0, 3.0, 5.0, 9.0]), np.array([0, 0, 1, 2])
    weights_BP = np.array([[3.0, 0.0, 0.0], [0.0, 3.0, 0.0], [1.0, 1.0, 1.0]])
    found = mean_of(values_N, problems_N, weights_BP)
    # resampled means: (1+3)/2 = 2, 5, 18/4 = 4.5; the middle 95 % of (2, 4.5, 5) is 2.125 to 4.975
    assert (found.value, found.n, found.problems) == (4.5, 4, 3)
    assert (found.low, found.high) == pytest.approx((2.125, 4.975))


def test_a_change_point_is_where_the_mean_changes_and_noise_has_none() -> None:
    rng = np.random.default_rng(3)
    steady_T, falling_T = rng.normal(0.6, 0.1, 60), np.append(rng.normal(0.6, 0.1, 40), rng.normal(0.3, 0.1, 20))
    found = change_point(falling_T)
    assert found is not None
    assert abs(found[0] - 40) <= 1
    assert found[1] == 0.001
    small = [change_point(rng.normal(0.6, 0.1, 30)) for _ in range(40)]
    assert sum(each is not None and each[1] <= 0.05 for each in small) <= 6  # 2 are expected
    assert change_point(steady_T[:9]) is None
    assert change_point(np.zeros(10)) == (5, 1.0)
