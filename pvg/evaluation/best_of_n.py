"""Best-of-n: how often the solution that a verifier likes best of n is correct.

*Balanced* (Kirchner et al. 2024, arXiv 2407.13692): n/2 correct and n/2 incorrect solutions of a problem, so chance is
one half. *Natural*: n solutions as they were sampled; chance is the share of correct ones, and pass@n the ceiling.

Both are exact expectations over all subsets of the sampled solutions, not one draw. Of the solutions that tie for the
highest score one is taken at random. The sums go over the distinct scores v and over how many of the chosen solutions
tie at v (derived; tests enumerate all subsets):

    P = sum_v sum_{j+k>=1} j/(j+k) C(c_v,j) C(c_<,a-j)/C(c,a) C(i_v,k) C(i_<,b-k)/C(i,b)      balanced, a = b = n/2
    P = sum_v sum_{j+k>=1} j/(j+k) C(c_v,j) C(i_v,k) C(c_< + i_<, n-j-k)/C(c+i,n)             natural

with c_v (i_v) correct (incorrect) solutions that score v, and c_< (i_<) that score less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pvg.evaluation.intervals import Estimate, Float64, Ints, ratio

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Level:
    """One distinct score of a problem: how many correct and incorrect solutions have it, and how many have less."""

    right: int
    right_below: int
    wrong: int
    wrong_below: int


def sizes(largest: int) -> list[int]:
    """2, 4, 8, ... up to `largest`."""
    return [2**power for power in range(1, largest.bit_length()) if 2**power <= largest]


def balanced(scores_N: NDArray[Any], correct_N: Bools, n: int) -> float | None:
    """The probability that the best of n/2 correct and n/2 incorrect solutions of one problem is correct; None where
    there are too few of either. Raises ValueError for an odd n."""
    if n % 2 or n < 2:
        raise ValueError(f"a balanced choice is among an even number of solutions, not {n}")
    half, right = n // 2, int(correct_N.sum())
    wrong = len(correct_N) - right
    if right < half or wrong < half:
        return None
    ways = math.comb(right, half) * math.comb(wrong, half)

    def chosen(level: Level, j: int, k: int) -> int:
        of_right = _choose(level.right, j) * _choose(level.right_below, half - j)
        return of_right * _choose(level.wrong, k) * _choose(level.wrong_below, half - k)

    return _won(scores_N, correct_N, chosen) / ways


def natural(scores_N: NDArray[Any], correct_N: Bools, n: int) -> float | None:
    """The probability that the best of n solutions of one problem is correct; None where there are fewer than n."""
    if len(correct_N) < n:
        return None

    def chosen(level: Level, j: int, k: int) -> int:
        rest = _choose(level.right_below + level.wrong_below, n - j - k)
        return _choose(level.right, j) * _choose(level.wrong, k) * rest

    return _won(scores_N, correct_N, chosen) / math.comb(len(correct_N), n)


def pass_at(correct: int, total: int, n: int) -> float:
    """The probability that at least one of n of `total` solutions is correct: 1 - C(total - correct, n)/C(total, n)
    (Chen et al. 2021, arXiv 2107.03374)."""
    return 1.0 - math.comb(total - correct, n) / math.comb(total, n)


def _won(scores_N: NDArray[Any], correct_N: Bools, chosen: Callable[[Level, int, int], int]) -> float:
    """The ways to choose (`chosen`) with j correct and k incorrect solutions tied at the top, times j/(j+k), summed
    over the levels at which the top may be; with j = 0 the best is never correct."""
    return sum(
        chosen(level, j, k) * j / (j + k)
        for level in _levels(scores_N, correct_N)
        for j in range(1, level.right + 1)
        for k in range(level.wrong + 1)
    )


def _levels(scores_N: NDArray[Any], correct_N: Bools) -> list[Level]:
    sides = np.sort(scores_N[correct_N]), np.sort(scores_N[~correct_N])
    found = []
    for value in np.unique(scores_N):
        below, up_to = ([int(np.searchsorted(side, value, end)) for side in sides] for end in ("left", "right"))
        found.append(Level(up_to[0] - below[0], below[0], up_to[1] - below[1], below[1]))
    return found


def _choose(n: int, k: int) -> int:
    """C(n, k), 0 where there is no such choice."""
    return math.comb(n, k) if k >= 0 else 0


def by_problem(
    scores_N: NDArray[Any], correct_N: Bools, problems_N: Ints, n: int, accuracy: Callable[..., float | None]
) -> list[float | None]:
    """`accuracy` (balanced or natural) of each problem 0..P-1; None where a problem has too few solutions."""
    count = int(problems_N.max()) + 1 if len(problems_N) else 0
    return [accuracy(scores_N[problems_N == p], correct_N[problems_N == p], n) for p in range(count)]


def curve_point(values: Sequence[float | None], weights_BP: Float64, confidence: float) -> Estimate:
    """The mean over the problems that have a value, with the bootstrap over all of them."""
    there_P = np.array([value is not None for value in values], dtype=np.float64)
    values_P = np.array([value or 0.0 for value in values], dtype=np.float64)
    return ratio(values_P, there_P, weights_BP, confidence, int(there_P.sum()))
