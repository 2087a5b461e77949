"""V-REx and IRMv1: by hand, against loops with autograd, and in two passes over micro-batches."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.verifier.losses import LOSSES, environment_means, irm_v1, slopes_of, vrex


def by_loop(scores_M2, environments_M, weights_M, loss):
    """(V-REx, IRMv1) environment by environment, the scale's gradient by autograd."""
    risks, squares = [], []
    for environment in environments_M.unique():
        mine = environments_M == environment
        scale = torch.ones((), requires_grad=True, dtype=scores_M2.dtype)
        losses = LOSSES[loss](scale * scores_M2[mine, 0], scale * scores_M2[mine, 1])
        risk = (weights_M[mine] * losses).sum() / weights_M[mine].sum()
        (slope,) = torch.autograd.grad(risk, [scale], create_graph=True)
        risks.append(risk)
        squares.append(slope.square())
    return torch.stack(risks).var(correction=0), torch.stack(squares).mean()


def made(seed, pairs, environments, *, weighted=True):
    generator = torch.Generator().manual_seed(seed)
    scores_M2 = torch.randn(pairs, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    environments_M = torch.randint(environments, (pairs,), generator=generator)
    weights_M = torch.rand(pairs, generator=generator, dtype=torch.float64) + 0.1
    return scores_M2, environments_M, weights_M if weighted else torch.ones_like(weights_M)


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


def test_one_environment_does_not_vary_and_none_is_no_penalty():
    losses_M = torch.tensor([1.0, 5.0], requires_grad=True)
    assert vrex(losses_M, torch.tensor([4, 4]), 9).item() == 0.0
    empty = torch.zeros(0)
    ids = torch.zeros(0, dtype=torch.int64)
    assert vrex(empty, ids, 3).item() == irm_v1(empty, ids, 3).item() == 0.0


@pytest.mark.parametrize("loss", LOSSES)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**31), pairs=st.integers(1, 40), environments=st.integers(1, 6), weighted=st.booleans())
def test_scatter_is_the_loop_value_and_gradient(loss, seed, pairs, environments, weighted):
    scores_M2, environments_M, weights_M = made(seed, pairs, environments, weighted=weighted)
    expected = by_loop(scores_M2, environments_M, weights_M, loss)
    given_weights = weights_M if weighted else None
    losses_M = LOSSES[loss](scores_M2[:, 0], scores_M2[:, 1])
    slopes_M = slopes_of(LOSSES[loss])(scores_M2[:, 0], scores_M2[:, 1])
    found = (
        vrex(losses_M, environments_M, environments + 2, given_weights),
        irm_v1(slopes_M, environments_M, environments + 2, given_weights),
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)
        gradients = [torch.autograd.grad(value, scores_M2, retain_graph=True)[0] for value in (one, other)]
        torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-9)
