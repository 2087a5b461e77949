"""The penalty has the value of k3 and the gradient of k2, and k2's gradient is that of the KL."""

import math
from typing import get_args

import pytest
import torch

from pvg.config.training import Estimator
from pvg.training.penalties import PENALTIES, k1, k2, k3, kl_penalty


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


def test_the_table_has_the_estimators_of_the_configuration():
    assert tuple(PENALTIES) == get_args(Estimator)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        # At d = ln 2: k1's is ln 2, k2's (ln 2)^2 / 2, k3's ln 2 - 1/2; the slopes d, or k3's own 1 - exp(-d).
        ("k3_k2", math.log(2) - 0.5, math.log(2)),
        ("k1_k2", math.log(2), math.log(2)),
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("k3", math.log(2) - 0.5, 0.5),
    ],
)
def test_values_and_gradients_are_chosen_apart(estimator, value, slope):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    penalty = kl_penalty(logprobs, torch.tensor([-1.0 - math.log(2)]), estimator)
    assert penalty.item() == pytest.approx(value)
    assert torch.autograd.grad(penalty.sum(), logprobs)[0].item() == pytest.approx(slope)


def test_as_a_loss_k1_would_do_nothing():
    """Hence it is offered with k2's gradient only."""
    torch.manual_seed(1)
    logits_V = torch.randn(6, dtype=torch.float64, requires_grad=True)
    policy_V = logits_V.log_softmax(0)
    reference_V = torch.randn(6, dtype=torch.float64).log_softmax(0)
    (found,) = torch.autograd.grad((policy_V.exp().detach() * k1(policy_V, reference_V)).sum(), logits_V)
    torch.testing.assert_close(found, torch.zeros_like(found))
