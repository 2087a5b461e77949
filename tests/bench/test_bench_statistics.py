"""The interval holds its rate, and the rank test gives the published and the counted p values."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pvg.bench.compare import (
    RatioInterval,
    _resampled,
    least_p_value,
    median,
    rank_test,
    ratio_of_medians,
    ratio_of_pairs,
)

pytestmark = pytest.mark.slow

Draw = Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float64]]

# What timings look like: around a value, with a tail of slow ones, with stray ones, and in two clusters (a cache that
# was cold, a clock that changed). The larger cluster has 60 %, so that the median lies in one of them.
SHAPES: dict[str, Draw] = {
    "normal": lambda random, shape: 1 + 0.02 * random.standard_normal(shape),
    "tail": lambda random, shape: 1 + 0.02 * random.exponential(size=shape),
    "stray": lambda random, shape: 1 + 0.02 * random.standard_normal(shape) + 0.3 * (random.random(shape) < 0.1),
    "clusters": lambda random, shape: 1 + 0.003 * random.standard_normal(shape) + 0.05 * (random.random(shape) < 0.4),
}
values = st.lists(st.floats(0.01, 1000), min_size=2, max_size=12)


# --- the interval ----------------------------------------------------------------------------------------------------


def misses(shape: str, n: int, m: int, confidence: float, trials: int) -> float:
    """How often the interval of two samples of one distribution leaves out 1."""
    random = np.random.default_rng(7)
    a, b = SHAPES[shape](random, (trials, n)), SHAPES[shape](random, (trials, m))
    found = [
        ratio_of_medians(list(one), list(other), seed=seed, resamples=1000, confidence=confidence)
        for seed, (one, other) in enumerate(zip(a, b, strict=True))
    ]
    return sum(interval.low > 1 or interval.high < 1 for interval in found) / trials


@pytest.mark.parametrize(
    ("shape", "n", "m"), [("normal", 4, 4), ("stray", 6, 6), ("tail", 5, 20), ("clusters", 10, 10)]
)
def test_the_interval_misses_at_most_at_its_nominal_rate(shape: str, n: int, m: int) -> None:
    assert misses(shape, n, m, 0.95, trials=400) <= 0.05


@pytest.mark.parametrize(("shape", "n"), [("clusters", 10)])
def test_so_it_does_far_out_where_many_metrics_need_it(shape: str, n: int) -> None:
    assert misses(shape, n, n, 0.995, trials=1200) <= 0.005


@pytest.mark.parametrize(("shape", "n"), [("tail", 5), ("clusters", 10)])
def test_the_interval_of_pairs_misses_at_most_at_its_nominal_rate(shape: str, n: int) -> None:
    random, trials = np.random.default_rng(7), 400
    a, b = SHAPES[shape](random, (trials, n)), SHAPES[shape](random, (trials, n))
    found = [ratio_of_pairs(list(x), list(y), resamples=1000) for x, y in zip(a, b, strict=True)]
    assert sum(interval.low > 1 or interval.high < 1 for interval in found) / trials <= 0.065


def test_what_slows_a_whole_round_cancels_in_pairs() -> None:
    random = np.random.default_rng(0)
    speed = np.exp(np.cumsum(0.1 * random.standard_normal(10)))
    a, b = (list(middle * speed * np.exp(0.005 * random.standard_normal(10))) for middle in (1.0, 1.05))
    pairs, medians = ratio_of_pairs(a, b), ratio_of_medians(a, b)
    assert 1 < pairs.low < 1.05 < pairs.high < 1.1
    assert medians.low < 1 < medians.high
    assert ratio_of_pairs([1.0, 2.0], [2.0, 4.0]) == RatioInterval(2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="shorter"):
        ratio_of_pairs([1.0, 2.0], [1.0])


@given(values, values, st.floats(0.01, 100))
@settings(max_examples=40, deadline=None)
def test_the_ratio_lies_in_its_interval_and_no_unit_matters(a: list[float], b: list[float], factor: float) -> None:
    found = ratio_of_medians(a, b, resamples=300)
    assert found.ratio == median(b) / median(a)
    assert found.low <= found.ratio <= found.high
    scaled = ratio_of_medians([factor * value for value in a], [factor * value for value in b], resamples=300)
    assert scaled.low == pytest.approx(found.low, rel=1e-6)
    assert scaled.high == pytest.approx(found.high, rel=1e-6)


def test_no_spread_and_no_knowledge() -> None:
    exact = ratio_of_medians([8.0] * 5, [6.0] * 5)
    assert (exact.ratio, exact.low, exact.high) == (0.75, 0.75, 0.75)
    unknown = ratio_of_medians([8.0], [6.0, 6.1, 6.2])
    assert (unknown.low, unknown.high) == (0.0, math.inf)
    assert ratio_of_medians([1.0, 100.0], [1.0, 1e9], confidence=0.9999).high == math.inf


@pytest.mark.parametrize("wrong", [[], [1.0, 0.0], [1.0, math.nan]])
def test_values_without_a_ratio_are_refused(wrong: list[float]) -> None:
    for pair in ((wrong, [1.0, 2.0]), ([1.0, 2.0], wrong)):
        with pytest.raises(ValueError, match="ratio of medians"):
            ratio_of_medians(*pair)


@pytest.mark.parametrize("n", [2, 5, 12])
def test_the_medians_of_resamples_are_those_of_drawing_with_replacement(n: int) -> None:
    random = np.random.default_rng(0)
    samples = np.sort(random.random(n))
    ours = _resampled(samples, 40_000, random)
    naive = np.median(samples[random.integers(0, n, (40_000, n))], axis=1)
    for value in np.unique(naive.round(12)):
        assert np.mean(ours.round(12) <= value) == pytest.approx(np.mean(naive.round(12) <= value), abs=0.012)


# --- the rank test ---------------------------------------------------------------------------------------------------


def samples_with_u(u: int, n: int) -> tuple[list[float], list[float]]:
    """n against n different values in which exactly u of the n*n pairs are out of order."""
    below = [float(place) for place in range(n)]
    above = [n + float(place) for place in range(n)]
    for place in range(n):
        moves = min(n, u - n * place)
        if moves > 0:  # lower the place-th value of `above` under the `moves` highest ones of `below`
            above[place] = n - moves - 0.5 + place / (10 * n)
    return below, above


@pytest.mark.parametrize(  # the largest U significant at 5 %, two-sided (Mann and Whitney's table, as in textbooks)
    ("n", "critical"), [(4, 0), (7, 8), (20, 127)]
)
def test_critical_values_of_the_published_table(n: int, critical: int) -> None:
    assert rank_test(*samples_with_u(critical, n)) <= 0.05
    assert rank_test(*samples_with_u(critical + 1, n)) > 0.05


def test_the_least_p_value_is_that_of_complete_separation() -> None:
    assert least_p_value(5, 5) == 2 / 252
    assert least_p_value(3, 3) == pytest.approx(0.1)
    for n, m in ((1, 1), (3, 3), (5, 5), (4, 10)):
        assert rank_test(range(n), range(n, n + m)) == pytest.approx(least_p_value(n, m))
    assert rank_test([1.0, 1.0, 1.0], [2.0, 2.0, 2.0]) == least_p_value(3, 3)  # ties on one side change nothing
    assert rank_test([1.0] * 5, [1.0] * 5) == 1.0
    assert rank_test([1.0] * 30 + [2.0] * 10, [1.0] * 20 + [2.0] * 20) == pytest.approx(0.0221, abs=1e-4)
