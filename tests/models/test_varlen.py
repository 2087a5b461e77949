"""Variable-length attention of packed rows: the layout against the masks of the other way, on a CPU, with a kernel that
is written out here. The real kernel needs a GPU (tests/gpu/test_cuda_models.py); "meta" tensors check its arguments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pvg.models import packing
from pvg.models.packing import pack_rows, packed_attention, varlen_attention

# Prompts of different lengths; rows that share one; one with a single completion token and one with none.
ROWS = [(0, 5), (1, 3), (0, 2), (2, 1), (1, 0), (0, 5)]
PROMPTS = (4, 7, 3)
HEADS, SIZE = 4, 8


def packed_rows(device: str = "cpu") -> packing.PackedRows:
    random = np.random.default_rng(0)
    prompts = [random.integers(1, 50, length).astype(np.int32) for length in PROMPTS]
    rows = [np.append(prompts[p], random.integers(1, 50, length)).astype(np.int32) for p, length in ROWS]
    return pack_rows(rows, np.array([PROMPTS[p] for p, _ in ROWS]), device)


def by_sequence(
    query_THD: Tensor,
    key_KHD: Tensor,
    value_KHD: Tensor,
    queries_S1: Tensor,
    keys_S1: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What the kernel's documentation says, sequence by sequence."""
    assert window_size == (-1, 0)
    assert enable_gqa == (query_THD.shape[1] != key_KHD.shape[1])
    assert queries_S1.dtype == keys_S1.dtype == torch.int32
    assert longest_query == int(queries_S1.diff().max())
    assert longest_key == int(keys_S1.diff().max())
    assert int(queries_S1.diff().min()) > 0
    found = []
    for number in range(len(queries_S1) - 1):
        own = slice(int(queries_S1[number]), int(queries_S1[number + 1]))
        seen = slice(int(keys_S1[number]), int(keys_S1[number + 1]))
        query, key, value = query_THD[own], key_KHD[seen], value_KHD[seen]
        key, value = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (key, value))
        late = len(key) - len(query)  # the last query sees the last key
        scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or SIZE**-0.5)
        hidden = torch.arange(len(key)) > torch.arange(len(query))[:, None] + late
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        found.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(found)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_values_and_gradients_are_those_of_the_masks(kv_heads: int, scaling: float | None) -> None:
    torch.manual_seed(0)
    packed = packed_rows()
    tokens = packed.ids_1T.shape[1]
    inputs = [torch.randn(tokens, heads * SIZE, requires_grad=True) for heads in (HEADS, kv_heads, kv_heads)]
    weights_TE = torch.randn(tokens, HEADS * SIZE)
    found, gradients = [], []
    for mixed_TE in (
        packed_attention(*inputs, HEADS, scaling, packed),
        varlen_attention(*inputs, HEADS, scaling, packed.sequences, by_sequence),
    ):
        found.append(mixed_TE)
        gradients.append(torch.autograd.grad((mixed_TE * weights_TE).sum(), inputs))
    torch.testing.assert_close(found[1], found[0])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_the_kernel_takes_these_arguments_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, without data: torch checks shapes and types."""
    monkeypatch.setattr(packing, "product_dtype", lambda query_TE: query_TE.dtype)  # "meta" has no autocast
    packed = packed_rows("meta")
    tokens = packed.ids_1T.shape[1]
    inputs = [
        torch.empty(tokens, heads * SIZE, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for heads in (HEADS, 2, 2)
    ]
    mixed_TE = varlen_attention(*inputs, HEADS, None, packed.sequences)
    assert mixed_TE.shape == (tokens, HEADS * SIZE)
    mixed_TE.sum().backward()
    assert [tensor.grad.shape for tensor in inputs if tensor.grad is not None] == [tensor.shape for tensor in inputs]
