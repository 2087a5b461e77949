"""Which effects a number of seeds can show: the smallest p value that is possible, and the smallest difference that is
found in 4 of 5 studies. Pure functions.

    shortfall(5, 3, "difference")       # "5 seeds cannot show a significant difference: ..."; "" if they can
    detectable(0.02, 8, 3)              # 0.0359: a true difference of 3.6 points is found in 4 of 5 studies

Both are about the test of `pvg.study.statistics`: the exact exchange of the two arms within seeds, with Holm's
correction, of which the strictest step counts: the smallest of m p values must be at most 0.05 / m.

- With n pairs no p value is below 2 / 2^n, so few seeds find no difference at all, however large it is.
- The detectable difference is in units of the spread, the standard deviation of the differences over seeds. Up to 12
  pairs it comes from 2,000 simulated studies with normal differences and a fixed seed. For one such study the
  smallest significant shift has a closed form (`_critical_shifts`), and the shift that is enough for 4 of 5 studies is
  their 80 % quantile. Beyond 12 pairs Student's t gives the same to within about 3 % for up to 8 tests. With more tests
  it gives too little, because it does not know how few p values there are: with 13 pairs, 5 % for 16 tests and 8 % for
  40 (tests/study/test_study_power.py).
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from pvg.bench.statistics import student_quantile
from pvg.errors import counted
from pvg.study.statistics import LEVEL, least_p, seeds_needed

POWER = 0.8  # the share of studies that find the difference
SIMULATED_UP_TO = 12  # pairs: 2^11 ways times the simulated studies fit in memory
SIMULATED_STUDIES = 2_000


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


def detectable(spread: float | None, pairs: int, tests: int) -> float | None:
    """The smallest true difference that the test finds in 4 of 5 studies with `pairs` pairs and `tests` tests.

    `spread`: the standard deviation of the differences over seeds, in the unit of the result. None without a spread or
    with a spread of 0, and if so few pairs can find nothing.
    """
    if not spread or tests < 1 or tests * least_p(pairs) > LEVEL:
        return None
    return spread * _in_spreads(pairs, tests)


@lru_cache(maxsize=256)
def _in_spreads(pairs: int, tests: int) -> float:
    """The detectable difference in units of the spread."""
    if pairs > SIMULATED_UP_TO:
        quantiles = student_quantile(1 - LEVEL / tests / 2, pairs - 1) + student_quantile(POWER, pairs - 1)
        return quantiles / math.sqrt(pairs)
    noise_DN = np.random.default_rng(0).standard_normal((SIMULATED_STUDIES, pairs))
    return float(np.quantile(_critical_shifts(noise_DN, LEVEL / tests), POWER))


def _critical_shifts(noise_DN: NDArray[np.float64], level: float) -> NDArray[np.float64]:
    """[D]: for each study, the smallest shift of all its differences that makes p at most `level`.

    A choice of signs with the sum A and the sum of signs k gives |A + shift * k| for shifted differences, and the
    observed signs give A0 + shift * n. The choice counts against significance up to the shift at which both are equal.
    So the critical shift is one of these shifts: that of the first choice that may not count any more. Choices and
    their opposites give the same, so the first sign is always plus.
    """
    pairs = noise_DN.shape[1]
    signs_WN = np.array([(1.0, *rest) for rest in product((1.0, -1.0), repeat=pairs - 1)])
    sums_DW, k_W = noise_DN @ signs_WN.T, signs_WN.sum(1)
    observed_D1 = sums_DW[:, :1]
    others_DW, k_W = sums_DW[:, 1:], k_W[1:]
    equal_DW = np.maximum((others_DW - observed_D1) / (pairs - k_W), -(others_DW + observed_D1) / (pairs + k_W))
    may_count = math.floor(level * len(signs_WN) + 1e-9) - 1  # the observed choice itself always counts
    place = equal_DW.shape[1] - 1 - may_count
    shifts: NDArray[np.float64] = np.partition(equal_DW, place, axis=1)[:, place]
    return shifts
