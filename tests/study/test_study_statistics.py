"""Hand-computed numbers, independent formulas, and what must hold for any values."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvg.study.measures import MeasuredValue
from pvg.study.results import (
    compare,
    interval,
    kendall_tau,
    least_p,
    seeds_needed,
    shortfall,
    signed_ranks,
    summarise,
    trend,
)
from pvg.verifier.intervals import holm, sign_flip_p

SHARES = st.floats(-1, 1).map(lambda x: round(x, 3))


def values(*numbers: float) -> list[MeasuredValue]:
    return [MeasuredValue(number) for number in numbers]


def over(limit: float) -> MeasuredValue:
    return MeasuredValue(limit, censored=True)


def by_seed(*found: MeasuredValue) -> dict[int, MeasuredValue]:
    return dict(enumerate(found))


# --- one arm ---------------------------------------------------------------------------------------------------------


def test_the_interval_is_students() -> None:
    # 1..5: mean 3, sd sqrt(2.5), t(0.975, 4) = 2.776445: 3 ± 1.963243
    found = summarise(values(1, 2, 3, 4, 5))
    assert (found.n, found.mean, found.median, found.minimum, found.maximum) == (5, 3, 3, 1, 5)
    assert found.sd == pytest.approx(math.sqrt(2.5))
    assert (found.low, found.high) == (pytest.approx(1.036757, abs=1e-6), pytest.approx(4.963243, abs=1e-6))


def test_two_seeds_have_a_range_and_no_interval_and_one_has_no_spread() -> None:
    two = summarise(values(0.4, 0.6))
    assert (two.mean, two.low, two.high, two.minimum, two.maximum) == (0.5, None, None, 0.4, 0.6)
    one = summarise(values(0.4))
    assert (one.n, one.mean, one.sd, one.low) == (1, 0.4, None, None)
    assert summarise([]).n == 0
    assert interval([1.0, 1.0, 1.0]) == (1.0, 1.0)


def test_censored_values_have_a_median_where_it_is_known_and_never_a_mean() -> None:
    found = summarise([MeasuredValue(10), over(200), MeasuredValue(40), MeasuredValue(30), over(200)])
    assert found.censored == pytest.approx(0.4)
    assert (found.mean, found.sd, found.low, found.median, found.minimum, found.maximum) == (None,) * 3 + (40, 10, None)
    assert summarise([MeasuredValue(10), over(200), over(200)]).median is None
    assert (
        summarise([MeasuredValue(10), MeasuredValue(20), over(200), over(200)]).median is None
    )  # one of the two in the middle
    assert summarise([MeasuredValue(10), MeasuredValue(20), MeasuredValue(30), over(200)]).median == 25
    everything = summarise([over(5), over(5)])
    assert (everything.minimum, everything.median, everything.censored) == (None, None, 1.0)


# --- two arms --------------------------------------------------------------------------------------------------------


def test_five_pairs_that_all_point_one_way_have_the_least_p_there_is() -> None:
    found = compare(by_seed(*values(1, 2, 3, 4, 5)), by_seed(*values(2, 4, 6, 8, 10)))
    assert (found.n, found.difference, found.up, found.down, found.equal) == (5, 3, 5, 0, 0)
    assert found.p == least_p(5) == 2 / 32
    assert found.test == "differences"
    assert (found.low, found.high) == interval([1, 2, 3, 4, 5])


def test_only_seeds_of_both_sides_are_compared() -> None:
    found = compare(
        {0: MeasuredValue(1), 1: MeasuredValue(2), 2: MeasuredValue(3)},
        {1: MeasuredValue(3), 2: MeasuredValue(5), 7: MeasuredValue(100)},
    )
    assert (found.n, found.difference) == (2, 1.5)
    nothing = compare({0: MeasuredValue(1)}, {1: MeasuredValue(1)})
    assert (nothing.n, nothing.p, nothing.difference) == (0, None, None)


def test_differences_of_rounding_are_none() -> None:
    found = compare(by_seed(*values(0.1 + 0.2, 0.5)), by_seed(*values(0.3, 0.5)))
    assert (found.equal, found.p) == (2, 1.0)


def test_the_p_value_counts_by_hand() -> None:
    # |sums| of ±1 ±2 ±3: 6 4 2 0 0 2 4 6; of 1 + 2 - 3 = 0: all 8; of 1 - 2 + 3 = 2: 6 of 8
    assert sign_flip_p([1, 2, -3]) == 1.0
    assert sign_flip_p([1, -2, 3]) == 6 / 8
    assert sign_flip_p([1, 2, 3]) == 2 / 8
    assert sign_flip_p([]) == sign_flip_p([0, 0]) == 1.0


@given(st.lists(SHARES, min_size=1, max_size=8))
def test_the_p_value_is_that_of_writing_out_all_signs(differences: list[float]) -> None:
    observed = abs(math.fsum(differences))
    sums = [
        abs(math.fsum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    assert sign_flip_p(differences) == pytest.approx(sum(found >= observed - 1e-9 for found in sums) / len(sums))
    assert sign_flip_p(differences) >= least_p(len(differences))
    assert sign_flip_p([-d for d in differences]) == sign_flip_p(differences)


def test_beyond_twenty_pairs_random_exchanges_agree_with_the_normal_distribution() -> None:
    differences = [1.0] * 18 + [-1.0] * 7  # of 25 fair coins: P(at most 7 or at least 18) = 0.0433
    assert sign_flip_p(differences) == pytest.approx(0.0433, abs=0.004)
    assert sign_flip_p(differences) == sign_flip_p(differences)


def test_censored_values_are_compared_by_rank_with_ties_at_the_limit() -> None:
    # Differences up to the limit of 100: 90, 0 (both not found), 60, -10: ranks 3, -, 2, -1
    reference = by_seed(MeasuredValue(10), over(100), MeasuredValue(40), MeasuredValue(30))
    arm = by_seed(over(100), over(100), over(100), MeasuredValue(20))
    found = compare(reference, arm)
    assert (found.test, found.difference, found.up, found.down, found.equal) == ("signed ranks", None, 2, 1, 1)
    assert found.p == sign_flip_p([3, 2, -1]) == 4 / 8


def test_signed_ranks_share_ranks_between_equals() -> None:
    assert signed_ranks([5, -5, 0, 1]) == [2.5, -2.5, 1]


def test_holm_by_hand() -> None:
    # sorted: 0.01 x 4, 0.02 x 3, 0.03 x 2, 0.2 x 1, none below the one before it
    assert holm([0.03, 0.01, 0.2, 0.02]) == pytest.approx([0.06, 0.04, 0.2, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([None, 0.02, 0.03]) == [None, 0.04, 0.04]


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_is_between_the_p_value_and_bonferroni_and_keeps_the_order(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    for p, found in zip(p_values, adjusted, strict=True):
        assert p <= found <= min(1.0, p * len(p_values)) + 1e-12
    for (p, a), (q, b) in product(zip(p_values, adjusted, strict=True), repeat=2):
        assert p > q or a <= b


# --- rounds ----------------------------------------------------------------------------------------------------------


def test_kendalls_tau_by_hand() -> None:
    assert kendall_tau([1, 2, 3]) == 1.0
    assert kendall_tau([3, 2, 1]) == -1.0
    assert kendall_tau([1, 3, 2]) == pytest.approx(1 / 3)
    assert kendall_tau([1, 1, 2]) == pytest.approx(2 / math.sqrt(2 * 3))  # tau-b: one tie
    assert kendall_tau([1, 1]) == 0.0


def test_a_trend_counts_seeds() -> None:
    found = trend([values(0.5, 0.6, 0.7), values(0.5, 0.7, 0.6), values(0.5, 0.5, 0.5), values(0.5)])
    assert (found.n, found.up, found.down, found.equal) == (3, 2, 0, 1)
    assert found.tau == pytest.approx((1 + 1 / 3 + 0) / 3)
    assert found.difference == pytest.approx(0.1)
    assert found.p == sign_flip_p([1, 1 / 3]) == 0.5
    assert trend([values(1)]).p is None


def test_steps_to_exploit_that_end_in_not_found_rise() -> None:
    rising, never_found = [MeasuredValue(20), MeasuredValue(60), over(100)], [over(100)] * 3
    found = trend([rising, never_found, rising[::-1]])
    assert (found.up, found.down, found.equal, found.difference) == (1, 1, 1, None)
    assert found.tau == pytest.approx((1 + 0 - 1) / 3)


def test_too_few_seeds_are_named_with_the_number_that_is_enough() -> None:
    assert shortfall(5, 1, "difference") == (
        "5 seeds cannot show a significant difference: the smallest possible p value is 0.0625. "
        "At least 6 seeds are necessary for p <= 0.05."
    )
    assert shortfall(7, 4, "trend") == (  # 2 / 128, times 4
        "7 seeds cannot show a significant trend: the smallest possible p value is 0.0156, and 0.0625 with Holm's "
        "correction over 4 arms. At least 8 seeds are necessary for p <= 0.05."
    )
    assert shortfall(1, 3, "difference").startswith("1 seed cannot")
    assert "p value is 1, and 1 with" in shortfall(1, 3, "difference")
    assert shortfall(6, 1, "difference") == shortfall(0, 1, "difference") == shortfall(5, 0, "difference") == ""


@given(st.integers(1, 200))
def test_the_number_that_is_named_is_the_smallest_that_is_enough(tests: int) -> None:
    assert shortfall(seeds_needed(tests), tests, "difference") == ""
    assert shortfall(seeds_needed(tests) - 1, tests, "difference") != ""
