"""Packs rows that share prompts into one long row without padding: the distinct prompts, then the completions.

numpy computes the layout, so nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import repeat_kv

from pvg.models.padding import JoinedRows, check_budget, counted, lengths_of
from pvg.records import Int32


@dataclass(frozen=True, slots=True)
class PackedRows:
    """N rows with U distinct prompts as one row of T tokens: the prompts, then each row's completion without its last
    token, which predicts nothing.

    `prompts` and `completions` give the layout of both parts; `prompt_of_N` is each row's prompt. `mask` is True where
    a completion token may attend: [1 or N, 1, W, P + W], of the padded widths of both parts.

    There are M completion tokens: first the first token of each row, then all others. `rows_M` and `columns_M` are
    their positions in the padded rows, `targets_M` their ids. The last prompt token (`lasts_R`) predicts a row's first
    token; the completion tokens among the T predict the others, in order.
    """

    ids_1T: Tensor
    positions_1T: Tensor
    prompts: JoinedRows
    completions: JoinedRows
    prompt_of_N: Tensor
    mask: Tensor
    completion_tokens: int
    lengths_N: NDArray[np.int64]
    lasts_R: Tensor
    rows_M: Tensor
    columns_M: Tensor
    targets_M: Tensor


def pack_rows(sequences: Sequence[Int32], prompt_lengths: NDArray[Any], device: torch.device | str) -> PackedRows:
    """Pack rows of prompt + completion. Prompts with equal tokens count as one, even across groups."""
    lengths_N, starts_N = lengths_of(sequences), np.asarray(prompt_lengths, dtype=np.int64)
    prompt_of_N, prompts = distinct_prompts(sequences, starts_N)
    completions = [row[start:-1] for row, start in zip(sequences, starts_N, strict=True)]
    prompts_U = lengths_of(prompts)
    inner_N = np.maximum(lengths_N - starts_N - 1, 0)  # completion tokens that predict another token
    begun_R = np.flatnonzero(lengths_N > starts_N)
    rows_M = np.concatenate([begun_R, np.repeat(np.arange(len(sequences)), inner_N)])
    columns_M = np.concatenate([starts_N[begun_R], counted(inner_N, starts_N + 1)])
    before_N = np.cumsum(lengths_N) - lengths_N
    parts = {
        "ids_1T": np.concatenate([*prompts, *completions])[None],
        "positions_1T": counted(np.concatenate([prompts_U, inner_N]), np.append(0 * prompts_U, starts_N))[None],
        "prompt_of_N": prompt_of_N,
        "lasts_R": (np.cumsum(prompts_U) - 1)[prompt_of_N[begun_R]],
        "rows_M": rows_M,
        "columns_M": columns_M,
        "targets_M": np.concatenate(sequences)[before_N[rows_M] + columns_M],
    }
    return PackedRows(
        prompts=JoinedRows.of(prompts_U, device),
        completions=JoinedRows.of(inner_N, device),
        mask=_mask(prompts_U, prompt_of_N, int(inner_N.max())).to(device),
        completion_tokens=int(inner_N.sum()),
        lengths_N=lengths_N,
        **{name: torch.from_numpy(array.astype(np.int64)).to(device) for name, array in parts.items()},
    )


def distinct_prompts(sequences: Sequence[Int32], prompt_lengths: NDArray[Any]) -> tuple[NDArray[np.int64], list[Int32]]:
    """The prompt number of each row, and the distinct prompts in order of first occurrence."""
    numbers: dict[bytes, int] = {}
    prompts: list[Int32] = []
    prompt_of_N = np.empty(len(sequences), dtype=np.int64)
    for row, (ids, length) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        key = ids[:length].tobytes()
        number = prompt_of_N[row] = numbers.setdefault(key, len(prompts))
        if number == len(prompts):
            prompts.append(ids[:length])
    return prompt_of_N, prompts


def distinct_rows(
    sequences: Sequence[Int32], prompt_lengths: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """firsts_U: the first row of each distinct sequence (tokens and prompt length). row_of_N: sequence n equals that of
    row firsts_U[row_of_N[n]]."""
    numbers: dict[tuple[int, bytes], int] = {}
    firsts: list[int] = []
    row_of_N = np.empty(len(sequences), dtype=np.int64)
    for row, (ids, length) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        number = row_of_N[row] = numbers.setdefault((int(length), ids.tobytes()), len(firsts))
        if number == len(firsts):
            firsts.append(row)
    return np.asarray(firsts, dtype=np.int64), row_of_N


def shared_prompt_batches(
    prompt_of_N: NDArray[np.int64],
    prompt_lengths: NDArray[Any],
    lengths: NDArray[np.int64],
    budget: int,
    max_rows: int | None = None,
    *,
    by_length: bool = True,
) -> list[NDArray[np.int64]]:
    """Row numbers in batches of at most `max_rows` rows, where distinct prompts x longest prompt + rows x longest
    completion <= `budget`. This is attention's work, including padding.

    Rows with the same prompt stay together, and those with the longest row come first. With `by_length=False` all rows
    keep their order. The result depends only on prompts and lengths. Each row is in exactly one batch.

    Raises ConfigurationError if a single row is over the budget.
    """
    check_budget(lengths, budget)
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows must be at least 1, not {max_rows}")
    order_N = np.arange(len(lengths))
    if by_length and len(lengths):
        longest_U = np.zeros(int(prompt_of_N.max()) + 1, dtype=np.int64)
        np.maximum.at(longest_U, prompt_of_N, lengths)
        order_N = np.lexsort((-lengths, prompt_of_N, -longest_U[prompt_of_N]))
    batches: list[list[int]] = []
    prompts: set[int] = set()
    widest = longest = 0
    for row in order_N.tolist():
        prompt, start = int(prompt_of_N[row]), int(prompt_lengths[row])
        widest, longest = max(widest, start), max(longest, int(lengths[row]) - start)
        rows = len(batches[-1]) if batches else 0
        positions = (len(prompts) + (prompt not in prompts)) * widest + (rows + 1) * longest
        if not batches or positions > budget or rows == max_rows:
            batches.append([])
            prompts, widest, longest = set(), start, int(lengths[row]) - start
        batches[-1].append(row)
        prompts.add(prompt)
    return [np.asarray(found, dtype=np.int64) for found in batches]


def _mask(prompt_lengths_U: NDArray[np.int64], prompt_of_N: NDArray[np.int64], width: int) -> Tensor:
    """See PackedRows. Completions are padded on the right, where causal attention does not look."""
    longest = int(prompt_lengths_U.max())
    own_WW = np.tri(width, dtype=np.bool_)
    lengths = prompt_lengths_U[prompt_of_N] if (prompt_lengths_U != longest).any() else prompt_lengths_U[:1]
    prompt_BP = np.arange(longest) < lengths[:, None]
    shape = (len(lengths), width)
    mask_BWK = np.concatenate(
        [np.broadcast_to(prompt_BP[:, None], (*shape, longest)), np.broadcast_to(own_WW, (*shape, width))], axis=2
    )
    return torch.from_numpy(mask_BWK[:, None])


# --- attention of packed rows: prompts over themselves, each completion over its prompt and itself -------------------


def packed_attention(
    query_TE: Tensor, key_TE: Tensor, value_TE: Tensor, heads: int, scaling: float | None, packed: PackedRows
) -> Tensor:
    """[T, E] for all query heads. Keys and values may have fewer heads, each for several query heads."""
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
    """[T, E] of `rows` rows of equal length, each over itself."""
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
    """[B, E] of only the tokens `last_B`, one per row, over the row's tokens where `mask_BL` is True."""
    key, value = (torch.unflatten(flat, 0, mask_BL.shape) for flat in (key_TE, value_TE))
    query_B1E = query_TE.index_select(0, last_B)[:, None]
    return _attend(query_B1E, key, value, mask_BL[:, None, None], heads, scaling).flatten(0, 1)


def _attend(
    query_BQE: Tensor, key_BKE: Tensor, value_BKE: Tensor, mask: Tensor | None, heads: int, scaling: float | None
) -> Tensor:
    """Attention of padded rows [B, Q, E]; causal if there is no mask."""
    size = query_BQE.shape[2] // heads
    query, key, value = (
        tensor.view(*tensor.shape[:2], -1, size).transpose(1, 2) for tensor in (query_BQE, key_BKE, value_BKE)
    )
    repeats = heads // key.shape[1]
    mixed_BHQE = scaled_dot_product_attention(
        query, repeat_kv(key, repeats), repeat_kv(value, repeats), attn_mask=mask, is_causal=mask is None, scale=scaling
    )
    return mixed_BHQE.transpose(1, 2).flatten(2)
