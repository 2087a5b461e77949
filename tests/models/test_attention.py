"""Attention of padded rows on a CPU: pvg's own products in 16 bits, and torch's kernel in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pvg.models import compute
from pvg.models.compute import attend

HEADS, KV_HEADS, SIZE = 6, 2, 16


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).bfloat16().requires_grad_()


def masks(kind: str, rows: int, queries: int, keys: int) -> Tensor | None:
    if kind == "causal":
        return None
    after = torch.arange(keys) > torch.arange(queries)[:, None] + keys - queries
    mask = torch.zeros(rows if kind == "of each row" else 1, 1, queries, keys).masked_fill(after, -torch.inf)
    if kind == "of each row":
        mask[0, :, :, 1] = -torch.inf
    return mask


def exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """By the definition, in float64."""
    q, k, v = (each.double().view(*each.shape[:2], -1, SIZE).transpose(1, 2) for each in (query, key, value))
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
    hidden = torch.full((q.shape[2], k.shape[2]), -torch.inf).triu(1) if mask is None else mask
    return (torch.softmax(q @ k.transpose(2, 3) * scaling + hidden, 3) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("by_head", [0, compute.LEAST_BY_HEAD])
@pytest.mark.parametrize("kind", ["causal", "of all rows", "of each row"])
@pytest.mark.parametrize("scaling", [None, 0.7])
@pytest.mark.parametrize("at_once", [1, 2 * HEADS * 13 * 13, compute.SCORES_AT_ONCE])
def test_attention_in_16_bits_are_exact_to_their_rounding(
    kind: str, scaling: float | None, at_once: int, by_head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "SCORES_AT_ONCE", at_once)
    monkeypatch.setattr(compute, "LEAST_QUERIES", 4)
    monkeypatch.setattr(compute, "LEAST_BY_HEAD", by_head)
    rows, queries, keys = 5, 13, 13 if kind == "causal" else 29
    inputs = [random(rows, queries, HEADS * SIZE), *(random(rows, keys, KV_HEADS * SIZE) for _ in range(2))]
    mask, grad = masks(kind, rows, queries, keys), random(rows, queries, HEADS * SIZE).detach()
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(*inputs, mask, HEADS, scaling)
    expected = exact(*inputs, mask, SIZE**-0.5 if scaling is None else scaling)
    assert found.dtype == torch.bfloat16
    pairs = zip(
        (found, *torch.autograd.grad(found, inputs, grad)),
        (expected, *torch.autograd.grad(expected, inputs, grad.double())),
        strict=True,
    )
    for ours, theirs in pairs:
        assert (
            float((ours.double() - theirs).detach().norm() / theirs.detach().norm()) < 4e-3
        )  # a rounding of bfloat16 is at most 4e-3


@pytest.mark.parametrize("kind", ["causal", "of each row"])
def test_float32_uses_torchs_kernel_with_the_same_results(kind: str) -> None:
    queries = 20 if kind == "causal" else 9
    inputs = [random(3, n, h * SIZE).float() for n, h in ((queries, HEADS), (20, KV_HEADS), (20, KV_HEADS))]
    mask = masks(kind, 3, queries, 20)
    found = attend(*inputs, mask, HEADS, None).double()
    torch.testing.assert_close(found, exact(*inputs, mask, SIZE**-0.5), rtol=1e-5, atol=1e-5)
