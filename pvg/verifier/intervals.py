"""Intervals for statistics over several solutions of each problem.

Solutions of one problem are not independent: all of them tend to be wrong if it is hard. So the problem is the sampling
unit everywhere. Shares have Wilson's interval at the effective number of solutions; other statistics have a bootstrap
over problems.

Sources: Wilson 1927 (the interval); Korn and Graubard, Survey Methodology 24 (1998), 193-201 (the effective sample
size); Efron and Tibshirani 1993, ch. 13 (the percentile interval), with problems as clusters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Ints = NDArray[np.int64]

# Level of every confidence interval of an evaluation, and resamples of the bootstrap over problems: what papers report,
# and enough resamples for the two digits that pages show.
CONFIDENCE, RESAMPLES = 0.95, 1000
LEAST_RESAMPLES = 0.9  # the share of the bootstrap's resamples that must have a value; otherwise there is no interval


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number, its interval, and its basis: `n` solutions (or pairs, or sequences) of `problems` problems.

    None means that a number does not exist: a mean of no values, an interval from one problem, or an interval from
    equal resamples (an AUC of exactly 1 says nothing about its uncertainty). In documents it is null.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}

    value: float | None
    low: float | None
    high: float | None
    n: int
    problems: int


def wilson(share: float, n: float) -> tuple[float, float]:
    """Wilson's interval for a share of `n` independent draws; n may be fractional. Raises ValueError for n <= 0."""
    if n <= 0:
        raise ValueError("a share of nothing has no interval")
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # At 0 and at 1 one bound is the share itself; rounding must not move it.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def share_of(holds_N: NDArray[np.bool_], problems_N: Ints) -> Estimate:
    """The share of N solutions for which `holds_N` is true. `problems_N`: the number of each solution's problem.

    Wilson's interval at the effective sample size n* = p(1-p) / Var(p), where Var(p) = P/(P-1) sum_k e_k^2 / N^2 with
    e_k = (sum of holds in problem k) - p (solutions of k): the linearised variance of a ratio over clusters. n* is at
    most N. If all solutions agree, it is the number of problems P.
    """
    total = len(holds_N)
    if not total:
        return Estimate(None, None, None, 0, 0)
    count_K = np.bincount(problems_N).astype(np.float64)
    held_K = np.bincount(problems_N, weights=holds_N.astype(np.float64))
    present_K = count_K > 0
    problems = int(present_K.sum())
    share = float(held_K.sum() / total)
    if problems < 2:
        return Estimate(share, None, None, total, problems)
    errors_K = (held_K - share * count_K)[present_K]
    variance = problems / (problems - 1) * float((errors_K**2).sum()) / total**2
    effective = float(problems) if variance == 0.0 else min(float(total), share * (1 - share) / variance)
    low, high = wilson(share, effective)
    return Estimate(share, low, high, total, problems)


def draws(problems: int, resamples: int, seed: int) -> Float64:
    """float64 [B, P]: how often each of P problems is in each of B bootstrap resamples."""
    generator = np.random.Generator(np.random.PCG64(seed))
    return generator.multinomial(problems, np.full(problems, 1.0 / problems), size=resamples).astype(np.float64)


def percentile(value: float, replicates_B: Float64, n: int, problems: int) -> Estimate:
    """The percentile interval of bootstrap replicates; replicates without a value (NaN) are left out."""
    known = replicates_B[np.isfinite(replicates_B)]
    if not math.isfinite(value):
        return Estimate(None, None, None, n, problems)
    no_spread = not len(known) or float(known.max() - known.min()) <= 1e-12
    if problems < 2 or len(known) < LEAST_RESAMPLES * len(replicates_B) or no_spread:
        return Estimate(float(value), None, None, n, problems)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(known, [tail, 1 - tail])
    return Estimate(float(value), float(low), float(high), n, problems)


def ratio(numerators_P: Float64, denominators_P: Float64, weights_BP: Float64, n: int) -> Estimate:
    """sum(numerators) / sum(denominators) over problems, with the bootstrap's interval; a mean if the latter are
    counts."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(np.divide(numerators_P.sum(), denominators_P.sum()))
        replicates_B = (weights_BP @ numerators_P) / (weights_BP @ denominators_P)
    return percentile(value, replicates_B, n, int((denominators_P > 0).sum()))


def mean_of(values_N: Float64, problems_N: Ints, weights_BP: Float64) -> Estimate:
    """The mean of N values. `problems_N`: the number (0 to P-1) of each value's problem."""
    size = weights_BP.shape[1]
    sums_P = np.bincount(problems_N, weights=values_N, minlength=size)
    counts_P = np.bincount(problems_N, minlength=size).astype(np.float64)
    return ratio(sums_P.astype(np.float64), counts_P, weights_BP, len(values_N))


# How well scores separate correct solutions from flaws: ROC curves and AUCs, with intervals over problems.

MOST_POINTS = 101  # of a stored ROC curve

ROUNDING = 1e-9  # tolerance for a count that was computed from a share


@dataclass(frozen=True, slots=True)
class PairWins:
    """For pairs of problems [P, P]: how often a positive of the row's problem scores above a negative of the column's
    (a tie counts half). Also the numbers of positives and of negatives of each problem [P]."""

    wins_PP: Float64
    positives_P: Float64
    negatives_P: Float64


def wins(
    positive_N: NDArray[Any], problems_N: Ints, negative_M: NDArray[Any], problems_M: Ints, problems: int
) -> PairWins:
    """Counts over all N x M pairs; an AUC and all its bootstrap resamples are sums of them.

    Scores [N] and [M]; `problems_*`: their problems, numbered below `problems`."""
    by_problem_PM = np.zeros((problems, len(negative_M)))
    order_N = np.argsort(problems_N, kind="stable")
    ends = np.searchsorted(problems_N[order_N], np.arange(problems + 1))
    for p in range(problems):
        scores = np.sort(positive_N[order_N[ends[p] : ends[p + 1]]])
        above_M = len(scores) - np.searchsorted(scores, negative_M, side="right")
        not_below_M = len(scores) - np.searchsorted(scores, negative_M, side="left")
        by_problem_PM[p] = (above_M + not_below_M) / 2
    belongs_MP = np.zeros((len(negative_M), problems))
    belongs_MP[np.arange(len(negative_M)), problems_M] = 1.0
    return PairWins(
        by_problem_PM @ belongs_MP,
        np.bincount(problems_N, minlength=problems).astype(np.float64),
        np.bincount(problems_M, minlength=problems).astype(np.float64),
    )


def auc_of(found: PairWins, weights_BP: Float64, fold_P: Ints | None = None) -> Estimate:
    """P(positive above negative) + P(tie)/2 over all pairs, with a bootstrap over problems: a problem drawn twice
    contributes its positives and its negatives twice.

    `fold_P`: only pairs within a fold count, because in cross-validation other folds' scores come from other models."""
    size = len(found.positives_P)
    pairs_PP = np.outer(found.positives_P, found.negatives_P)
    wins_PP = found.wins_PP
    if fold_P is not None:
        same_PP = fold_P[:, None] == fold_P[None, :]
        wins_PP, pairs_PP = wins_PP * same_PP, pairs_PP * same_PP
    total = float(pairs_PP.sum())
    solutions = int(found.positives_P.sum() + found.negatives_P.sum())
    problems = int(((found.positives_P + found.negatives_P) > 0).sum())
    if not total:
        return Estimate(None, None, None, solutions, problems)
    if weights_BP.shape[1] != size:
        raise ValueError(f"resamples of {weights_BP.shape[1]} problems do not fit counts of {size}")
    won_B = np.einsum("bp,bp->b", weights_BP @ wins_PP, weights_BP)
    pairs_B = np.einsum("bp,bp->b", weights_BP @ pairs_PP, weights_BP)
    with np.errstate(divide="ignore", invalid="ignore"):
        replicates_B = won_B / pairs_B
    return percentile(float(wins_PP.sum()) / total, replicates_B, solutions, problems)


def roc(positive_N: NDArray[Any], negative_M: NDArray[Any]) -> list[tuple[float, float]]:
    """The ROC curve as (false-positive rate, true-positive rate) from (0, 0) to (1, 1), in order of decreasing scores.
    Long curves have MOST_POINTS evenly spaced corners. Empty without positives or negatives."""
    if not len(positive_N) or not len(negative_M):
        return []
    levels = np.unique(np.concatenate([positive_N, negative_M]))[::-1]
    right, wrong = np.sort(positive_N), np.sort(negative_M)
    true_L = 1.0 - np.searchsorted(right, levels, side="left") / len(right)
    false_L = 1.0 - np.searchsorted(wrong, levels, side="left") / len(wrong)
    points = [(0.0, 0.0), *((float(f), float(t)) for f, t in zip(false_L, true_L, strict=True))]
    if len(points) <= MOST_POINTS:
        return points
    kept = {math.floor(i * (len(points) - 1) / (MOST_POINTS - 1)) for i in range(MOST_POINTS)}
    return [points[i] for i in sorted(kept)]


PERMUTATIONS = 999
EDGE = 5  # values on each side of a change, at least


def change_point(values_T: Float64) -> tuple[int, float] | None:
    """Where the mean of a series changes most: how many values come before, and the p value of that change among
    permutations of the series (seed 0), which takes its values as independent. None for fewer than 2 EDGE values.

    Source: the largest standardised difference over all splits (a CUSUM statistic; Page, Biometrika 41 (1954)).
    """
    count = len(values_T)
    if count < 2 * EDGE:
        return None
    before_K = np.arange(EDGE, count - EDGE + 1)
    weights_K = np.sqrt(before_K * (count - before_K) / count)

    def differences(series_T: Float64) -> Float64:
        sums_K = np.cumsum(series_T)[before_K - 1]
        means_K = sums_K / before_K - (series_T.sum() - sums_K) / (count - before_K)
        found_K: Float64 = np.abs(means_K) * weights_K
        return found_K

    found_K, generator = differences(values_T), np.random.default_rng(0)
    most = found_K.max()
    reached = sum(differences(generator.permutation(values_T)).max() >= most for _ in range(PERMUTATIONS))
    return int(before_K[found_K.argmax()]), (1 + reached) / (1 + PERMUTATIONS)


# Paired comparisons: p values of exchanging the sides of pairs, and their adjustment in a family.

EXACT_UP_TO = 20  # pairs: 2^20 sums fit in memory; above it, random exchanges are used
RANDOM_EXCHANGES, TOGETHER = 100_000, 1_000  # exchanges, and how many are drawn at once
ALIKE = 1e-9  # relative: sums this close are equal, but added in another order


def sign_flip_p(differences: Sequence[float]) -> float:
    """The two-sided p value: the share of the 2^n choices of signs whose sum is at least as far from 0.

    1 if all are 0 or there are none. Above EXACT_UP_TO differences it uses random exchanges with a fixed seed.
    """
    moved_N = np.array([d for d in differences if d], dtype=np.float64)
    if not moved_N.size:
        return 1.0
    least = abs(float(moved_N.sum())) - ALIKE * float(np.abs(moved_N).sum())
    if moved_N.size > EXACT_UP_TO:
        generator, reached = np.random.default_rng(0), 0
        for _ in range(0, RANDOM_EXCHANGES, TOGETHER):  # all at once need 0.8 MB per pair
            signs = generator.choice(np.array([-1.0, 1.0]), (TOGETHER, moved_N.size))
            reached += int((np.abs(signs @ moved_N) >= least).sum())
        return (reached + 1) / (RANDOM_EXCHANGES + 1)
    sums: NDArray[np.float64] = np.zeros(1)
    for value in moved_N:
        sums = np.concatenate([sums + value, sums - value])
    return float((np.abs(sums) >= least).mean())


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """The adjusted p values of one family, in the given order (Holm 1979, step-down Bonferroni). None stays None."""
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    most = 0.0
    for rank, (p, place) in enumerate(known):
        adjusted[place] = most = max(most, min(1.0, (len(known) - rank) * p))
    return adjusted
