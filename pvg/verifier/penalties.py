"""Penalties that ask of a verifier to be as good in every environment (a round, a source): V-REx and IRMv1.

Pure functions of what a batch's M pairs gave and of the environment each belongs to: one scatter-add (index_add) of the
values and one of their weights, no loop over environments. Environments without a pair in the batch are left out.

    R_e = sum of w_m l_m / sum of w_m over the pairs m of environment e         (w: a batch's pair weights, or 1)

    V-REx   Var_e(R_e), over the E environments that are there (divided by E)              arXiv 2003.00688
    IRMv1   mean_e g_e^2,  g_e = d R_e(a V) / d a  at a = 1                                arXiv 1907.02893

The dummy multiplier a scales the *scores*. With the losses' derivatives worked out, g_e is a mean over pairs like R_e:

    bradley_terry    d l(aV)/da = -sigmoid(-d) d,  d = V_c - V_i
    cross_entropy    d l(aV)/da = (-sigmoid(-V_c) V_c + sigmoid(V_i) V_i) / 2

Micro-batches: neither penalty is a sum over pairs, but the gradient of each is that of a weighted sum whose weights are
constants of the whole batch. So two passes are exact. The first, without a gradient, gathers R_e or g_e of the whole
batch (totals and weights add up over micro-batches); the second trains on sum_m weight_m value_m, any way it is cut:

    d Var_e(R_e)   = sum_m  w_m / W_e  2 (R_e - mean_e R_e) / E   d l_m                     (`vrex_weights`)
    d mean_e g_e^2 = sum_m  w_m / W_e  2 g_e / E                  d (d l_m(aV)/da)          (`irm_weights`)

W_e is the sum of w over the pairs of e. First derivatives only: V-REx takes the mean as a constant, whose gradient
cancels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PairLoss = Callable[[Tensor, Tensor], Tensor]


def bradley_terry_slopes(correct_M: Tensor, incorrect_M: Tensor) -> Tensor:
    """d l(a V_c, a V_i) / d a at a = 1 of each pair's Bradley-Terry loss: float32 [M], differentiable."""
    gaps_M = correct_M - incorrect_M
    return -torch.sigmoid(-gaps_M) * gaps_M


def cross_entropy_slopes(correct_M: Tensor, incorrect_M: Tensor) -> Tensor:
    """The same of each pair's mean binary cross-entropy."""
    return 0.5 * (torch.sigmoid(incorrect_M) * incorrect_M - torch.sigmoid(-correct_M) * correct_M)


# By the names of pvg.verifier.losses.LOSSES.
SLOPES: dict[str, PairLoss] = {
    "bradley_terry": bradley_terry_slopes,
    "cross_entropy": cross_entropy_slopes,
}


def slopes_of(name: str, loss: PairLoss) -> PairLoss:
    """d l(a V_c, a V_i) / d a at a = 1: by the table where the loss is pvg's own, else (dl/dV_c) V_c + (dl/dV_i) V_i
    with the loss differentiated by autograd."""
    if name in SLOPES:
        return SLOPES[name]

    def slopes(correct_M: Tensor, incorrect_M: Tensor) -> Tensor:
        with torch.enable_grad():  # a survey has no gradient of its own
            scores = [s if s.requires_grad else s.detach().requires_grad_() for s in (correct_M, incorrect_M)]
            # A pair's loss depends on its own two scores alone, so the gradient of the sum is that of each.
            gradients = torch.autograd.grad(loss(*scores).sum(), scores, create_graph=True)
            slopes_M = gradients[0] * scores[0] + gradients[1] * scores[1]
        return slopes_M if torch.is_grad_enabled() else slopes_M.detach()

    return slopes


def environment_means(
    values_M: Tensor, environments_M: Tensor, environments: int, weights_M: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(means_E, totals_E): each environment's weighted mean of `values_M` (0 where it has no pair) and the sum of its
    weights. `environments_M` int64 in 0..environments-1; `weights_M` not negative, None: all 1. Differentiable in the
    values."""
    if weights_M is None:
        totals_E = torch.bincount(environments_M, minlength=environments).to(values_M.dtype)
    else:
        totals_E = values_M.new_zeros(environments).index_add(0, environments_M, weights_M)
        values_M = values_M * weights_M
    sums_E = values_M.new_zeros(environments).index_add(0, environments_M, values_M)
    return sums_E / totals_E.clamp_min(torch.finfo(totals_E.dtype).tiny), totals_E


def vrex(losses_M: Tensor, environments_M: Tensor, environments: int, weights_M: Tensor | None = None) -> Tensor:
    """V-REx's Var_e(R_e): a scalar, differentiable in the losses; 0 where there are less than two environments."""
    means_E, totals_E = environment_means(losses_M, environments_M, environments, weights_M)
    there_E = _there(totals_E)
    mean = torch.dot(there_E, means_E.detach())  # its own gradient cancels: the deviations from it sum to 0
    return torch.dot(there_E, (means_E - mean).square())


def irm_v1(slopes_M: Tensor, environments_M: Tensor, environments: int, weights_M: Tensor | None = None) -> Tensor:
    """IRMv1's mean_e g_e^2: a scalar, differentiable in the slopes (see SLOPES), and through them in the scores."""
    means_E, totals_E = environment_means(slopes_M, environments_M, environments, weights_M)
    return torch.dot(_there(totals_E), means_E.square())


def vrex_weights(means_E: Tensor, totals_E: Tensor) -> Tensor:
    """By environment, what multiplies w_m l_m in the second pass (see the module): float32 [E], without a gradient.

    `means_E` and `totals_E` are `environment_means` of the whole batch's losses.
    """
    return 2.0 * _per_weight(means_E - torch.dot(_there(totals_E), means_E), totals_E)


def irm_weights(means_E: Tensor, totals_E: Tensor) -> Tensor:
    """The same for IRMv1, of the whole batch's slopes."""
    return 2.0 * _per_weight(means_E, totals_E)


def _there(totals_E: Tensor) -> Tensor:
    """1 / (number of environments that have pairs) for those [E], 0 for the others."""
    there_E = totals_E.sign()
    return there_E / there_E.sum().clamp_min(1.0)


def _per_weight(values_E: Tensor, totals_E: Tensor) -> Tensor:
    """values / (E W_e), 0 for environments without pairs."""
    tiny = torch.finfo(totals_E.dtype).tiny
    return (_there(totals_E) * values_E / totals_E.clamp_min(tiny)).detach()
