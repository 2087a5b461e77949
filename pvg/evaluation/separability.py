"""Whether helpful and sneaky solutions can be told apart by their style: the AUC of a tiny classifier.

Near one half: the roles write alike, as the game wants. Near one: they have drifted apart, and the verifier may learn
the role instead of correctness. As correctness itself separates the roles, the probe is also trained and read within
correct and within incorrect solutions alone; there by pairs of one problem, for the problems differ too: those that the
sneaky role gets right are easier than those that the helpful one does, or fewer.

The probe: presence of token n-grams, hashed into FEATURES columns (collisions and all, as in Weinberger et al. 2009,
arXiv 0902.2206), rows scaled to length 1, logistic regression with a ridge. No random number anywhere: the same
solutions give the same AUC.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pvg.evaluation.detection import auc_of, wins
from pvg.evaluation.intervals import Estimate, Float64, Ints
from pvg.evaluation.logistic import fit

FEATURES = 2048
FACTOR = np.uint64(1_000_003)
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Fibonacci hashing
RIDGE = 1.0  # on the weights; rows have length 1, so this is a few solutions' worth of evidence
INTERCEPT_RIDGE = 1e-6


def folds_of(problem_ids: Sequence[str], folds: int) -> Ints:
    """int64 [P]: the fold of each problem, by a hash of its id; of few problems some folds may be empty."""
    return np.array(
        [int.from_bytes(hashlib.sha256(f"fold/{name}".encode()).digest()[:8]) % folds for name in problem_ids],
        dtype=np.int64,
    )


def features(solutions: Sequence[NDArray[np.int32]], longest: int) -> Float64:
    """float64 [N, FEATURES]: which token n-grams of 1 to `longest` tokens each solution has, scaled to length 1."""
    rows_NF = np.zeros((len(solutions), FEATURES))
    for place, ids in enumerate(solutions):
        hashed = np.zeros(len(ids), dtype=np.uint64)
        for size in range(1, min(longest, len(ids)) + 1):
            # A polynomial of the n tokens, then spread together with n by a multiplication; both wrap around.
            hashed = hashed[: len(ids) - size + 1] * FACTOR + ids[size - 1 :].astype(np.uint64) + np.uint64(1)
            columns = ((hashed + np.uint64(size)) * SPREAD >> np.uint64(40)) % np.uint64(FEATURES)
            rows_NF[place, columns] = 1.0
    lengths_N = np.sqrt(rows_NF.sum(axis=1, keepdims=True))
    return np.asarray(rows_NF / np.maximum(1.0, lengths_N))


def probe(
    rows_NF: Float64,
    helpful_N: NDArray[np.bool_],
    problems_N: Ints,
    fold_P: Ints,
    weights_BP: Float64,
    confidence: float,
    pairs_P: Ints | None = None,
) -> Estimate:
    """The AUC of held-out helpful solutions against held-out sneaky ones, over all pairs within a fold, or of problems
    that have one number in `pairs_P` (each of its numbers within a fold). No value where a fold's other folds hold one
    role only."""
    problems = len(fold_P)
    fold_N = fold_P[problems_N]
    design_ND = np.concatenate([rows_NF, np.ones((len(rows_NF), 1))], axis=1)
    penalty_D = np.append(np.full(rows_NF.shape[1], RIDGE), INTERCEPT_RIDGE)
    scores_N = np.zeros(len(rows_NF))
    for fold in np.unique(fold_N):
        others_N = fold_N != fold
        if len(np.unique(helpful_N[others_N])) < 2:
            return Estimate(None, None, None, len(rows_NF), len(np.unique(problems_N)))
        fitted_D = fit(design_ND[others_N], helpful_N[others_N].astype(np.float64), penalty_D)
        scores_N[~others_N] = design_ND[~others_N] @ fitted_D
    counts = wins(scores_N[helpful_N], problems_N[helpful_N], scores_N[~helpful_N], problems_N[~helpful_N], problems)
    return auc_of(counts, weights_BP, confidence, fold_P if pairs_P is None else pairs_P)
