"""The penalty has the value of k3 and the gradient of k2, and k2's gradient is that of the KL."""

import math

import torch

from pvg.training.losses import k2, k3, kl_penalty


def test_values_by_hand():
    # d = ln 2: k2 = (ln 2)^2 / 2, k3 = 1/2 + ln 2 - 1. d = -ln 2: k3 = 2 - ln 2 - 1.
    logprobs = torch.tensor([math.log(0.5), math.log(0.25), -1.0])
    reference = torch.tensor([math.log(0.25), math.log(0.5), -1.0])
    squares = torch.tensor([math.log(2) ** 2 / 2, math.log(2) ** 2 / 2, 0.0])
    thirds = torch.tensor([math.log(2) - 0.5, 1 - math.log(2), 0.0])
    torch.testing.assert_close(k2(logprobs, reference), squares)
    torch.testing.assert_close(k3(logprobs, reference), thirds)
    torch.testing.assert_close(kl_penalty(logprobs, reference), thirds)


def test_the_gradient_is_d():
    # d/dx of (x - ref)^2 / 2 is x - ref; k3's own would be 1 - exp(-d).
    logprobs = torch.tensor([-0.5, -3.0, -1.0], requires_grad=True)
    reference = torch.tensor([-1.0, -1.5, -1.0])
    (gradient,) = torch.autograd.grad(kl_penalty(logprobs, reference).sum(), logprobs)
    torch.testing.assert_close(gradient, torch.tensor([0.5, -1.5, 0.0]))
    (other,) = torch.autograd.grad(k3(logprobs, reference).sum(), logprobs)
    assert not torch.allclose(other, gradient)


def test_its_expected_gradient_is_that_of_the_kl():
    """Every token of a small vocabulary, weighted by its probability, is an expectation without sampling."""
    torch.manual_seed(0)
    logits_V = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference_V = torch.randn(6, dtype=torch.float64).log_softmax(0)
    policy_V = logits_V.log_softmax(0)
    weights_V = policy_V.exp().detach()
    (wanted,) = torch.autograd.grad((policy_V.exp() * (policy_V - reference_V)).sum(), logits_V, retain_graph=True)
    (found,) = torch.autograd.grad((weights_V * kl_penalty(policy_V, reference_V)).sum(), logits_V, retain_graph=True)
    torch.testing.assert_close(found, wanted)
    (reverse,) = torch.autograd.grad((weights_V * k3(policy_V, reference_V)).sum(), logits_V, retain_graph=True)
    wanted_reverse = -torch.autograd.grad((reference_V.exp() * policy_V).sum(), logits_V)[0]  # of KL(ref || pi)
    torch.testing.assert_close(reverse, wanted_reverse)
