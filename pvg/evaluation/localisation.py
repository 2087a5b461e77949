"""Whether a score says where the flaw is: it should fall at the first wrong step.

A solution is cut after each of its steps and every prefix is scored; the flaw is *located* at the step at which the
score falls most, s_(k-1) - s_k, with s_0 the score of the empty solution. That works for every head. A step's score
depends on how long the prefix is, for some heads: hence the comparison with guessing, which is right once in
(number of steps), and not with zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def credit(prefix_scores_K: NDArray[Any], flaw: int) -> float:
    """The probability that the largest fall of K+1 prefix scores (the empty solution first) is at step `flaw` (from 0),
    ties broken at random. Raises ValueError for a flaw outside of the K steps."""
    falls_K = prefix_scores_K[:-1].astype(np.float64) - prefix_scores_K[1:].astype(np.float64)
    if not 0 <= flaw < len(falls_K):
        raise ValueError(f"step {flaw} is none of the {len(falls_K)} steps")
    largest_K = falls_K == falls_K.max()
    return float(largest_K[flaw] / largest_K.sum())


def chance(steps_N: NDArray[np.int64]) -> float:
    """What guessing a step gets on average: the mean of 1 / (number of steps)."""
    return float(np.mean(1.0 / steps_N))
