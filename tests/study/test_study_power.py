"""What a number of seeds can show: closed forms, published numbers, and simulations with the real test."""

from __future__ import annotations

import random
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvg.study.measures import MeasuredValue
from pvg.study.power import _critical_shifts, detectable, shortfall
from pvg.study.statistics import compare, holm, seeds_needed, sign_flip_p


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


@pytest.mark.parametrize(("pairs", "tests"), [(6, 1), (8, 6), (11, 50)])
def test_where_all_seeds_must_point_one_way_the_power_has_a_closed_form(pairs: int, tests: int) -> None:
    """Only the choice of all signs alike is rare enough, so the power is P(a difference is above 0) ** pairs."""
    assert tests * 2 / 2**pairs <= 0.05 < tests * 4 / 2**pairs
    by_hand = NormalDist().inv_cdf(0.8 ** (1 / pairs))
    assert detectable(1.0, pairs, tests) == pytest.approx(by_hand, rel=0.03)


def test_a_study_is_significant_from_its_critical_shift_on() -> None:
    noise = [0.3, -0.7, 1.1, 0.2, -0.1, 0.5]
    assert _critical_shifts(np.array([noise]), 0.05).tolist() == pytest.approx([0.7])  # the least difference becomes 0
    draw = np.random.default_rng(3).standard_normal((40, 9))
    for differences, shift in zip(draw, _critical_shifts(draw, 0.05 / 3), strict=True):
        assert sign_flip_p((differences + shift + 1e-6).tolist()) <= 0.05 / 3
        assert sign_flip_p((differences + shift - 1e-6).tolist()) > 0.05 / 3


@pytest.mark.parametrize(("pairs", "tests"), [(7, 1), (10, 3), (14, 2)])
def test_four_of_five_simulated_studies_find_the_detectable_difference(pairs: int, tests: int) -> None:
    draw, studies = random.Random(11), 400
    effect = detectable(2.0, pairs, tests)
    assert effect is not None
    found = sum(sign_flip_p([draw.gauss(effect, 2.0) for _ in range(pairs)]) <= 0.05 / tests for _ in range(studies))
    assert found / studies == pytest.approx(0.8, abs=0.06)  # three standard errors of 400 studies


def test_many_pairs_agree_with_published_sample_sizes_of_the_paired_t_test() -> None:
    """A paired t test with a power of 0.8 needs 34 pairs for an effect of 0.5 spreads, and 20 pairs for 0.66."""
    assert detectable(1.0, 34, 1) == pytest.approx(0.5, abs=0.01)
    assert detectable(1.0, 20, 1) == pytest.approx(0.66, abs=0.01)


@pytest.mark.parametrize("tests", [1, 3, 8])
def test_the_simulation_continues_as_students_t(tests: int) -> None:
    twelve, thirteen = detectable(1.0, 12, tests), detectable(1.0, 13, tests)
    assert twelve is not None
    assert thirteen is not None
    assert 0.90 < thirteen / twelve < 1.0


@pytest.mark.parametrize(("tests", "least", "most"), [(1, 0.965, 1.035), (8, 0.965, 1.035), (40, 0.90, 0.94)])
def test_students_t_is_close_for_a_few_tests_and_gives_too_little_for_many(
    tests: int, least: float, most: float
) -> None:
    noise = np.random.default_rng(1).standard_normal((2_000, 13))
    shifts = [_critical_shifts(part, 0.05 / tests) for part in np.split(noise, 10)]
    assert least < (detectable(1.0, 13, tests) or 0.0) / np.quantile(np.concatenate(shifts), 0.8) < most


def test_nothing_is_detectable_without_enough_seeds_or_a_spread() -> None:
    assert detectable(1.0, 5, 1) is None
    assert detectable(1.0, 6, 2) is None
    assert detectable(None, 8, 1) is None
    assert detectable(0.0, 8, 1) is None
    assert detectable(None, 0, 0) is None
    assert detectable(0.5, 8, 1) == pytest.approx(0.5 * (detectable(1.0, 8, 1) or 0.0))


# --- without any effect ----------------------------------------------------------------------------------------------


def made_values(draw: random.Random, seeds: list[float]) -> dict[int, MeasuredValue]:
    """An arm without an effect: only the seed's share, and noise."""
    return {seed: MeasuredValue(share + draw.gauss(0, 1)) for seed, share in enumerate(seeds)}


def test_without_an_effect_one_comparison_is_significant_as_rarely_as_promised() -> None:
    """With six seeds only 2 of 64 choices have a p of at most 0.05, so the error rate is 1 / 32."""
    draw, studies = random.Random(5), 1500
    found = 0
    for _ in range(studies):
        seeds = [draw.gauss(0, 3) for _ in range(6)]
        p = compare(made_values(draw, seeds), made_values(draw, seeds)).p
        found += p is not None and p <= 0.05
    assert found / studies == pytest.approx(1 / 32, abs=0.0135)  # three standard errors


def test_without_an_effect_holms_correction_keeps_the_error_rate_over_arms_that_share_a_reference() -> None:
    draw, studies = random.Random(7), 800
    corrected = uncorrected = 0
    for _ in range(studies):
        seeds = [draw.gauss(0, 3) for _ in range(9)]
        reference = made_values(draw, seeds)
        p_values = [compare(reference, made_values(draw, seeds)).p for _ in range(4)]
        known = [p for p in p_values if p is not None]
        uncorrected += min(known) <= 0.05
        corrected += min(holm(known)) <= 0.05
    assert corrected / studies <= 0.05 + 3 * (0.05 * 0.95 / studies) ** 0.5
    assert uncorrected / studies > 0.10  # what the correction is for
