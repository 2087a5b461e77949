"""Calibration against hand-computed numbers, and logistic fits against what must hold at their minimum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.evaluation.measures import calibration_error, cross_fitted, ece, equal_mass, fit
from pvg.verifier.intervals import draws


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(1e-3, 10.0))
def test_at_the_fit_the_gradient_is_zero(seed, penalty):
    generator = np.random.default_rng(seed)
    design_ND = np.concatenate([generator.normal(size=(30, 4)) * 3, np.ones((30, 1))], axis=1)
    targets_N = (generator.random(30) < 0.5).astype(float)
    weights_D = fit(design_ND, targets_N, np.full(5, penalty))
    gradient_D = design_ND.T @ (1 / (1 + np.exp(-design_ND @ weights_D)) - targets_N) + penalty * weights_D
    assert np.abs(gradient_D).max() < 1e-6


def test_bins_of_equal_mass():
    assert equal_mass(np.array([0.4, 0.1, 0.3, 0.2]), 2).tolist() == [1, 0, 1, 0]
    assert equal_mass(np.array([0.1, 0.5, 0.5, 0.5]), 2).tolist() == [0, 0, 0, 0]  # equal ones stay together
    assert equal_mass(np.zeros(0), 3).tolist() == []


def test_the_calibration_error_by_hand():
    predicted_N = np.array([0.1, 0.3, 0.7, 0.9])
    correct_N = np.array([False, True, True, True])
    # bins {0.1, 0.3}: |0.2 - 0.5| = 0.3; {0.7, 0.9}: |0.8 - 1| = 0.2; each holds half
    assert calibration_error(predicted_N, correct_N, np.array([0, 0, 1, 1])) == pytest.approx(0.25)
    found, _ = ece(predicted_N, correct_N, np.arange(4), 2, draws(4, 200, 0))
    assert found.value == pytest.approx(0.25)
    assert found.low <= found.value <= found.high


@pytest.mark.parametrize("miss", [0.0, 0.02, 0.1])
def test_the_interval_of_the_error_holds_the_true_one(miss):
    """Near calibration the percentiles of a bootstrap lie above it: they held a true error of 0.02 one time in five."""
    generator = np.random.default_rng(5)
    problems_N, weights_BP = np.repeat(np.arange(64), 8), draws(64, 200, 1)
    held, chances, values = 0, [], []
    for _ in range(30):
        predicted_N = generator.uniform(0.2, 0.8, len(problems_N))
        true_N = predicted_N + miss
        correct_N = generator.random(len(problems_N)) < true_N
        found, by_chance = ece(predicted_N, correct_N, problems_N, 10, weights_BP)
        held += found.low <= miss <= found.high
        chances.append(by_chance)
        values.append(found.value)
    assert held >= 27
    if not miss:
        assert np.mean(chances) == pytest.approx(np.mean(values), rel=0.15)


def test_a_problem_is_never_calibrated_by_itself():
    # Problem 0's solutions contradict all others. Fitted to the others alone, its predictions are wrong.
    scores_N = np.array([1.0, -1.0] * 8)
    correct_N = np.array([False, True] + [True, False] * 7)
    problems_N = np.repeat(np.arange(8), 2)
    fitted_N = cross_fitted(scores_N, correct_N, problems_N, np.arange(8))
    assert fitted_N is not None
    assert fitted_N[0] > 0.8
    assert fitted_N[1] < 0.2
    assert cross_fitted(scores_N, correct_N, problems_N, np.zeros(8, dtype=np.int64)) is None
