"""Calibration: how well scores separate correct from incorrect solutions, thresholds, ensemble scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pvg.errors import TrainingDivergedError
from pvg.models.heads import ScoreScales, VerifierEnsemble
from pvg.records import Float32, Scorable
from pvg.telemetry.spans import run_in, span
from pvg.verifier.data import VerifierTemplate, padded_batches

# At a threshold that this share of correct solutions reaches, reports compare how well verifiers rank.
ACCEPTANCE = 0.9


def auc(scores_pos: NDArray[Any], scores_neg: NDArray[Any]) -> float:
    """P(positive above negative) + P(tie) / 2: the Mann-Whitney statistic over P x N pairs.

    `scores_pos` [P], `scores_neg` [N]; O((P + N) log(P + N)). NaN if one is empty. Raises ValueError for NaNs.
    """
    if not scores_pos.size or not scores_neg.size:
        return math.nan
    if np.isnan(scores_pos).any() or np.isnan(scores_neg).any():
        raise ValueError("cannot compute an AUC: some scores are NaN")
    sorted_neg = np.sort(scores_neg)
    below = np.searchsorted(sorted_neg, scores_pos, side="left")
    not_above = np.searchsorted(sorted_neg, scores_pos, side="right")
    # below + ties / 2 = (below + not_above) / 2, as an exact integer sum.
    return float((below.sum() + not_above.sum()) / (2 * scores_pos.size * scores_neg.size))


def matthews(accepted_N: NDArray[np.bool_], correct_N: NDArray[np.bool_]) -> float:
    """The Matthews correlation of two bool arrays [N], in [-1, 1]: 0 is chance. NaN if one of them has one value."""
    shares = np.array([accepted_N.mean(), correct_N.mean()]) if len(accepted_N) else np.zeros(2)
    spread = float(np.prod(shares * (1.0 - shares)))
    if not spread:
        return math.nan
    return float(((accepted_N & correct_N).mean() - np.prod(shares)) / math.sqrt(spread))


def acceptance_threshold(correct_scores: NDArray[Any], share: float) -> float:
    """The highest score that at least `share` (0 < share <= 1) of the correct solutions [n] reach.

    It is one of the scores, so "accepted" means score >= threshold. NaN without correct solutions.
    """
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share must be above 0 and at most 1, not {share}")
    if not correct_scores.size:
        return math.nan
    # The tolerance absorbs rounding: 0.07 * 100 is 7.000000000000001 in floats and would require one solution more.
    needed = max(1, math.ceil(share * correct_scores.size - 1e-9))
    return float(np.sort(correct_scores)[correct_scores.size - needed])


def separating_threshold(correct_scores: NDArray[Any], wrong_scores: NDArray[Any]) -> float:
    """The score of a correct solution at which the share of correct solutions that reach it is furthest above the share
    of wrong ones: the largest J of Youden (doi:10.1002/1097-0142(1950)3:1<32), which has the best balanced accuracy.

    Of equally good scores the lowest. Without wrong solutions the lowest score, without correct ones NaN.
    """
    if not correct_scores.size:
        return math.nan
    right, wrong = np.sort(correct_scores), np.sort(wrong_scores)
    levels_L = np.unique(right)
    gains_L = np.searchsorted(wrong, levels_L) / max(1, wrong.size) - np.searchsorted(right, levels_L) / right.size
    return float(levels_L[int(np.argmax(gains_L))])


def balanced_accuracy(accepted_N: NDArray[np.bool_], correct_N: NDArray[np.bool_]) -> float:
    """The mean of the shares of correct solutions that are accepted and of wrong ones that are not; 1/2 is chance."""
    return float((accepted_N[correct_N].mean() + 1.0 - accepted_N[~correct_N].mean()) / 2.0)


def accepted_by_halves(
    scores_N: NDArray[Any], correct_N: NDArray[np.bool_], problems_N: NDArray[Any]
) -> NDArray[np.bool_] | None:
    """bool [N]: whether each score reaches the threshold with the best balanced accuracy on the other half of the
    problems, so no solution chooses its own threshold. None if a half lacks correct or wrong solutions."""
    _, problem_N = np.unique(problems_N, return_inverse=True)
    accepted_N = np.zeros(len(scores_N), dtype=bool)
    for half in (0, 1):
        own_N = problem_N % 2 == half
        right, wrong = (scores_N[~own_N & (correct_N == kind)] for kind in (True, False))
        if not right.size or not wrong.size:
            return None
        accepted_N |= own_N & (scores_N >= separating_threshold(right, wrong))
    return accepted_N


def balanced_lead(
    first_N: NDArray[np.bool_], second_N: NDArray[np.bool_], correct_N: NDArray[np.bool_], problems_N: NDArray[Any]
) -> tuple[float, float, float]:
    """By how much the balanced accuracy of the decisions `first_N` is above that of `second_N`, and the bounds of a
    95 % interval, from the linearised variance over problems (see pvg.verifier.intervals.share_of)."""
    _, problem_N = np.unique(problems_N, return_inverse=True)
    apart_N = np.where(correct_N, 1.0, -1.0) * (first_N.astype(np.float64) - second_N)
    errors_N = np.zeros(len(apart_N))
    for kind in (True, False):
        of_N = correct_N == kind
        errors_N[of_N] = (apart_N[of_N] - apart_N[of_N].mean()) / (2 * of_N.sum())
    errors_K = np.bincount(problem_N, weights=errors_N)
    half = 1.96 * math.sqrt(len(errors_K) / max(1, len(errors_K) - 1) * float((errors_K**2).sum()))
    lead = balanced_accuracy(first_N, correct_N) - balanced_accuracy(second_N, correct_N)
    return lead, lead - half, lead + half


# --- ensembles --------------------------------------------------------------------------------------------------------


def common_scales(scores_KN: NDArray[np.floating]) -> ScoreScales:
    """The scales of K members from their scores of N >= 1 held-out solutions: V' = (V - centre_k) spread / spread_k +
    centre.

    centre_k and spread_k are the mean and standard deviation of member k's scores; centre and spread are their medians
    over the members, so one failed member does not change the others' scales. pvg.models.heads explains why scores
    need scales. A member with equal scores keeps its slope and only shifts. Equal members get exactly slope 1 and
    offset 0, because the sums are exact (fsum) and a median of equal values is that value.
    """
    centres_K = np.array([math.fsum(scores_N) / len(scores_N) for scores_N in scores_KN.astype(np.float64)])
    deviations_KN = scores_KN.astype(np.float64) - centres_K[:, None]
    spreads_K = np.array([math.sqrt(math.fsum(own_N * own_N) / len(own_N)) for own_N in deviations_KN])
    varies_K = spreads_K > 0
    common = float(np.median(spreads_K[varies_K])) if varies_K.any() else 1.0
    slopes_K = np.where(varies_K, common / np.where(varies_K, spreads_K, 1.0), 1.0)
    return ScoreScales(slopes_K, float(np.median(centres_K)) - slopes_K * centres_K)


def disagreement(scaled_KN: NDArray[np.floating]) -> float:
    """The standard deviation of a solution's score over the members, averaged over solutions."""
    return float(scaled_KN.astype(np.float64).std(axis=0).mean())


async def member_scores(
    ensemble: VerifierEnsemble,
    template: VerifierTemplate,
    rollouts: Sequence[Scorable],
    *,
    token_budget: int,
    executor: Executor,
    prover_fingerprint: str | None,
) -> Float32:
    """float32 [K, N]: each member's scores on its own scale, bit-identical to those that a `VerifierScorer` aggregates.

    Raises TrainingDivergedError, naming member and rollout, if a score is not finite.
    """
    inputs = [template.tokens(r.question, r.text, r.completion_ids, prover_fingerprint) for r in rollouts]
    found_KN: Float32 = np.empty((len(ensemble.members), len(inputs)), dtype=np.float32)

    def forward() -> None:
        with torch.inference_mode(), span("score_service", device=True):
            for rows, packed in padded_batches(ensemble, inputs, token_budget):
                found_KN[:, rows] = ensemble.member_scores(*packed)[:, : len(rows)].cpu().numpy()

    await run_in(executor, forward)
    for member, number in np.argwhere(~np.isfinite(found_KN)):
        raise TrainingDivergedError(
            f"Member {member} of the verifier scores rollout {rollouts[number].id} {found_KN[member, number]}.",
            "Its weights have diverged: lower verifier.learning_rate. All commits are intact.",
        )
    return found_KN
