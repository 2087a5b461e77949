"""The KL penalty against a reference policy, from log-probs of the sampled tokens.

With d = log pi - log ref on tokens sampled from pi (Schulman's estimators):
k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1. k1 and k3 estimate the KL without bias, k3 with little variance and never
below 0. As a *loss* each has a gradient of its own, and only k2's is that of the KL, E[d grad log pi]: k1's is 0 in
expectation, and k3's that of the KL the other way round, KL(ref || pi). So value and gradient are chosen apart:

    k3_k2, k1_k2    the value of the one with the gradient of k2
    k2              both of k2, whose value is biased
    k3              both of k3: the penalty that GRPO was published with (arXiv 2402.03300)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from pvg.config.sections import MOST_ENTROPY_BONUS, Training

Estimator = Literal["k3_k2", "k1_k2", "k2", "k3"]


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d, elementwise, in nats; of either sign."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d^2 / 2, elementwise, in nats."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(-d) + d - 1, elementwise, in nats; never negative."""
    difference = logprobs - reference
    return torch.expm1(-difference) + difference


def kl_penalty(logprobs: Tensor, reference: Tensor, estimator: Estimator = "k3_k2") -> Tensor:
    """Elementwise, in nats, differentiable in `logprobs`."""
    return PENALTIES[estimator](logprobs, reference)


def _k3_k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    gradient = k2(logprobs, reference)
    return gradient + (k3(logprobs, reference) - gradient).detach()


def _k1_k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    gradient = k2(logprobs, reference)
    return gradient + (k1(logprobs, reference) - gradient).detach()


PENALTIES: dict[Estimator, Callable[[Tensor, Tensor], Tensor]] = {"k3_k2": _k3_k2, "k1_k2": _k1_k2, "k2": k2, "k3": k3}


# Coefficients that follow a measure from step to step: of the KL penalty, and of the entropy bonus.
#
#     control = Control(section)
#     loss = ... + control.kl * penalty - control.bonus * entropy
#     control.observe(metrics)                     # after the step: what the next one has
#
# Both are functions of what a whole step measured, so they are the same however it was split into micro-batches.

MOST_ERROR = 0.2  # of the KL, relative: Ziegler's
KL_HORIZON = 10.0  # steps in which an error of a fifth or more moves the coefficient by a fifth: Ziegler's
KL_RANGE = 1000.0  # times more or less than training.kl.coefficient: what a long drift cannot take beyond reach


def adapted_kl(coefficient: float, kl: float, target: float, horizon: float) -> float:
    """beta (1 + e / horizon) with e = clip(kl / target - 1, -0.2, 0.2): the proportional controller, in log space, of
    Ziegler et al. (arXiv 1909.08593, section 2.2; its K_beta = 0.1 is a horizon of 10 steps). `kl` and `target` in nats
    of the same measure."""
    error = min(max(kl / target - 1.0, -MOST_ERROR), MOST_ERROR)
    return coefficient * (1.0 + error / horizon)


def adapted_entropy(coefficient: float, entropy: float, target: float, step: float, most: float) -> float:
    """c + step where the entropy (nats) is below its target, c - step where it is above; within 0 and `most`. Adaptive
    entropy control of Skywork-OR1 (arXiv 2505.22312, section 3.2.5)."""
    if entropy == target:
        return coefficient
    return min(max(coefficient + (step if entropy < target else -step), 0.0), most)


def acting_entropy(coefficient: float, entropy: float | None, target: float | None) -> float:
    """The bonus's coefficient in a step: `coefficient`, but 0 while the entropy is above its target, where there is
    one (Skywork-OR1: c 1{entropy <= target}). None: nothing was measured yet."""
    if target is not None and entropy is not None and entropy > target:
        return 0.0
    return coefficient


class Control:
    """`kl` and `bonus` of the step that is next. Without targets they stay as they are configured.

    The entropy that a step is measured by is the one of the step before: its coefficient must be known before its first
    micro-batch, and its entropy is only after the last.
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
        """Take in a step's `kl` and `entropy_exact`, where it has them."""
        penalty, bonus = self._section.kl, self._section.entropy
        kl, entropy = metrics.get("kl"), metrics.get("entropy_exact")
        if penalty.kind == "adaptive" and kl is not None and math.isfinite(kl):
            adapted = adapted_kl(self.kl, kl, penalty.target, KL_HORIZON)
            self.kl = min(max(adapted, penalty.coefficient / KL_RANGE), penalty.coefficient * KL_RANGE)
        if bonus.kind == "adaptive" and entropy is not None and math.isfinite(entropy):
            self._entropy = entropy
            self._entropy_coefficient = adapted_entropy(
                self._entropy_coefficient, entropy, bonus.target, bonus.step, MOST_ENTROPY_BONUS
            )

    @property
    def _adapts(self) -> bool:
        return "adaptive" in (self._section.kl.kind, self._section.entropy.kind)

    # --- resuming ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """As JSON data, from which every bit comes back; {} where nothing is adapted."""
        if not self._adapts:
            return {}
        return {"kl": self.kl, "entropy_coefficient": self._entropy_coefficient, "entropy": self._entropy}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if not self._adapts:
            return
        self.kl = state["kl"]
        self._entropy_coefficient, self._entropy = state["entropy_coefficient"], state["entropy"]
