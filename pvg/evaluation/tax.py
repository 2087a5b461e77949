"""The legibility tax: accuracy that the game's prover lacks against a prover paid for correctness alone, at the same KL
to the start (Kirchner et al. 2024, arXiv 2407.13692).

KL(policy || start) in nats, estimated on the policy's own samples as the mean over completions of sum_t [log pi(z_t) -
log start(z_t)]: unbiased where solutions are sampled from the whole distribution (rollout.top_p = 1, top_k = 0). Both
log-probs are computed at the sampling temperature.

The baseline's accuracy at the game prover's KL is interpolated on the line through its probes in the order of their KL;
outside of the range that the probes cover there is no tax, and the sides are told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pvg.evaluation.intervals import Estimate, Float64, percentile


@dataclass(frozen=True, slots=True)
class Reach:
    """What a policy did with its helpful role, summed by test problem [P]: KL in nats, correct solutions, tokens and
    solutions. All policies of one comparison have the same problems in the same order."""

    kl_P: Float64
    correct_P: Float64
    tokens_P: Float64
    solutions_P: Float64

    def kl(self, weights_P: Float64) -> float:
        return float(weights_P @ self.kl_P / (weights_P @ self.solutions_P))

    def accuracy(self, weights_P: Float64) -> float:
        return float(weights_P @ self.correct_P / (weights_P @ self.solutions_P))


def accuracy_at(kl: float, kls_K: Float64, accuracies_K: Float64) -> float:
    """The accuracy at `kl` on the line through K points sorted by their KL (of points with one KL the mean); NaN where
    `kl` lies outside of them: nothing is extrapolated."""
    levels, place_K = np.unique(kls_K, return_inverse=True)
    means = np.bincount(place_K, weights=accuracies_K) / np.bincount(place_K)
    if not levels[0] <= kl <= levels[-1]:
        return math.nan
    return float(np.interp(kl, levels, means))


def tax(policy: Reach, baseline: list[Reach], weights_BP: Float64, confidence: float) -> Estimate:
    """The baseline's accuracy at the policy's KL, less the policy's: positive where the game costs accuracy.

    The bootstrap draws problems for all policies together, for they solved the same ones. A resample in which the
    policy's KL lies outside of the baseline's has no value; with many of those there is no interval."""
    problems = len(policy.kl_P)

    def once(weights_P: Float64) -> float:
        kls_K = np.array([probe.kl(weights_P) for probe in baseline])
        accuracies_K = np.array([probe.accuracy(weights_P) for probe in baseline])
        return accuracy_at(policy.kl(weights_P), kls_K, accuracies_K) - policy.accuracy(weights_P)

    replicates_B = np.array([once(weights_P) for weights_P in weights_BP])
    return percentile(once(np.ones(problems)), replicates_B, confidence, int(policy.solutions_P.sum()), problems)
