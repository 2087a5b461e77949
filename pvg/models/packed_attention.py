"""Attention of packed rows: the prompts among themselves, and each completion over its prompt and itself."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import repeat_kv

from pvg.models.packing import PackedRows


def packed_attention(
    query_TE: Tensor, key_TE: Tensor, value_TE: Tensor, heads: int, scaling: float | None, packed: PackedRows
) -> Tensor:
    """[T, E] of all query heads; keys and values may have fewer heads, each for several of the queries'."""
    parts = [len(query_TE) - packed.completion_tokens, packed.completion_tokens]
    of_prompts, of_completions = zip(*(torch.split(flat, parts) for flat in (query_TE, key_TE, value_TE)), strict=True)
    query_UPE, key_UPE, value_UPE = map(packed.prompts.spread, of_prompts)
    mixed = [packed.prompts.gather(_attend(query_UPE, key_UPE, value_UPE, None, heads, scaling))]
    if packed.completions.width:
        query_NWE, key_NWE, value_NWE = map(packed.completions.spread, of_completions)
        keys, values = (
            torch.cat([prompts_UPE.index_select(0, packed.prompt_of_N), own_NWE], dim=1)
            for prompts_UPE, own_NWE in ((key_UPE, key_NWE), (value_UPE, value_NWE))
        )
        mixed.append(packed.completions.gather(_attend(query_NWE, keys, values, packed.mask, heads, scaling)))
    return torch.cat(mixed)


def causal_attention(
    query_TE: Tensor, key_TE: Tensor, value_TE: Tensor, heads: int, scaling: float | None, rows: int
) -> Tensor:
    """[T, E] of `rows` rows of one length, each among itself."""
    query, key, value = (torch.unflatten(flat, 0, (rows, -1)) for flat in (query_TE, key_TE, value_TE))
    return _attend(query, key, value, None, heads, scaling).flatten(0, 1)


def last_attention(
    query_TE: Tensor,
    key_TE: Tensor,
    value_TE: Tensor,
    heads: int,
    scaling: float | None,
    last_B: Tensor,
    mask_BL: Tensor,
) -> Tensor:
    """[B, E] of the tokens `last_B` alone, one for each row, over the row's tokens where `mask_BL` is True."""
    key, value = (torch.unflatten(flat, 0, mask_BL.shape) for flat in (key_TE, value_TE))
    query_B1E = query_TE.index_select(0, last_B)[:, None]
    return _attend(query_B1E, key, value, mask_BL[:, None, None], heads, scaling).flatten(0, 1)


def _attend(
    query_BQE: Tensor, key_BKE: Tensor, value_BKE: Tensor, mask: Tensor | None, heads: int, scaling: float | None
) -> Tensor:
    """Attention of rectangles, causal where there is no mask: [B, Q, E]."""
    size = query_BQE.shape[2] // heads
    query, key, value = (
        tensor.view(*tensor.shape[:2], -1, size).transpose(1, 2) for tensor in (query_BQE, key_BKE, value_BKE)
    )
    repeats = heads // key.shape[1]
    mixed_BHQE = scaled_dot_product_attention(
        query, repeat_kv(key, repeats), repeat_kv(value, repeats), attn_mask=mask, is_causal=mask is None, scale=scaling
    )
    return mixed_BHQE.transpose(1, 2).flatten(2)
