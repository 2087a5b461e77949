"""The KL penalty against a reference policy, and its adaptive coefficient.

With d = log pi - log ref on tokens sampled from pi (Schulman's estimators): k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1.
k1 and k3 estimate the KL without bias; k3 has a low variance and is never negative. As *losses*, only k2 has the
gradient of the KL, E[d grad log pi]. k1's gradient is 0 in expectation, k3's is that of the reverse KL(ref || pi). So
the penalty has the value of k3 and the gradient of k2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pvg.config.training import Training


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d^2 / 2, elementwise, in nats."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(-d) + d - 1, elementwise, in nats; never negative."""
    difference = logprobs - reference
    return torch.expm1(-difference) + difference


def kl_penalty(logprobs: Tensor, reference: Tensor) -> Tensor:
    """The penalty, elementwise, in nats, with k3's value and k2's gradient; differentiable in `logprobs`."""
    gradient = k2(logprobs, reference)
    return gradient + (k3(logprobs, reference) - gradient).detach()


# --- adaptive coefficients --------------------------------------------------------------------------------------------

MOST_ERROR = 0.2  # relative error of the KL; Ziegler et al.'s value
KL_HORIZON = 10.0  # steps in which an error of a fifth or more moves the coefficient by a fifth: Ziegler's
KL_RANGE = 1000.0  # maximal factor above or below training.kl.coefficient, so that a long drift can be reversed


def adapted_kl(coefficient: float, kl: float, target: float, horizon: float) -> float:
    """beta (1 + e / horizon) with e = clip(kl / target - 1, -0.2, 0.2): the proportional controller in log space of
    Ziegler et al. (arXiv 1909.08593, section 2.2; their K_beta = 0.1 is a horizon of 10 steps). `kl` and `target` are
    in nats, in the same measure."""
    error = min(max(kl / target - 1.0, -MOST_ERROR), MOST_ERROR)
    return coefficient * (1.0 + error / horizon)


class PenaltyControl:
    """`kl`: the coefficient of the next step. Without a target it stays as configured.

        loss = ... + control.kl * penalty
        control.observe(metrics)                     # after the step; sets the next coefficient

    It depends on metrics of whole steps, so the split into micro-batches does not change it.
    """

    def __init__(self, section: Training) -> None:
        self._section = section.kl
        self.kl = section.kl.coefficient

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Add a step's `kl`, if it has one."""
        penalty, kl = self._section, metrics.get("kl")
        if penalty.kind == "adaptive" and kl is not None and math.isfinite(kl):
            adapted = adapted_kl(self.kl, kl, penalty.target, KL_HORIZON)
            self.kl = min(max(adapted, penalty.coefficient / KL_RANGE), penalty.coefficient * KL_RANGE)

    # --- resuming ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON data that restores the coefficient bit by bit; {} if it does not adapt."""
        return {"kl": self.kl} if self._section.kind == "adaptive" else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self._section.kind == "adaptive":
            self.kl = state["kl"]
