"""The KL penalty against a reference policy, from log-probs of the sampled tokens.

With d = log pi - log ref on tokens sampled from pi (Schulman's estimators; game.md):
k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1. k3 estimates the KL without bias and with little variance, but as a *loss*
only k2 has its gradient, E[d grad log pi]; k3's own gradient is that of the KL the other way round, KL(ref || pi).
"""

from __future__ import annotations

import torch
from torch import Tensor


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d^2 / 2, elementwise, in nats."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(-d) + d - 1, elementwise, in nats; never negative."""
    difference = logprobs - reference
    return torch.expm1(-difference) + difference


def kl_penalty(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Elementwise: the value of k3 with the gradient of k2."""
    gradient = k2(logprobs, reference)
    return gradient + (k3(logprobs, reference) - gradient).detach()
