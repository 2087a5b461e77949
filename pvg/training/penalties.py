"""The KL penalty against a reference policy, and adaptive coefficients of the KL and the entropy bonus.

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

from pvg.config.training import MOST_ENTROPY_BONUS, Training


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
ENTROPY_STEP = 1e-4  # of the entropy coefficient per step: a hundred steps from 0 to its maximum
KL_RANGE = 1000.0  # maximal factor above or below training.kl.coefficient, so that a long drift can be reversed


def adapted_kl(coefficient: float, kl: float, target: float, horizon: float) -> float:
    """beta (1 + e / horizon) with e = clip(kl / target - 1, -0.2, 0.2): the proportional controller in log space of
    Ziegler et al. (arXiv 1909.08593, section 2.2; their K_beta = 0.1 is a horizon of 10 steps). `kl` and `target` are
    in nats, in the same measure."""
    error = min(max(kl / target - 1.0, -MOST_ERROR), MOST_ERROR)
    return coefficient * (1.0 + error / horizon)


def adapted_entropy(coefficient: float, entropy: float, target: float, step: float, most: float) -> float:
    """c + step if the entropy (nats) is below its target, c - step if above, within [0, most]. Adaptive entropy control
    of Skywork-OR1 (arXiv 2505.22312, section 3.2.5)."""
    if entropy == target:
        return coefficient
    return min(max(coefficient + (step if entropy < target else -step), 0.0), most)


def acting_entropy(coefficient: float, entropy: float | None, target: float | None) -> float:
    """The coefficient of the entropy bonus in a step: `coefficient`, but 0 while the entropy exceeds its target
    (Skywork-OR1: c 1{entropy <= target}). Entropy None: not measured yet; target None: no target."""
    if target is not None and entropy is not None and entropy > target:
        return 0.0
    return coefficient


class PenaltyControl:
    """`kl` and `bonus`: the coefficients of the next step. Without targets they stay as configured.

        loss = ... + control.kl * penalty - control.bonus * entropy
        control.observe(metrics)                     # after the step; sets the next coefficients

    Coefficients depend on metrics of whole steps, so the split into micro-batches does not change them. They use the
    previous step's entropy, because a step's own is known only after its last micro-batch.
    """

    def __init__(self, section: Training) -> None:
        self._section = section
        self.kl = section.kl.coefficient
        self._entropy_coefficient = section.entropy.coefficient
        self._entropy: float | None = None

    @property
    def bonus(self) -> float:
        return acting_entropy(self._entropy_coefficient, self._entropy, self._section.entropy.target)

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Add a step's `kl` and `entropy_exact`, if it has them."""
        penalty, bonus = self._section.kl, self._section.entropy
        kl, entropy = metrics.get("kl"), metrics.get("entropy_exact")
        if penalty.kind == "adaptive" and kl is not None and math.isfinite(kl):
            adapted = adapted_kl(self.kl, kl, penalty.target, KL_HORIZON)
            self.kl = min(max(adapted, penalty.coefficient / KL_RANGE), penalty.coefficient * KL_RANGE)
        if bonus.kind == "adaptive" and entropy is not None and math.isfinite(entropy):
            self._entropy = entropy
            self._entropy_coefficient = adapted_entropy(
                self._entropy_coefficient, entropy, bonus.target, ENTROPY_STEP, MOST_ENTROPY_BONUS
            )

    @property
    def _adapts(self) -> bool:
        return "adaptive" in (self._section.kl.kind, self._section.entropy.kind)

    # --- resuming ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON data that restores the coefficients bit by bit; {} without adaptive coefficients."""
        if not self._adapts:
            return {}
        return {"kl": self.kl, "entropy_coefficient": self._entropy_coefficient, "entropy": self._entropy}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if not self._adapts:
            return
        self.kl = state["kl"]
        self._entropy_coefficient, self._entropy = state["entropy_coefficient"], state["entropy"]
