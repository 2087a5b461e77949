"""V-REx and IRMv1: by hand, against loops with autograd, and in two passes over micro-batches."""

import math

import pytest
import torch

from pvg.verifier.losses import LOSSES, environment_means, irm_v1, slopes_of, vrex


def test_vrex_by_hand():
    # Environment 0: (1 + 3)/2 = 2; 2: 4; 1 has no pair. Mean 3, variance (1 + 1)/2 = 1.
    losses_M, environments_M = torch.tensor([1.0, 4.0, 3.0], requires_grad=True), torch.tensor([0, 2, 0])
    penalty = vrex(losses_M, environments_M, 3)
    assert penalty.item() == pytest.approx(1.0)
    penalty.backward()
    # 2 (R_e - 3) / 2 per environment, shared by its pairs: -1/2 each, 1.
    assert losses_M.grad.tolist() == pytest.approx([-0.5, 1.0, -0.5])
    means_E, totals_E = environment_means(losses_M, environments_M, 3)
    assert means_E.tolist() == [2.0, 0.0, 4.0]
    assert totals_E.tolist() == [2.0, 0.0, 1.0]
    # With weights 3 and 1 environment 0 has (3 + 3)/4 = 1.5: variance 1.25^2.
    weighted = vrex(losses_M, environments_M, 3, torch.tensor([3.0, 5.0, 1.0]))
    assert weighted.item() == pytest.approx(1.5625)


def test_irm_by_hand():
    # Environment 0 has gaps 2 and -1, environment 1 the gap 0.
    correct_M, incorrect_M = torch.tensor([2.0, 0.0, 5.0]), torch.tensor([0.0, 1.0, 5.0])
    sigmoid = [1 / (1 + math.exp(2)), 1 / (1 + math.exp(-1)), 0.5]  # of -d
    slopes_M = slopes_of(LOSSES["bradley_terry"])(correct_M, incorrect_M)
    assert slopes_M.tolist() == pytest.approx([-2 * sigmoid[0], sigmoid[1], 0.0])
    first = (-2 * sigmoid[0] + sigmoid[1]) / 2
    assert irm_v1(slopes_M, torch.tensor([0, 0, 1]), 2).item() == pytest.approx(first**2 / 2)
    # (sigmoid(s) - y) s, halved for the pair: correct 2, incorrect 0.
    one = slopes_of(LOSSES["cross_entropy"])(correct_M[:1], incorrect_M[:1]).item()
    assert one == pytest.approx((1 / (1 + math.exp(-2)) - 1) * 2 / 2)
