"""Calibration: whether sigmoid(score) is the probability of being correct, before and after a Platt fit.

Training with cross-entropy aims at this. Bradley-Terry scores are only defined up to a constant per problem, so for
them use the fitted figures. The fit is cross-validated by problem, so no problem is calibrated by its own solutions.
The ridge logistic regression (`fit`) is deterministic and in float64; the separability probe uses it too.

Sources: Platt 1999 (the fit, with his smoothed targets); Brier 1950; ECE in bins of equal mass as in Nguyen and
O'Connor 2015 (arXiv 1508.05154); Guo et al. 2017 (arXiv 1706.04599) for the measure itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, cg
from scipy.special import expit

from pvg.evaluation.intervals import Estimate, Float64, Ints, mean_of, share_of

NEWTON_STEPS = 50
CONJUGATE_STEPS = 200
CONVERGED = 1e-9  # largest change of a parameter in the last Newton step
SOLVED = 1e-10  # relative residual of the inner solve


def sigmoid(x: NDArray[Any]) -> Float64:
    """1 / (1 + e^-x), without overflow."""
    return np.asarray(expit(x.astype(np.float64)))


def fit(design_ND: Float64, targets_N: Float64, penalty_D: Float64) -> Float64:
    """float64 [D]: the minimum of sum_n [log(1 + e^z) - t z] + sum_d penalty_d w_d^2 / 2 with z = design w, targets t
    in [0, 1]. Newton's method: conjugate gradients solve each step without a D x D matrix, and the step is halved until
    it lowers the objective. Raises ValueError for a penalty of 0, because there may be no minimum."""
    if not (penalty_D > 0).all():
        raise ValueError("every parameter needs a penalty above 0")
    weights_D = np.zeros(design_ND.shape[1])

    def objective(at_D: Float64) -> float:
        z_N = design_ND @ at_D
        return float(np.sum(np.logaddexp(0.0, z_N) - targets_N * z_N) + 0.5 * np.sum(penalty_D * at_D**2))

    lowest = objective(weights_D)
    for _ in range(NEWTON_STEPS):
        p_N = sigmoid(design_ND @ weights_D)
        gradient_D = design_ND.T @ (p_N - targets_N) + penalty_D * weights_D
        step_D = _solve(design_ND, p_N * (1.0 - p_N), penalty_D, gradient_D)
        reached = objective(weights_D - step_D)
        while reached > lowest and float(np.abs(step_D).max()) >= CONVERGED:
            step_D /= 2.0
            reached = objective(weights_D - step_D)
        if float(np.abs(step_D).max()) < CONVERGED:
            break
        weights_D, lowest = weights_D - step_D, reached
    return weights_D


def _solve(design_ND: Float64, curvature_N: Float64, penalty_D: Float64, right_D: Float64) -> Float64:
    """x with (design' diag(curvature) design + diag(penalty)) x = right, by conjugate gradients with the diagonal as
    preconditioner."""
    size = len(right_D)
    diagonal_D = np.einsum("nd,n,nd->d", design_ND, curvature_N, design_ND, optimize=True) + penalty_D
    system = LinearOperator(
        (size, size), lambda x_D: design_ND.T @ (curvature_N * (design_ND @ x_D)) + penalty_D * x_D, dtype=np.float64
    )
    eased = LinearOperator((size, size), lambda x_D: x_D / diagonal_D, dtype=np.float64)
    x_D, _ = cg(system, right_D, rtol=SOLVED, maxiter=CONJUGATE_STEPS, M=eased)
    return np.asarray(x_D)


# --- calibration ------------------------------------------------------------------------------------------------------

PLATT_RIDGE = 1e-6  # on both parameters, because a separable set has no finite best fit without it


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Solutions with adjacent predictions: their mean prediction and the share that is correct."""

    predicted: float
    correct: Estimate


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
    predicted_N: Float64,
    correct_N: NDArray[np.bool_],
    problems_N: Ints,
    bins: int,
    weights_BP: Float64,
    confidence: float,
) -> tuple[Estimate, float | None]:
    """The calibration error, and the error expected by chance for a calibrated verifier on as many problems.

    The error of a finite sample is a norm, so near calibration it is above the true error, and the percentiles of a
    bootstrap are above both. But the bootstrap shows the noise |g* - g| of the bins' gaps g (with fixed bins) in the
    same norm. By the triangle inequality, the true error differs from the measured one by at most this noise. So the
    interval is the error plus and minus the noise's quantile at `confidence`, at least 0. It contains the true error at
    least that often and is rather too wide. The mean of the noise is the error expected by chance."""
    problems, total = len(np.unique(problems_N)), len(predicted_N)
    if not total:
        return Estimate(None, None, None, 0, 0), None
    bin_N = equal_mass(predicted_N, bins)
    value = calibration_error(predicted_N, correct_N, bin_N)
    noise_B = _noise(predicted_N - correct_N, bin_N, problems_N, weights_BP)
    if problems < 2 or float(noise_B.max()) <= 1e-12:
        return Estimate(value, None, None, total, problems), None
    reach = float(np.quantile(noise_B, confidence))
    return Estimate(value, max(0.0, value - reach), min(1.0, value + reach), total, problems), float(noise_B.mean())


def _noise(gap_N: Float64, bin_N: Ints, problems_N: Ints, weights_BP: Float64) -> Float64:
    """float64 [B]: sum_b |g*_b - g_b| of each resample; g_b is a bin's share of the mean gap."""
    used, place_N = np.unique(bin_N, return_inverse=True)
    sums_PQ = np.zeros((weights_BP.shape[1], len(used)))
    np.add.at(sums_PQ, (problems_N, place_N), gap_N)
    size_P = np.bincount(problems_N, minlength=weights_BP.shape[1]).astype(np.float64)
    drawn_BQ = (weights_BP @ sums_PQ) / np.maximum(1.0, weights_BP @ size_P)[:, None]
    return np.asarray(np.abs(drawn_BQ - sums_PQ.sum(axis=0) / len(gap_N)).sum(axis=1))


def brier(
    predicted_N: Float64, correct_N: NDArray[np.bool_], problems_N: Ints, weights_BP: Float64, confidence: float
) -> Estimate:
    """mean (prediction - correct)^2, in [0, 1]; lower is better."""
    return mean_of((predicted_N - correct_N) ** 2, problems_N, weights_BP, confidence)


def reliability(
    predicted_N: Float64, correct_N: NDArray[np.bool_], problems_N: Ints, bins: int, confidence: float
) -> list[CalibrationBin]:
    """The bins in order of their predictions, each with its share of correct solutions and the interval of this
    share."""
    bin_N = equal_mass(predicted_N, bins)
    return [
        CalibrationBin(
            float(predicted_N[bin_N == number].mean()),
            share_of(correct_N[bin_N == number], problems_N[bin_N == number], confidence),
        )
        for number in np.unique(bin_N)
    ]
