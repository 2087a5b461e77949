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

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

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
