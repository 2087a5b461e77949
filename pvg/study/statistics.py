"""Statistics for few seeds: intervals of a mean, comparisons paired by seed, trends over rounds. Pure functions.

    summarise([MeasuredValue(0.71), MeasuredValue(0.74), MeasuredValue(0.69)])     # mean, sd, 95 % interval, range
    compare(reference, arm)                                # values by seed: difference, signs, exact p
    holm([0.0625, 0.5, 0.125])                             # p values of one family, adjusted
    trend([[...], [...]])                                  # the rounds of each seed: how many rise, Kendall's tau

- The interval of a mean is Student's and needs three values; two values have a range but no useful interval.
- The p value of a comparison is exact (Fisher's randomisation test): the share of all 2^n ways to exchange the two arms
  within seeds in which the mean difference is at least as far from 0. With n pairs it is at least 2 / 2^n.
- Censored values ("not found within N") rank above all numbers. They have shares, medians and ranks, but no means. They
  are compared by signed ranks (Wilcoxon), with everything from N on tied at N; the p value is exact in the same way.
- The smallest of several p values is small by chance. Holm's adjustment keeps the error rate for the whole family: the
  arms of one measure, or all comparisons of a study.
- A trend is Kendall's tau-b of a seed's rounds. Its p value compares the taus with 0, with seeds as units, because the
  rounds of one run are not independent but seeds are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from pvg.errors import counted
from pvg.study.measures import MeasuredValue, cap_of, capped, numbers

CONFIDENCE = 0.95
LEVEL = 0.05
LEAST_FOR_INTERVAL = 3  # values: for two, Student's factor is 12.7, and the interval says nothing
EXACT_UP_TO = 20  # pairs: 2^20 sums fit in memory; above it, random exchanges are used
RANDOM_EXCHANGES = 100_000
ALIKE = 1e-9  # relative: sums this close are equal, but added in another order


@dataclass(frozen=True, slots=True)
class SeedSummary:
    """Values of one measure over seeds. `sd`: of the sample. `low` and `high`: the mean's 95 % interval.

    `censored`: the share of censored values. With any of them there is no mean, and `median`, `maximum` or `minimum` is
    None if it is a censored value.
    """

    n: int
    mean: float | None
    sd: float | None
    low: float | None
    high: float | None
    median: float | None
    minimum: float | None
    maximum: float | None
    censored: float


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """An arm compared with the reference, paired by seed: differences are arm - reference.

    `n` pairs, of which `up` are higher in the arm, `down` lower, and `equal` equal. `difference`: the mean difference
    with its 95 % interval; None with censored values, where `test` is "signed ranks". `p` is exact up to 20 pairs;
    `least_p` is the smallest possible with n pairs. `p_adjusted_arms`: Holm's, over the arms of the measure.
    `p_adjusted`: Holm's, over all comparisons of the study. `spread`: the standard deviation of the differences.
    """

    n: int
    difference: float | None
    low: float | None
    high: float | None
    up: int
    down: int
    equal: int
    test: Literal["differences", "signed ranks"]
    p: float | None
    least_p: float | None
    p_adjusted: float | None = None
    p_adjusted_arms: float | None = None
    spread: float | None = None


@dataclass(frozen=True, slots=True)
class Trend:
    """How a measure changes over the rounds. Of `n` seeds with two rounds or more, `up` end above their first round,
    `down` below it, `flat` equal. `change`: the mean of last - first (None with censored values) with its interval.
    `tau`: the mean of Kendall's tau-b. `p`: the exact p value against no trend. `p_adjusted_arms`: Holm's, over the
    arms of the measure."""

    n: int
    up: int
    down: int
    flat: int
    change: float | None
    low: float | None
    high: float | None
    tau: float | None
    p: float | None
    least_p: float | None
    p_adjusted_arms: float | None = None


# --- one arm -----------------------------------------------------------------------------------------------------


def summarise(values: Sequence[MeasuredValue]) -> SeedSummary:
    """The summary of the values; without values only n = 0 is set."""
    n = len(values)
    if not n:
        return SeedSummary(0, None, None, None, None, None, None, None, 0.0)
    known = sorted(value.number for value in values if not value.censored)
    censored = (n - len(known)) / n
    minimum = known[0] if known else None
    if censored:
        return SeedSummary(n, None, None, None, None, _median(known, n), minimum, None, censored)
    mean = statistics.fmean(known)
    low, high = interval(known)
    sd = statistics.stdev(known) if n > 1 else None
    return SeedSummary(n, mean, sd, low, high, statistics.median(known), minimum, known[-1], 0.0)


def _median(known: Sequence[float], n: int) -> float | None:
    """The median of n values of which only the smallest, the sorted `known`, are numbers. None if it is censored."""
    upper = n // 2
    if upper >= len(known):
        return None
    return known[upper] if n % 2 else (known[upper - 1] + known[upper]) / 2


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Student's 95 % interval of the mean; (None, None) for fewer than three values."""
    n = len(values)
    if n < LEAST_FOR_INTERVAL:
        return None, None
    mean = statistics.fmean(values)
    reach = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * statistics.stdev(values) / math.sqrt(n)
    return mean - reach, mean + reach


# --- two arms ----------------------------------------------------------------------------------------------------


def compare(reference: Mapping[int, MeasuredValue], arm: Mapping[int, MeasuredValue]) -> PairedComparison:
    """Compare values by seed; seeds on only one side are left out."""
    seeds = sorted(reference.keys() & arm.keys())
    before, after = [reference[seed] for seed in seeds], [arm[seed] for seed in seeds]
    cap = cap_of([*before, *after])
    differences = [b - a for a, b in zip(capped(before, cap), capped(after, cap), strict=True)]
    differences = [0.0 if _alike(d, before + after) else d for d in differences]
    up, down = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    n = len(seeds)
    counts = {"n": n, "up": up, "down": down, "equal": n - up - down}
    least = least_p(n) if n else None
    if cap is not None:
        p = sign_flip_p(signed_ranks(differences)) if n else None
        return PairedComparison(difference=None, low=None, high=None, test="signed ranks", p=p, least_p=least, **counts)
    low, high = interval(differences)
    mean = statistics.fmean(differences) if n else None
    p = sign_flip_p(differences) if n else None
    spread = statistics.stdev(differences) if n > 1 else None
    if spread is not None and _alike(spread, before + after):
        spread = 0.0
    return PairedComparison(
        difference=mean, low=low, high=high, test="differences", p=p, least_p=least, spread=spread, **counts
    )


def _alike(difference: float, values: Sequence[MeasuredValue]) -> bool:
    return abs(difference) <= ALIKE * max(abs(value.number) for value in values)


def signed_ranks(differences: Sequence[float]) -> list[float]:
    """The ranks of the absolute differences (ties have their mean rank) with the differences' signs; zeros are left
    out."""
    moved = [d for d in differences if d]
    sizes = sorted(abs(d) for d in moved)
    ranks = {size: sizes.index(size) + (sizes.count(size) + 1) / 2 for size in sizes}
    return [math.copysign(ranks[abs(d)], d) for d in moved]


def sign_flip_p(differences: Sequence[float]) -> float:
    """The two-sided p value: the share of the 2^n choices of signs whose sum is at least as far from 0.

    1 if all are 0 or there are none. Above EXACT_UP_TO differences it uses random exchanges with a fixed seed.
    """
    moved = np.array([d for d in differences if d], dtype=np.float64)
    if not moved.size:
        return 1.0
    observed, scale = abs(float(moved.sum())), float(np.abs(moved).sum())
    if moved.size <= EXACT_UP_TO:
        return float((np.abs(_all_sums(moved)) >= observed - ALIKE * scale).mean())
    signs = np.random.default_rng(0).choice(np.array([-1.0, 1.0]), (RANDOM_EXCHANGES, moved.size))
    as_far = int((np.abs(signs @ moved) >= observed - ALIKE * scale).sum())
    return (as_far + 1) / (RANDOM_EXCHANGES + 1)


def _all_sums(values_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sums [2^N] for all choices of signs."""
    sums: NDArray[np.float64] = np.zeros(1)
    for value in values_N:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def least_p(n: int) -> float:
    """The smallest two-sided p value of n pairs: 2 of the 2^n choices are extreme. Raises ValueError for n < 1."""
    if n < 1:
        raise ValueError("a p value needs at least one pair")
    return math.ldexp(1.0, 1 - n)


def seeds_needed(comparisons: int) -> int:
    """The smallest number of seeds with which one of that many comparisons can reach LEVEL after Holm's adjustment."""
    return math.ceil(math.log2(2 * max(1, comparisons) / LEVEL))


def shortfall(seeds: int, tests: int, effect: str) -> str:
    """Why `seeds` seeds can show no significant `effect` ("difference between arms") in a family of `tests` tests, and
    how many seeds can. Empty if these seeds can."""
    if seeds < 1 or tests < 1 or tests * least_p(seeds) <= LEVEL:
        return ""
    corrected = f", and {min(1.0, tests * least_p(seeds)):.3g} with Holm's correction over {tests} arms"
    return (
        f"{counted(seeds, 'seed')} cannot show a significant {effect}: the smallest possible p value is "
        f"{least_p(seeds):.3g}{corrected if tests > 1 else ''}. "
        f"At least {seeds_needed(tests)} seeds are necessary for p <= {LEVEL}."
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """The adjusted p values of one family, in the given order (Holm 1979, step-down Bonferroni)."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted = [0.0] * len(p_values)
    most = 0.0
    for place, index in enumerate(order):
        most = max(most, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = most
    return adjusted


# --- rounds ------------------------------------------------------------------------------------------------------


def trend(series: Sequence[Sequence[MeasuredValue]]) -> Trend:
    """`series[s]`: the values of one seed in the order of its rounds. Seeds with fewer than two are left out."""
    long_enough = [values for values in series if len(values) > 1]
    changes = [_change(values) for values in long_enough]
    up, down = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    n = len(long_enough)
    taus = [kendall_tau(capped(values, cap_of(values))) for values in long_enough]
    known = not any(value.censored for values in long_enough for value in values)
    moved = [numbers(values)[-1] - numbers(values)[0] for values in long_enough] if known else []
    low, high = interval(moved)
    return Trend(
        n=n,
        up=up,
        down=down,
        flat=n - up - down,
        change=statistics.fmean(moved) if moved else None,
        low=low,
        high=high,
        tau=statistics.fmean(taus) if taus else None,
        p=sign_flip_p(taus) if taus else None,
        least_p=least_p(n) if n else None,
    )


def _change(values: Sequence[MeasuredValue]) -> float:
    """Last - first, as far as known: 0 if they are not known to differ."""
    first, last = capped([values[0], values[-1]], cap_of([values[0], values[-1]]))
    return 0.0 if _alike(last - first, values) else last - first


def kendall_tau(values: Sequence[float]) -> float:
    """Kendall's tau-b of the values against their positions: 1 always rising, -1 always falling, 0 if all are equal
    (where tau is undefined). Raises ValueError for fewer than two values."""
    if len(values) < 2:
        raise ValueError("a trend needs at least two values")
    signs = [int(b > a) - int(b < a) for a, b in combinations(values, 2)]
    untied = sum(sign != 0 for sign in signs)
    return sum(signs) / math.sqrt(untied * len(signs)) if untied else 0.0
