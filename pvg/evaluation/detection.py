"""How well scores tell right from flawed: ROC curves and AUCs whose uncertainty knows that solutions share problems."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pvg.evaluation.intervals import Estimate, Float64, Ints, percentile

MOST_POINTS = 101  # of a stored ROC curve


@dataclass(frozen=True, slots=True)
class Wins:
    """By pairs of problems [P, P]: how often a positive of the row's problem scores above a negative of the column's (a
    tie counts half), and how many positives and negatives each problem has [P]."""

    wins_PP: Float64
    positives_P: Float64
    negatives_P: Float64


def wins(positive_N: NDArray[Any], problems_N: Ints, negative_M: NDArray[Any], problems_M: Ints, problems: int) -> Wins:
    """Counts over all N x M pairs, of which an AUC and all of its bootstrap resamples are sums.

    Scores [N] and [M], `problems_*` their problems, numbered below `problems`."""
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
    return Wins(
        by_problem_PM @ belongs_MP,
        np.bincount(problems_N, minlength=problems).astype(np.float64),
        np.bincount(problems_M, minlength=problems).astype(np.float64),
    )


def auc_of(found: Wins, weights_BP: Float64, confidence: float, fold_P: Ints | None = None) -> Estimate:
    """P(positive above negative) + P(tie)/2 over all pairs, with a bootstrap over problems: a problem drawn twice
    brings its positives and its negatives twice.

    `fold_P`: only pairs within a fold count (cross-validation: other folds' scores come from another model)."""
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
    return percentile(float(wins_PP.sum()) / total, replicates_B, confidence, solutions, problems)


def roc(positive_N: NDArray[Any], negative_M: NDArray[Any]) -> list[tuple[float, float]]:
    """The ROC curve as (false-positive rate, true-positive rate) from (0, 0) to (1, 1), accepting from the highest
    score down; of long curves MOST_POINTS, evenly spaced among the corners. Empty where a side is."""
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
