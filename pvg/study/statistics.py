"""Few seeds, read honestly: intervals of a mean, comparisons paired by seed, trends over rounds. Pure functions.

    summarise([MeasuredValue(0.71), MeasuredValue(0.74), MeasuredValue(0.69)])     # mean, sd, 95 % interval, range
    compare(reference, arm)                                # values by seed: difference, signs, exact p
    holm([0.0625, 0.5, 0.125])                             # p values of one family, adjusted
    trend([[...], [...]])                                  # the rounds of each seed: how many rise, Kendall's tau

- The interval of a mean is Student's, from three values on; two have a range and no interval worth the name.
- The p value of a comparison is exact: the share of all 2^n ways to exchange the two arms within seeds in which the
  mean difference is at least as far from 0 (Fisher's randomisation test). With n pairs it cannot be below 2 / 2^n.
- Censored values ("not found within N") stand above all numbers. Shares, medians and ranks can be told of them; means
  cannot. Their comparison is of signed ranks (Wilcoxon), with everything from N on a tie at N, exact in the same way.
- Of several p values the smallest is small by chance: Holm's adjustment holds the rate for the whole family.
- A trend is Kendall's tau-b of a seed's rounds; its p value is that of taus against 0, seeds as the units. Rounds of
  one run are not independent of each other, seeds are.
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

from pvg.bench.statistics import student_quantile
from pvg.study.measures import MeasuredValue, cap_of, capped, numbers

CONFIDENCE = 0.95
LEVEL = 0.05
LEAST_FOR_INTERVAL = 3  # values: Student's factor for two is 12.7, an interval that says nothing
EXACT_UP_TO = 20  # pairs: 2^20 sums fit; beyond it random exchanges do
RANDOM_EXCHANGES = 100_000
ALIKE = 1e-9  # relative: two sums this near to each other are the same one, added in another order


@dataclass(frozen=True, slots=True)
class SeedSummary:
    """Values of one measure over seeds. `sd` is the sample's; `low` and `high` are the mean's 95 % interval.

    `censored` is the share of censored values; with any there is no mean, and `median` is None where it lies among
    them, as `maximum` is, and `minimum` where all are.
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
    """An arm against the reference, paired by seed: differences are arm - reference.

    `n` counts pairs, of which `up` are higher in the arm, `down` lower, `equal` neither. `difference` is the mean one,
    with its 95 % interval; None with censored values, where `test` is "signed ranks". `p` is exact up to 20 pairs, and
    `least_p` the least that n pairs can give. `p_adjusted` is Holm's, over the study's comparisons.
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


@dataclass(frozen=True, slots=True)
class Trend:
    """How a measure moves over the rounds: of `n` seeds with two rounds or more, `up` end above their first round,
    `down` below it, `flat` neither. `change` is the mean of last - first (None with censored values) with its interval,
    `tau` the mean of Kendall's tau-b, `p` its exact p value against no trend."""

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


# --- one arm -----------------------------------------------------------------------------------------------------


def summarise(values: Sequence[MeasuredValue]) -> SeedSummary:
    """Of no values: n = 0 and nothing else."""
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
    """The median of n values of which only the sorted `known` ones, the smallest, are numbers."""
    upper = n // 2
    if upper >= len(known):
        return None
    return known[upper] if n % 2 else (known[upper - 1] + known[upper]) / 2


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Student's 95 % interval of the mean; (None, None) of fewer than three values."""
    n = len(values)
    if n < LEAST_FOR_INTERVAL:
        return None, None
    mean = statistics.fmean(values)
    reach = student_quantile((1 + CONFIDENCE) / 2, n - 1) * statistics.stdev(values) / math.sqrt(n)
    return mean - reach, mean + reach


# --- two arms ----------------------------------------------------------------------------------------------------


def compare(reference: Mapping[int, MeasuredValue], arm: Mapping[int, MeasuredValue]) -> PairedComparison:
    """Values by seed; seeds that only one side has are left out."""
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
    return PairedComparison(difference=mean, low=low, high=high, test="differences", p=p, least_p=least, **counts)


def _alike(difference: float, values: Sequence[MeasuredValue]) -> bool:
    return abs(difference) <= ALIKE * max(abs(value.number) for value in values)


def signed_ranks(differences: Sequence[float]) -> list[float]:
    """The ranks of the differences' sizes (the mean rank where they are equal) with their signs; zeros are left out."""
    moved = [d for d in differences if d]
    sizes = sorted(abs(d) for d in moved)
    ranks = {size: sizes.index(size) + (sizes.count(size) + 1) / 2 for size in sizes}
    return [math.copysign(ranks[abs(d)], d) for d in moved]


def sign_flip_p(differences: Sequence[float]) -> float:
    """The share of the 2^n ways to choose the differences' signs whose sum is as far from 0: two-sided.

    1 where all are 0 and where there are none. Beyond EXACT_UP_TO differences by random exchanges, the same each time.
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
    """The sums [2^N] under all choices of signs."""
    sums: NDArray[np.float64] = np.zeros(1)
    for value in values_N:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def least_p(n: int) -> float:
    """The least two-sided p value of n pairs: 2 of the 2^n ways are as far as can be. Raises ValueError for none."""
    if n < 1:
        raise ValueError("no pairs have no p value")
    return math.ldexp(1.0, 1 - n)


def seeds_needed(comparisons: int, level: float = LEVEL) -> int:
    """The least number of seeds with which one of so many comparisons can reach `level` after Holm's adjustment."""
    return math.ceil(math.log2(2 * max(1, comparisons) / level))


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
    """`series[s]` are the values of one seed in the order of its rounds; seeds with fewer than two are left out."""
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
    """Last - first as far as it is known: two that are not known to differ are the same."""
    first, last = capped([values[0], values[-1]], cap_of([values[0], values[-1]]))
    return 0.0 if _alike(last - first, values) else last - first


def kendall_tau(values: Sequence[float]) -> float:
    """Kendall's tau-b of the values against their places: 1 always rising, -1 always falling; 0 where all are equal
    (and tau is not defined). Raises ValueError with fewer than two."""
    if len(values) < 2:
        raise ValueError("one value has no trend")
    signs = [int(b > a) - int(b < a) for a, b in combinations(values, 2)]
    untied = sum(sign != 0 for sign in signs)
    return sum(signs) / math.sqrt(untied * len(signs)) if untied else 0.0
