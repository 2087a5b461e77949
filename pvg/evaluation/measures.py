"""The measures of an evaluation as pure functions of arrays and settings: from scored samples to plain data.

Best-of-n: the probability that the solution with the highest score of n is correct. *Balanced* (Kirchner et al. 2024,
arXiv 2407.13692): n/2 correct and n/2 incorrect solutions of a problem, so chance is one half. *Natural*: n solutions
as sampled; chance is the share of correct ones, and pass@n is the upper limit. Both are exact expectations over all
subsets of the sampled solutions. Ties for the highest score are broken at random. The sums are over the distinct scores
v and over how many of the chosen solutions tie at v (derived here; tests enumerate all subsets):

    P = sum_v sum_{j+k>=1} j/(j+k) C(c_v,j) C(c_<,a-j)/C(c,a) C(i_v,k) C(i_<,b-k)/C(i,b)      balanced, a = b = n/2
    P = sum_v sum_{j+k>=1} j/(j+k) C(c_v,j) C(i_v,k) C(c_< + i_<, n-j-k)/C(c+i,n)             natural

with c_v (i_v) correct (incorrect) solutions with score v, and c_< (i_<) with a lower score.

Localisation: a solution is cut after each step, and every prefix is scored. The flaw is *located* at the step with the
largest fall s_(k-1) - s_k, where s_0 is the score of the empty solution. With some heads a step's score depends on the
length of the prefix, so the comparison is with guessing, which is correct once in (number of steps).

Separability: the AUC of a probe that separates helpful from sneaky solutions by style; near one half the roles write
alike, as the game intends. Correctness itself separates the roles, so the probe is also fitted within correct and
within incorrect solutions, where it compares only solutions of one problem. The probe: presence of token n-grams,
hashed into FEATURES columns (with collisions, as in Weinberger et al. 2009, arXiv 0902.2206), and logistic regression
with a ridge. It uses no random numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit

from pvg.config.operation import Evaluate
from pvg.config.training import Verifier
from pvg.evaluation.opened_run import ScoredRollouts
from pvg.verifier.calibration import matthews
from pvg.verifier.intervals import (
    CONFIDENCE,
    Estimate,
    Float64,
    Ints,
    auc_of,
    mean_of,
    percentile,
    ratio,
    roc,
    share_of,
    wins,
)

# --- logistic regression ----------------------------------------------------------------------------------------------


def sigmoid(x: NDArray[Any]) -> Float64:
    """1 / (1 + e^-x), without overflow."""
    return np.asarray(expit(x.astype(np.float64)))


def fit(design_ND: Float64, targets_N: Float64, penalty_D: Float64) -> Float64:
    """float64 [D]: the minimum of sum_n [log(1 + e^z) - t z] + sum_d penalty_d w_d^2 / 2 with z = design w, targets t
    in [0, 1], by Newton's method in a trust region, without a D x D matrix. Raises ValueError for a penalty of 0,
    because there may be no minimum."""
    if not (penalty_D > 0).all():
        raise ValueError("every parameter needs a penalty above 0")

    def objective(at_D: Float64) -> tuple[float, Float64]:
        """The value and its gradient."""
        z_N = design_ND @ at_D
        value = float(np.sum(np.logaddexp(0.0, z_N) - targets_N * z_N) + 0.5 * np.sum(penalty_D * at_D**2))
        return value, design_ND.T @ (expit(z_N) - targets_N) + penalty_D * at_D

    def curvature(at_D: Float64, x_D: Float64) -> Float64:
        p_N = expit(design_ND @ at_D)
        return np.asarray(design_ND.T @ (p_N * (1.0 - p_N) * (design_ND @ x_D)) + penalty_D * x_D)

    start_D = np.zeros(design_ND.shape[1])
    found = minimize(objective, start_D, jac=True, hessp=curvature, method="trust-ncg", options={"gtol": 1e-9})
    return np.asarray(found.x)


# --- calibration ------------------------------------------------------------------------------------------------------

PLATT_RIDGE = 1e-6  # on both parameters, because a separable set has no finite best fit without it


def platt(scores_N: NDArray[Any], correct_N: NDArray[np.bool_]) -> tuple[float, float]:
    """(a, b) of P(correct | s) = sigmoid(a s + b), fitted to Platt's smoothed targets (n+ + 1)/(n+ + 2) and
    1/(n- + 2). Raises ValueError without solutions."""
    if not len(scores_N):
        raise ValueError("a Platt fit needs solutions")
    positives = int(correct_N.sum())
    negatives = len(correct_N) - positives
    targets_N = np.where(correct_N, (positives + 1.0) / (positives + 2.0), 1.0 / (negatives + 2.0))
    scale = max(1.0, float(np.abs(scores_N).max()))  # unscaled scores and ones are badly conditioned
    design_N2 = np.stack([scores_N.astype(np.float64) / scale, np.ones(len(scores_N))], axis=1)
    a, b = fit(design_N2, targets_N, np.full(2, PLATT_RIDGE))
    return float(a) / scale, float(b)


def cross_fitted(
    scores_N: NDArray[Any], correct_N: NDArray[np.bool_], problems_N: Ints, fold_P: Ints
) -> Float64 | None:
    """float64 [N]: each solution's probability by the Platt fit to the other folds' problems; None if a fold has no
    data to fit."""
    fold_N = fold_P[problems_N]
    fitted_N = np.zeros(len(scores_N))
    for fold in np.unique(fold_N):
        others_N = fold_N != fold
        if not others_N.any():
            return None
        a, b = platt(scores_N[others_N], correct_N[others_N])
        fitted_N[~others_N] = sigmoid(a * scores_N[~others_N].astype(np.float64) + b)
    return fitted_N


def equal_mass(predicted_N: Float64, bins: int) -> Ints:
    """int64 [N]: the bin of each prediction. Bins are as equal in size as ties allow; equal predictions share a bin."""
    order_N = np.argsort(predicted_N, kind="stable")
    bin_N = np.empty(len(predicted_N), dtype=np.int64)
    bin_N[order_N] = np.arange(len(predicted_N)) * bins // max(1, len(predicted_N))
    _, level_N = np.unique(predicted_N, return_inverse=True)
    first_L = np.full(int(level_N.max(initial=-1)) + 1, bins, dtype=np.int64)
    np.minimum.at(first_L, level_N, bin_N)
    return np.asarray(first_L[level_N])


def calibration_error(predicted_N: Float64, correct_N: NDArray[np.bool_], bin_N: Ints) -> float:
    """ECE = sum_b (n_b / N) |mean prediction - share correct| over bins, in [0, 1]."""
    gaps_B = np.bincount(bin_N, weights=predicted_N - correct_N)
    return float(np.abs(gaps_B).sum() / len(predicted_N))


def ece(
    predicted_N: Float64, correct_N: NDArray[np.bool_], problems_N: Ints, bins: int, weights_BP: Float64
) -> tuple[Estimate, float | None]:
    """The calibration error, and the error expected by chance for a calibrated verifier on as many problems.

    The error of a finite sample is a norm, so near calibration it is above the true error, and the percentiles of a
    bootstrap are above both. But the bootstrap shows the noise |g* - g| of the bins' gaps g (with fixed bins) in the
    same norm. By the triangle inequality, the true error differs from the measured one by at most this noise. So the
    interval is the error plus and minus the noise's quantile at CONFIDENCE, at least 0. It contains the true error at
    least that often and is rather too wide. The mean of the noise is the error expected by chance."""
    problems, total = len(np.unique(problems_N)), len(predicted_N)
    if not total:
        return Estimate(None, None, None, 0, 0), None
    bin_N = equal_mass(predicted_N, bins)
    value = calibration_error(predicted_N, correct_N, bin_N)
    noise_B = _noise(predicted_N - correct_N, bin_N, problems_N, weights_BP)
    if problems < 2 or float(noise_B.max()) <= 1e-12:
        return Estimate(value, None, None, total, problems), None
    reach = float(np.quantile(noise_B, CONFIDENCE))
    return Estimate(value, max(0.0, value - reach), min(1.0, value + reach), total, problems), float(noise_B.mean())


def _noise(gap_N: Float64, bin_N: Ints, problems_N: Ints, weights_BP: Float64) -> Float64:
    """float64 [B]: sum_b |g*_b - g_b| of each resample; g_b is a bin's share of the mean gap."""
    used, place_N = np.unique(bin_N, return_inverse=True)
    sums_PQ = np.zeros((weights_BP.shape[1], len(used)))
    np.add.at(sums_PQ, (problems_N, place_N), gap_N)
    size_P = np.bincount(problems_N, minlength=weights_BP.shape[1]).astype(np.float64)
    drawn_BQ = (weights_BP @ sums_PQ) / np.maximum(1.0, weights_BP @ size_P)[:, None]
    return np.asarray(np.abs(drawn_BQ - sums_PQ.sum(axis=0) / len(gap_N)).sum(axis=1))


Bools = NDArray[np.bool_]
BINS = 10  # of the calibration error, with equal counts: the number of most papers
FOLDS = 5  # of the cross-validation by problem
NGRAMS = 3  # tokens of the longest n-gram of the separability probe: enough for a role's turns of phrase


# Of one distinct score of a problem: how many correct solutions have it and how many score lower (c_v, c_<), and the
# same of the incorrect ones (i_v, i_<).
ScoreLevel = tuple[int, int, int, int]


def sizes(largest: int) -> list[int]:
    """2, 4, 8, ... up to `largest`."""
    return [2**power for power in range(1, largest.bit_length()) if 2**power <= largest]


def balanced(scores_N: NDArray[Any], correct_N: Bools, n: int) -> float | None:
    """The probability that the best of n/2 correct and n/2 incorrect solutions of one problem is correct; None if there
    are too few of either. Raises ValueError for an odd n."""
    if n % 2 or n < 2:
        raise ValueError(f"a balanced choice needs an even number of solutions, not {n}")
    half, right = n // 2, int(correct_N.sum())
    wrong = len(correct_N) - right
    if right < half or wrong < half:
        return None
    ways = math.comb(right, half) * math.comb(wrong, half)

    def chosen(level: ScoreLevel, j: int, k: int) -> int:
        right, right_below, wrong, wrong_below = level
        return _choose(right, j) * _choose(right_below, half - j) * _choose(wrong, k) * _choose(wrong_below, half - k)

    return _won(scores_N, correct_N, chosen) / ways


def natural(scores_N: NDArray[Any], correct_N: Bools, n: int) -> float | None:
    """The probability that the best of n solutions of one problem is correct; None with fewer than n solutions."""
    if len(correct_N) < n:
        return None

    def chosen(level: ScoreLevel, j: int, k: int) -> int:
        right, right_below, wrong, wrong_below = level
        return _choose(right, j) * _choose(wrong, k) * _choose(right_below + wrong_below, n - j - k)

    return _won(scores_N, correct_N, chosen) / math.comb(len(correct_N), n)


def pass_at(scores_N: NDArray[Any], correct_N: Bools, n: int) -> float | None:
    """The probability that at least one of n solutions of one problem is correct: 1 - C(incorrect, n)/C(all, n)
    (Chen et al. 2021, arXiv 2107.03374); None with fewer than n solutions. The scores have no influence."""
    if len(correct_N) < n:
        return None
    return 1.0 - math.comb(int((~correct_N).sum()), n) / math.comb(len(correct_N), n)


def _won(scores_N: NDArray[Any], correct_N: Bools, chosen: Callable[[ScoreLevel, int, int], int]) -> float:
    """The ways to choose (`chosen`) with j correct and k incorrect solutions tied at the top, times j/(j+k), summed
    over the possible top levels; with j = 0 the best is never correct."""
    return sum(
        chosen(level, j, k) * j / (j + k)
        for level in _levels(scores_N, correct_N)
        for j in range(1, level[0] + 1)
        for k in range(level[2] + 1)
    )


def _levels(scores_N: NDArray[Any], correct_N: Bools) -> list[ScoreLevel]:
    sides = np.sort(scores_N[correct_N]), np.sort(scores_N[~correct_N])
    found: list[ScoreLevel] = []
    for value in np.unique(scores_N):
        below, up_to = ([int(np.searchsorted(side, value, end)) for side in sides] for end in ("left", "right"))
        found.append((up_to[0] - below[0], below[0], up_to[1] - below[1], below[1]))
    return found


def _choose(n: int, k: int) -> int:
    """C(n, k), or 0 for a negative k."""
    return math.comb(n, k) if k >= 0 else 0


def by_problem(
    scores_N: NDArray[Any], correct_N: Bools, problems_N: Ints, n: int, accuracy: Callable[..., float | None]
) -> list[float | None]:
    """`accuracy` (balanced, natural or pass_at) of each problem 0..P-1; None if a problem has too few solutions."""
    count = int(problems_N.max()) + 1 if len(problems_N) else 0
    return [accuracy(scores_N[problems_N == p], correct_N[problems_N == p], n) for p in range(count)]


def curve_point(values: Sequence[float | None], weights_BP: Float64) -> Estimate:
    """The mean over the problems with a value, with a bootstrap over all problems."""
    there_P = np.array([value is not None for value in values], dtype=np.float64)
    values_P = np.array([value or 0.0 for value in values], dtype=np.float64)
    return ratio(values_P, there_P, weights_BP, int(there_P.sum()))


# --- localisation -----------------------------------------------------------------------------------------------------


def credit(prefix_scores_K: NDArray[Any], flaw: int) -> float:
    """The probability that the largest fall of K+1 prefix scores (the empty solution first) is at step `flaw` (from 0),
    with ties broken at random. Raises ValueError for a flaw outside the K steps."""
    falls_K = prefix_scores_K[:-1].astype(np.float64) - prefix_scores_K[1:].astype(np.float64)
    if not 0 <= flaw < len(falls_K):
        raise ValueError(f"step {flaw} is not one of the {len(falls_K)} steps")
    largest_K = falls_K == falls_K.max()
    return float(largest_K[flaw] / largest_K.sum())


# --- separability -----------------------------------------------------------------------------------------------------

FEATURES = 2048
FACTOR = np.uint64(1_000_003)
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Fibonacci hashing
RIDGE = 1.0  # on the weights; rows have length 1, so this equals the evidence of a few solutions
INTERCEPT_RIDGE = 1e-6


def folds_of(problem_ids: Sequence[str], folds: int) -> Ints:
    """int64 [P]: the fold of each problem, by a hash of its id; with few problems some folds may be empty."""
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
            # A polynomial of the n tokens, then a multiplication with n that spreads the bits; both wrap around.
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
    pairs_P: Ints | None = None,
) -> Estimate:
    """The AUC of held-out helpful solutions against held-out sneaky ones, over all pairs within a fold. With `pairs_P`,
    over pairs of problems with equal numbers in it (each number within one fold). No value if a fold's training folds
    have only one role."""
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
    return auc_of(counts, weights_BP, fold_P if pairs_P is None else pairs_P)


# --- the parts of an evaluation ---------------------------------------------------------------------------------------

NOTHING = Estimate(None, None, None, 0, 0)


def best_of_n(sources: Mapping[str, ScoredRollouts], section: Evaluate, weights_BP: Float64) -> list[dict[str, Any]]:
    """Per source, the balanced curve over both roles' solutions, and the natural one over the helpful ones."""
    found = []
    for name, own in sources.items():
        columns = (own.scores_N, own.correct_N, own.problems_N)
        mask = own.helpful_N
        helpful = (own.scores_N[mask], own.correct_N[mask], own.problems_N[mask])
        chance = mean_of(helpful[1].astype(np.float64), helpful[2], weights_BP)
        natural_points = []
        for n in sizes(section.samples):
            ceiling = curve_point(by_problem(*helpful, n, pass_at), weights_BP)
            point = _point(by_problem(*helpful, n, natural), n, weights_BP)
            natural_points.append({**point, "pass_at_n": ceiling, "chance": chance})
        both = [_point(by_problem(*columns, n, balanced), n, weights_BP) for n in sizes(2 * section.samples)]
        found.append({"source": name, "balanced": both, "natural": natural_points})
    return found


def _point(values: Sequence[float | None], n: int, weights_BP: Float64) -> dict[str, Any]:
    point = curve_point(values, weights_BP)
    return {"n": n, "accuracy": point, "excluded": len(values) - point.n}


def helpful_shares(own: ScoredRollouts, threshold: float) -> dict[str, Any]:
    """Shares of the round's helpful solutions: correct ones, and accepted ones of these."""
    helpful, solved = own.helpful_N, own.solved_N
    return {
        "threshold": threshold,
        "helpful_accuracy": share_of(own.correct_N[helpful], own.problems_N[helpful]),
        "accepted_helpful": share_of(own.scores_N[solved] >= threshold, own.problems_N[solved]),
    }


def detection(
    name: str, own: ScoredRollouts, samples: ScoredRollouts, threshold: float, weights_BP: Float64
) -> dict[str, Any]:
    """Fooled rate, AUC and ROC for one source's flaws; the positives are the round's correct helpful
    solutions."""
    solved, mask = own.solved_N, samples.flaws_N
    positives_N, places_N = own.scores_N[solved], own.problems_N[solved]
    negatives_M, places_M = samples.scores_N[mask], samples.problems_N[mask]
    counts = wins(positives_N, places_N, negatives_M, places_M, weights_BP.shape[1])
    return {
        "source": name,
        "solutions": len(samples.rollouts),
        "fooled_rate": share_of(negatives_M >= threshold, places_M),
        "auc": auc_of(counts, weights_BP),
        "roc": [list(point) for point in roc(positives_N, negatives_M)],
    }


def separability(own: ScoredRollouts, solutions: Sequence[NDArray[np.int32]], weights_BP: Float64) -> dict[str, Any]:
    """The probe's AUC over all solutions of the round's prover, and within the correct and within the incorrect ones,
    there by pairs of one problem.

    `solutions`: the tokens of each, int32 [C], as the verifier reads them."""
    fold_P = folds_of([problem.id for problem in own.pool], FOLDS)
    rows_NF = features(solutions, NGRAMS)
    strata = {"overall": np.ones(len(rows_NF), dtype=bool), "correct": own.correct_N, "incorrect": ~own.correct_N}
    within_P = np.arange(len(fold_P))  # because, for example, one role solves easier problems than the other
    found = dict.fromkeys(strata, NOTHING)
    for name, mask in strata.items():
        if mask.any():
            pairs_P = None if name == "overall" else within_P
            columns = (rows_NF[mask], own.helpful_N[mask], own.problems_N[mask])
            found[name] = probe(*columns, fold_P, weights_BP, pairs_P)
    return found


def calibration(own: ScoredRollouts, verifier: Verifier, weights_BP: Float64) -> dict[str, Any]:
    """Raw sigmoid(score) and the cross-fitted Platt probability, over all solutions of the round's prover."""
    fold_P = folds_of([problem.id for problem in own.pool], FOLDS)
    fitted_N = cross_fitted(own.scores_N, own.correct_N, own.problems_N, fold_P)
    slope, offset = platt(own.scores_N, own.correct_N)
    return {
        "raw_is_probability": verifier.loss == "cross_entropy" and verifier.ensemble.kind == "none",
        "raw": _calibrated(sigmoid(own.scores_N), own, weights_BP),
        "fitted": None if fitted_N is None else _calibrated(fitted_N, own, weights_BP),
        "slope": slope,
        "offset": offset,
    }


def _calibrated(predicted_N: Float64, own: ScoredRollouts, weights_BP: Float64) -> dict[str, Any]:
    bin_N = equal_mass(predicted_N, BINS)
    bins = []
    for number in np.unique(bin_N):
        of_N = bin_N == number
        correct = share_of(own.correct_N[of_N], own.problems_N[of_N])
        bins.append({"predicted": float(predicted_N[of_N].mean()), "correct": correct})
    error, by_chance = ece(predicted_N, own.correct_N, own.problems_N, BINS, weights_BP)
    return {
        "ece": error,
        "ece_by_chance": by_chance,
        "brier": mean_of((predicted_N - own.correct_N) ** 2, own.problems_N, weights_BP),
        "bins": bins,
    }


def localisation(
    prefixes: Sequence[Sequence[float]], flaws: Sequence[int], problems: Sequence[int], weights_BP: Any
) -> dict[str, Any]:
    """How often the largest fall of the score is at the first wrong step, compared with guessing, and by step
    number."""
    if not flaws:
        return {"known": True, "accuracy": NOTHING, "chance": None, "gain": NOTHING, "solutions": 0}
    credits_N = np.array([credit(np.array(s), flaw) for s, flaw in zip(prefixes, flaws, strict=True)])
    steps_N = np.array([len(s) - 1 for s in prefixes], dtype=np.int64)
    problems_N = np.array(problems, dtype=np.int64)
    return {
        "known": True,
        "accuracy": mean_of(credits_N, problems_N, weights_BP),
        "chance": float(np.mean(1.0 / steps_N)),  # of guessing a step
        "gain": mean_of(credits_N - 1.0 / steps_N, problems_N, weights_BP),
        "solutions": len(flaws),
    }


def cross(name: str, samples: ScoredRollouts, threshold: float, weights_BP: Float64) -> dict[str, Any]:
    """How a verifier with this threshold decides about one prover's samples, by the definitions of a round's metrics
    (pvg.game.statistics)."""
    scores_N, problems_N = samples.scores_N, samples.problems_N
    correct_N, flaws_N, accepted_N = samples.correct_N, samples.flaws_N, scores_N >= threshold
    counts = wins(
        scores_N[correct_N], problems_N[correct_N], scores_N[~correct_N], problems_N[~correct_N], weights_BP.shape[1]
    )
    return {
        "source": name,
        "fooled_rate": share_of(accepted_N[flaws_N], problems_N[flaws_N]),
        "auc": auc_of(counts, weights_BP),
        "matthews": matthews_of(accepted_N, correct_N, problems_N, weights_BP),
    }


def matthews_of(accepted_N: Bools, correct_N: Bools, problems_N: Ints, weights_BP: Float64) -> Estimate:
    """The Matthews correlation with a bootstrap over problems. Resamples in which all decisions or all solutions are
    equal have no value."""
    all_B, accepted_B, correct_B, both_B = (
        weights_BP @ np.bincount(problems_N, weights=of_N, minlength=weights_BP.shape[1])
        for of_N in (np.ones(len(problems_N)), accepted_N, correct_N, accepted_N & correct_N)
    )
    spread_B = accepted_B * (all_B - accepted_B) * correct_B * (all_B - correct_B)
    with np.errstate(divide="ignore", invalid="ignore"):
        replicates_B = (all_B * both_B - accepted_B * correct_B) / np.sqrt(spread_B)
    value = matthews(accepted_N, correct_N)
    return percentile(value, replicates_B, len(problems_N), len(np.unique(problems_N)))
