"""Importance weights: rollouts were sampled by mu, and are trained on as if by pi_start, the policy at batch start.

mu is not pi_start where the rollout is stale, and never quite where a server's arithmetic is not the trainer's. The
weight rho = pi_start / mu of a token corrects for it. Its variance has no bound, so it is

- `truncated`: min(rho, high) (truncated importance sampling; Ionides 2008; for samplers apart from the trainer Yao et
  al. 2025, and AReaL, arXiv 2505.24298, for stale rollouts), or
- `masked`: rho where low <= rho <= high, else 0 (IcePop, Ring-1T, arXiv 2510.18855).

Levels: rho is of a token, or of the whole sequence and the same on all of its tokens: the product of its tokens' rho,
without bias and of a variance that grows with length, or the geometric mean of them, which does not grow.

Invariants: weights are detached. A token that is masked out stays in every denominator: row weights are made of
lengths before, so that masking takes gradient away and never makes the rest count for more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from pvg.telemetry.metrics import Metrics

Kind = Literal["none", "truncated", "masked"]
Level = Literal["token", "sequence", "geometric"]
Ratio = Callable[[Tensor, Tensor], Tensor]

LARGEST_LOG = 20.0  # of a sequence's product: e^20 is far over any bound, and a float32 still


def token_ratio(log_ratios_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """pi_start / mu of each token."""
    return log_ratios_BL.exp()


def geometric_ratio(log_ratios_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """exp(mean_t log ratio) on every token: the ratio of losses whose action is the sequence."""
    counts_B1 = mask_BL.sum(dim=1, keepdim=True).clamp(min=1)
    return (log_ratios_BL.sum(dim=1, keepdim=True) / counts_B1).exp().expand_as(log_ratios_BL)


def sequence_ratio(log_ratios_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """exp(sum_t log ratio) on every token, between e^-20 and e^20."""
    sums_B1 = log_ratios_BL.sum(dim=1, keepdim=True)
    return sums_B1.clamp(-LARGEST_LOG, LARGEST_LOG).exp().expand_as(log_ratios_BL)


RATIOS: dict[Level, Ratio] = {"token": token_ratio, "sequence": sequence_ratio, "geometric": geometric_ratio}


def importance_weights(ratios: Tensor, kind: Kind, low: float, high: float) -> Tensor:
    """Elementwise, what the objective is multiplied with, of raw `ratios`. `low` counts for masks alone."""
    if kind == "none":
        return torch.ones_like(ratios)
    if kind == "truncated":
        return ratios.clamp(max=high)
    return torch.where(outside(ratios, kind, low, high), torch.zeros_like(ratios), ratios)


def outside(ratios: Tensor, kind: Kind, low: float, high: float) -> Tensor:
    """Elementwise, whether the weight is not the ratio."""
    if kind == "none":
        return torch.zeros_like(ratios, dtype=torch.bool)
    return ratios > high if kind == "truncated" else (ratios < low) | (ratios > high)


@torch.no_grad()
def importance_metrics(ratios_N: Tensor, kind: Kind, low: float, high: float) -> Metrics:
    """Over completion tokens: start_ratio_mean and start_ratio_max (raw, before any bound; 1 for rows that were not
    asked about), start_outside (share that is truncated or masked)."""
    metrics = Metrics()
    if not ratios_N.numel():
        return metrics
    cut_N = outside(ratios_N, kind, low, high)
    total, most, cut = torch.stack([ratios_N.sum(), ratios_N.max(), cut_N.sum()]).double().tolist()
    metrics.add_mean("start_ratio_mean", total, ratios_N.numel())
    metrics.add_max("start_ratio_max", most)
    metrics.add_mean("start_outside", cut, ratios_N.numel())
    return metrics
