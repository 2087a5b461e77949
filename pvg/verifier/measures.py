"""How well scores separate correct from incorrect solutions. Pure functions of numpy arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def auc(scores_pos: NDArray[Any], scores_neg: NDArray[Any]) -> float:
    """P(a positive scores above a negative) + P(they tie) / 2: the Mann-Whitney statistic over P x N pairs.

    `scores_pos` [P], `scores_neg` [N], in O((P + N) log(P + N)). NaN when a side is empty. Raises ValueError for NaNs.
    """
    if not scores_pos.size or not scores_neg.size:
        return math.nan
    if np.isnan(scores_pos).any() or np.isnan(scores_neg).any():
        raise ValueError("an AUC of scores that are not a number has no value")
    sorted_neg = np.sort(scores_neg)
    below = np.searchsorted(sorted_neg, scores_pos, side="left")
    not_above = np.searchsorted(sorted_neg, scores_pos, side="right")
    # below + ties / 2 = (below + not_above) / 2, summed as integers: exact.
    return float((below.sum() + not_above.sum()) / (2 * scores_pos.size * scores_neg.size))


def acceptance_threshold(correct_scores: NDArray[Any], share: float) -> float:
    """The highest score that at least `share` (0 < share <= 1) of the correct solutions [n] reach.

    One of the scores themselves, so "accepted" means score >= threshold. NaN without correct solutions.
    """
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share must be above 0 and at most 1, not {share}")
    if not correct_scores.size:
        return math.nan
    # In floats 0.07 * 100 is 7.000000000000001: without the tolerance such a share would ask for one solution more.
    needed = max(1, math.ceil(share * correct_scores.size - 1e-9))
    return float(np.sort(correct_scores)[correct_scores.size - needed])


def acceptance_rate(scores: NDArray[Any], threshold: float) -> float:
    """The share of `scores` [n] that reach `threshold`; NaN without scores."""
    return float(np.mean(scores >= threshold)) if scores.size else math.nan


def pair_accuracy(scores_correct: NDArray[Any], scores_incorrect: NDArray[Any]) -> float:
    """The share of pairs [m] whose correct solution scores higher, a tie counting half; NaN without pairs."""
    if not scores_correct.size:
        return math.nan
    return float(np.mean((scores_correct > scores_incorrect) + 0.5 * (scores_correct == scores_incorrect)))
