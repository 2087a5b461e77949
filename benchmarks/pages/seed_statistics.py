"""Whether two ways of playing differ more than seeds do, from the figures of a few seeds on each side.

    found = difference([0.71, 0.74, ...], [0.72, 0.73, ...])    # Difference(value=0.004, low=-0.02, high=0.03, p=0.81)
    joint_p(slow_by_metric, fast_by_metric)                     # one p for all metrics together

The p value is that of an exact permutation test: the share of all divisions of the seeds' figures into two sides (252
for 5 against 5) whose means differ at least as much as observed. It assumes nothing about the distribution of the
figures. With many metrics, some differ by chance. The joint p value is therefore that of the largest difference, in
standard deviations over both sides, under the same permutations of whole seeds (Westfall and Young 1993). The interval
is Welch's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from pvg.bench.statistics import student_quantile

ALIKE = 1e-9  # two differences this near to each other are the same one, computed in another order


@dataclass(frozen=True, slots=True)
class Difference:
    """mean(b) - mean(a), Welch's interval at 95 %, and the exact two-sided p value."""

    value: float
    low: float
    high: float
    p: float


def difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Raises ValueError with fewer than two values on a side."""
    if min(len(a), len(b)) < 2:
        raise ValueError("one value alone says nothing about its spread")
    value = statistics.fmean(b) - statistics.fmean(a)
    reach = _welch_reach(a, b)
    return Difference(value, value - reach, value + reach, joint_p([a], [b]))


def joint_p(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> float:
    """`a[m]` and `b[m]` are the values of metric m, one for each seed of that side, in the same order for all metrics.

    1 where nothing differs in any metric. Raises ValueError without a metric, or without a seed on one of the sides:
    there is nothing to deal then, and any p would be a verdict; and for metrics of different numbers of seeds.
    """
    if not a or not b or not all(a) or not all(b):
        raise ValueError("no metric has values of both sides: there is nothing to compare")
    pooled_MS = np.array([[*x, *y] for x, y in zip(a, b, strict=True)], dtype=np.float64)
    spread_M = pooled_MS.std(axis=1)
    pooled_MS = pooled_MS[spread_M > 0] / spread_M[spread_M > 0, None]
    if not pooled_MS.size:
        return 1.0
    first, seeds = len(a[0]), pooled_MS.shape[1]
    apart_W = np.array([_furthest(pooled_MS, list(chosen)) for chosen in combinations(range(seeds), first)])
    return float((apart_W >= apart_W[0] - ALIKE).mean())  # the first way is the one that was played


def _furthest(pooled_MS: NDArray[np.float64], chosen: list[int]) -> float:
    """The largest difference of means over the metrics when these seeds are side a."""
    other = np.setdiff1d(np.arange(pooled_MS.shape[1]), chosen)
    return float(np.abs(pooled_MS[:, other].mean(axis=1) - pooled_MS[:, chosen].mean(axis=1)).max())


def _welch_reach(a: Sequence[float], b: Sequence[float]) -> float:
    """Half of Welch's interval at 95 %."""
    parts = [statistics.variance(values) / len(values) for values in (a, b)]
    spread = sum(parts)
    if spread == 0:
        return 0.0
    degrees = spread**2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (a, b), strict=True))
    return student_quantile(0.975, max(1, int(degrees + 1e-9))) * math.sqrt(spread)
