"""Exponents of made costs: exact power laws are found exactly, noisy ones within the interval as often as told."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pages.scaling_tables import exponent_of, upper_range
from pvg.bench.statistics import contrast_of_medians, ratio_of_medians

SIZES = [256.0, 512.0, 1024.0]


@given(st.floats(-1.0, 3.0), st.floats(1e-6, 1e6))
def test_an_exact_power_law_has_its_exponent_and_no_interval(power: float, factor: float) -> None:
    found = exponent_of(SIZES, [[factor * size**power] * 5 for size in SIZES])
    assert found.value == pytest.approx(power, abs=1e-9)
    assert (found.low, found.high) == pytest.approx((power, power), abs=1e-9)


def test_by_hand() -> None:
    """Slope of (0, 0), (1, 2), (2, 1) in base 2: the mean of x is 1, so ((-1)(0) + (1)(1)) / 2 = 1/2."""
    assert exponent_of([1, 2, 4], [[1.0], [4.0], [2.0]]).value == pytest.approx(0.5)


def test_of_two_sizes_it_is_the_log_of_the_ratio_over_that_of_the_sizes() -> None:
    a, b = [1.0, 1.1, 0.95, 1.02, 1.05], [4.1, 3.9, 4.3, 4.0, 4.2]
    ratio, found = ratio_of_medians(a, b), exponent_of([10, 40], [a, b])
    assert [found.value, found.low, found.high] == pytest.approx(
        [math.log(value) / math.log(4) for value in (ratio.ratio, ratio.low, ratio.high)], abs=0.005
    )


def test_noise_leaves_the_exponent_in_its_interval() -> None:
    random, trials, power = np.random.default_rng(3), 150, 1.3
    missed = 0
    for _ in range(trials):
        samples = [list(size**power * np.exp(0.05 * random.standard_normal(5))) for size in SIZES]
        found = exponent_of(SIZES, samples)
        missed += not found.low <= power <= found.high
        assert found.high - found.low < 0.3
    assert missed / trials < 0.08  # 5 % are allowed; the wider of two intervals misses less


def test_a_fixed_cost_below_a_linear_one_is_no_reason_for_an_exponent_above_1() -> None:
    found = exponent_of(SIZES, [[3.0 + 0.01 * size] * 5 for size in SIZES])
    assert 0.5 < found.value < 1.0


def test_the_upper_range_begins_at_the_geometric_middle() -> None:
    assert upper_range([1024, 64, 128, 256, 512]) == [256, 512, 1024]
    assert upper_range([21, 53, 117, 245, 501]) == [117, 245, 501]
    assert upper_range([10, 20]) == [20]


@pytest.mark.parametrize(
    ("sizes", "samples"), [([1.0], [[1.0]]), ([2.0, 2.0], [[1.0], [1.0]]), ([0.0, 1.0], [[1.0]] * 2)]
)
def test_what_has_no_exponent_is_refused(sizes: list[float], samples: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="exponent cannot be fitted"):
        exponent_of(sizes, samples)
    with pytest.raises(ValueError, match="above 0"):
        exponent_of([1.0, 2.0], [[0.0], [1.0]])
    with pytest.raises(ValueError, match="cannot be fitted"):
        upper_range([5.0])


def test_one_sample_at_one_size_says_nothing_of_the_noise() -> None:
    found = contrast_of_medians([[1.0, 1.1], [2.0]], [-1.0, 1.0])
    assert found.value == pytest.approx(math.log(2.0 / 1.05))
    assert (found.low, found.high) == (-math.inf, math.inf)
