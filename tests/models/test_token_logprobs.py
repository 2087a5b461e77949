"""The closed-form gradient of log-probs against finite differences and against autograd's."""

import pytest
import torch

from pvg.models.compute import LiveBytes
from pvg.models.logprobs import LogitTransform, token_logprobs

FINISHES = [
    LogitTransform(),
    LogitTransform(temperature=0.7),
    LogitTransform(factor=0.3, temperature=2.0),
    LogitTransform(2.0, 1.5, 0.7),
]


def given(kind=torch.float32):
    torch.manual_seed(0)
    hidden_ND = torch.randn(7, 4, dtype=kind, requires_grad=True)
    weight_VD = torch.randn(11, 4, dtype=kind, requires_grad=True)
    bias_V = torch.randn(11, dtype=kind, requires_grad=True)
    return hidden_ND, weight_VD, bias_V, torch.randint(0, 11, (7,))


def all_by_autograd(hidden_ND, weight_VD, bias_V, finish):
    logits_NV = (hidden_ND @ weight_VD.T + bias_V) * finish.factor
    if finish.cap is not None:
        logits_NV = torch.tanh(logits_NV / finish.cap) * finish.cap
    return torch.log_softmax(logits_NV / finish.temperature, dim=1)


def by_autograd(hidden_ND, weight_VD, bias_V, targets_N, finish):
    return all_by_autograd(hidden_ND, weight_VD, bias_V, finish).gather(1, targets_N[:, None])[:, 0]


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("finish", FINISHES)
def test_values_and_gradients_are_those_of_autograd(finish, chunk):
    inputs = given()
    weights_N = torch.linspace(-1.0, 2.0, 7)
    expected = by_autograd(*inputs, finish)
    found = token_logprobs(*inputs, finish, chunk)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad((weights_N * expected).sum(), inputs[:3])
    for _ in range(2):  # what is kept for the backward pass is not written into
        torch.testing.assert_close(
            torch.autograd.grad((weights_N * found).sum(), inputs[:3], retain_graph=True), wanted
        )


@pytest.mark.parametrize("numbers", [1 << 22, 8])  # of a product: the whole gradient of the head, or a row or two
def test_under_autocast_only_the_products_are_bfloat16(numbers, monkeypatch):
    monkeypatch.setattr("pvg.models.logprobs.PRODUCT_NUMBERS", numbers)
    inputs = given()
    expected = by_autograd(*inputs, LogitTransform())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = token_logprobs(*inputs, LogitTransform(), 3)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)
    assert not torch.equal(found, expected)
    gradients = torch.autograd.grad(found.sum(), inputs[:3])
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    wanted = torch.autograd.grad(expected.sum(), inputs[:3])
    torch.testing.assert_close(gradients, wanted, rtol=0.05, atol=0.1)
    assert torch.cosine_similarity(gradients[1].flatten(), wanted[1].flatten(), dim=0) > 0.9999


def test_in_bfloat16_no_second_gradient_of_the_head_is_there_beside_that_of_earlier_micro_batches():
    """256 times as many words as numbers of a state: beside the gradient, 8 chunks of logits are little."""
    torch.manual_seed(0)
    head, hidden_ND = torch.nn.Linear(64, 16_384, bias=False), torch.randn(8, 64, requires_grad=True)
    targets_N, peaks, sums = torch.randint(0, 16_384, (8,)), [], []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = token_logprobs(hidden_ND, head.weight, None, targets_N, LogitTransform(), 1)
        with LiveBytes(head) as live:
            found.sum().backward()
        peaks.append(live.peak)
        sums.append(head.weight.grad.clone())
        head.register_buffer("earlier", head.weight.grad)  # does not count as new
    assert peaks[0] - peaks[1] > 0.9 * head.weight.nbytes
    torch.testing.assert_close(sums[1], 2 * sums[0])
