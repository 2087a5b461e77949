"""The band of the ROC curve: by hand, against resamples that are drawn out row by row, and against known curves."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.evaluation.intervals import FEWEST, PERCENTS, band, draws, percentile

# Two problems of ten correct solutions and ten flaws each: of one all scores are equal, the other's flaws are lowest.
AT = np.repeat(np.array([0, 1]), 10)
RIGHT, WRONG = np.repeat([1.0, 2.0], 10), np.repeat([1.0, 0.0], 10)
FIRST, SECOND, BOTH = [2.0, 0.0], [0.0, 2.0], [1.0, 1.0]


def sampled(seed: int, problems: int = 6, levels: int = 9):
    """Tied scores, and problems without solutions of either kind."""
    generator = np.random.default_rng(seed)
    right, wrong = generator.integers(0, 40, size=2)
    scores_N = generator.integers(0, levels, size=right) + 1.0
    scores_M = generator.integers(0, levels, size=wrong) * 1.0
    return scores_N, generator.integers(0, problems, right), scores_M, generator.integers(0, problems, wrong)


def slow_cut(right, wrong, percent: int) -> float:
    """The true-positive rate at a false-positive rate, by counting at every threshold."""
    left = (0, 0)
    for level in sorted({*right, *wrong}, reverse=True):
        corner = (sum(score >= level for score in wrong), sum(score >= level for score in right))
        if 100 * corner[0] > percent * len(wrong):
            share = (percent * len(wrong) - 100 * left[0]) / (100 * (corner[0] - left[0]))
            return (left[1] + share * (corner[1] - left[1])) / len(right)
        left = corner
    return 1.0


def test_the_band_by_hand() -> None:
    found = dict(band(RIGHT, AT, WRONG, AT, np.array([FIRST, SECOND, BOTH]), 0.5))
    assert tuple(found) == tuple(percent / 100 for percent in range(101))

    # The first problem alone is a diagonal, the second is told apart; both: half at once, and a tie up to one half.
    at = found[0.3]  # 0.3, 1 and 0.5 + 0.3, whose quartiles are 0.55 and 0.9
    assert (at.value, at.low, at.high) == pytest.approx((0.8, 0.55, 0.9))
    assert (at.n, at.problems) == (40, 2)
    at = found[0.5]  # 0.5, 1 and 1: the lower quartile is 5 of 20 solutions away from all of them
    assert (at.value, at.low, at.high) == pytest.approx((1.0, 0.75, 1.0))
    at = found[0.52]  # and here less than 5
    assert (at.value, at.low, at.high) == (pytest.approx(1.0), None, None)
    assert found[0.25].low == pytest.approx(0.5)  # above the cut are 5 of 20 flaws
    assert found[0.24].low is None
    assert (found[0.0].value, found[0.0].low) == (0.5, None)
    assert (found[1.0].value, found[1.0].low) == (1.0, None)


def test_an_interval_too_near_to_accepting_none_is_none() -> None:
    """Turned round: the other problem's flaws are above all. The upper quartile is half of the diagonal's rate."""
    found = dict(
        band(np.repeat([1.0, 0.0], 10), AT, np.repeat([1.0, 2.0], 10), AT, np.array([FIRST, SECOND, BOTH]), 0.5)
    )
    assert (found[0.5].low, found[0.5].high) == pytest.approx((0.0, 0.25))  # 5 of 20 solutions
    assert (found[0.48].value, found[0.48].high) == (0.0, None)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_resample_is_one_of_repeated_solutions(seed: int) -> None:
    scores_N, at_N, scores_M, at_M = sampled(seed)
    weights_BP = draws(6, 30, seed)
    found = band(scores_N, at_N, scores_M, at_M, weights_BP, 0.9)
    if not len(scores_N) or not len(scores_M):
        assert found == []
        return
    resamples = []
    for weights_P in weights_BP.astype(int):
        right, wrong = np.repeat(scores_N, weights_P[at_N]), np.repeat(scores_M, weights_P[at_M])
        resamples.append((list(right), list(wrong)))
    for percent in (0, 1, 7, 25, 50, 58, 93, 100):
        at = found[percent][1]
        assert at.value == pytest.approx(slow_cut(scores_N, scores_M, percent), abs=1e-12)
        cuts = [slow_cut(*pair, percent) if all(pair) else np.nan for pair in resamples]
        slow = percentile(at.value, np.array(cuts), at.n, at.problems, 0.9)
        if at.low is not None:
            assert (at.low, at.high) == pytest.approx((slow.low, slow.high), abs=1e-12)
        elif slow.low is not None:
            flaws = percent * len(scores_M) / 100
            reach = len(scores_N) * min(slow.high, 1 - slow.low)
            assert min(flaws, len(scores_M) - flaws, reach) < FEWEST


def test_a_cut_on_a_corner_is_on_it_whatever_the_rounding() -> None:
    """29 of 100 flaws are a false-positive rate of 0.29, though 0.29 * 100 is below 29 in binary."""
    wrong = np.concatenate([np.full(29, 3.0), np.full(71, 1.0)])
    alone = np.zeros(100, dtype=np.int64)
    found = band(np.full(100, 2.0), alone, wrong, alone, np.ones((3, 1)), 0.95)
    assert [at.value for _, at in found] == [0.0] * 29 + [1.0] * 72


def test_resamples_without_one_of_the_sides_are_left_out() -> None:
    """The third problem has flaws alone, the fourth correct solutions alone."""
    at_N, at_M = np.append(AT, 3), np.append(AT, 2)
    right, wrong = np.append(RIGHT, 0.0), np.append(WRONG, 0.0)
    curves = [[*FIRST, 0.0, 0.0], [*SECOND, 0.0, 0.0], [*BOTH, 0.0, 0.0]] * 10
    known = band(right, at_N, wrong, at_M, np.array(curves), 0.5)
    assert any(at.low is not None for _, at in known)
    none = [[0.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0]]
    assert band(right, at_N, wrong, at_M, np.array(curves + none), 0.5) == known
    many = band(right, at_N, wrong, at_M, np.array(curves + none * 2), 0.5)  # over a tenth
    assert all(at.low is None for _, at in many)
    assert [at.value for _, at in many] == [at.value for _, at in known]


TRIALS = 60


def bands(scores):
    """Of 128 problems, with some 8 solutions each that share what is hard about them, many times at 95 %."""
    generator = np.random.default_rng(0)
    for trial in range(TRIALS):
        at_N, at_M = generator.integers(0, 128, 128 * 6), generator.integers(0, 128, 128 * 5)
        scores_N, scores_M = scores(generator, generator.normal(size=128), at_N, at_M)
        yield [at for _, at in band(scores_N, at_N, scores_M, at_M, draws(128, 300, trial), 0.95)]


def test_intervals_hold_the_true_rate_as_often_as_they_say_and_the_whole_curve_less_often() -> None:
    def scores(generator, hard_P, at_N, at_M):
        return 1.0 + hard_P[at_N] + generator.normal(size=len(at_N)), hard_P[at_M] + generator.normal(size=len(at_M))

    normal = NormalDist(sigma=2**0.5)
    true_K = [0.0, *(1 - normal.cdf(normal.inv_cdf(1 - percent / 100) - 1.0) for percent in PERCENTS[1:-1]), 1.0]
    held, whole = [], 0
    for found in bands(scores):
        assert found[0].low is None  # it would be above the true rate nearly always
        assert all(at.low is not None for at in found[1:90])
        holds = [at.low <= true <= at.high for at, true in zip(found, true_K, strict=True) if at.low is not None]
        held += holds
        whole += all(holds)
    assert 0.92 < np.mean(held) < 0.98
    assert whole < 0.85 * TRIALS
