"""Logistic regression with a ridge, deterministic and in float64, for the Platt fit and the separability probe."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pvg.evaluation.intervals import Float64

NEWTON_STEPS = 50
CONJUGATE_STEPS = 200
CONVERGED = 1e-9  # largest change of a parameter in a Newton step
SOLVED = 1e-10  # residual of the inner solve, relative


def sigmoid(x: NDArray[Any]) -> Float64:
    """1 / (1 + e^-x), without overflow."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x.astype(np.float64))))


def fit(design_ND: Float64, targets_N: Float64, penalty_D: Float64) -> Float64:
    """float64 [D]: the minimum of sum_n [log(1 + e^z) - t z] + sum_d penalty_d w_d^2 / 2 with z = design w, targets t
    in [0, 1]. Newton's method; each step is solved by conjugate gradients, so that no D x D matrix is made, and halved
    until it lowers the objective. Raises ValueError for a penalty of 0: there may be no minimum then."""
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
    """x with (design' diag(curvature) design + diag(penalty)) x = right, by conjugate gradients (Hestenes and Stiefel
    1952) with the diagonal as preconditioner."""
    diagonal_D = np.einsum("nd,n,nd->d", design_ND, curvature_N, design_ND, optimize=True) + penalty_D
    x_D = np.zeros_like(right_D)
    residual_D = right_D.copy()
    eased_D = residual_D / diagonal_D
    direction_D = eased_D.copy()
    size = float(residual_D @ eased_D)
    enough = SOLVED**2 * size
    for _ in range(CONJUGATE_STEPS):
        if size <= enough:
            break
        image_D = design_ND.T @ (curvature_N * (design_ND @ direction_D)) + penalty_D * direction_D
        length = size / float(direction_D @ image_D)
        x_D += length * direction_D
        residual_D -= length * image_D
        eased_D = residual_D / diagonal_D
        before, size = size, float(residual_D @ eased_D)
        direction_D = eased_D + (size / before) * direction_D
    return x_D
