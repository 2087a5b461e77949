"""Rows of different length as one batch: packed into one long row, or padded to a rectangle.

Packing puts the distinct prompts first, then the completions, without padding. numpy computes the layout, so nothing
waits for a device.

The result of a row must not depend on its batch; on a GPU, up to rounding. On a CPU, a matrix product with an odd
number of rows rounds differently, so rows are padded to widths and batches to heights that agree (`pad_batch`). A
resumed run needs this: its cache is empty, so its batches differ, but scores and weights must be equal."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
from heapq import heapreplace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import embedding, pad, scaled_dot_product_attention
from transformers.integrations.sdpa_attention import repeat_kv

from pvg.errors import ConfigurationError
from pvg.records import Float32, Int32

# Attention of packed rows on a GPU, by torch's flash attention for sequences of different lengths.
HALVES = (torch.bfloat16, torch.float16)
LARGEST_HEAD, HEAD_MULTIPLE = 256, 8
Kernel = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """S sequences of queries and keys. The queries of a sequence follow those of the one before; `queries_S1` and
    `keys_S1` int32 [S + 1] are the starts. `tokens_K`: the token among the T of the packed rows of each of the K keys.
    """

    queries_S1: Tensor
    keys_S1: Tensor
    tokens_K: Tensor
    longest_query: int
    longest_key: int

    @classmethod
    def of(
        cls,
        prompts_U: NDArray[np.int64],
        completions_N: NDArray[np.int64],
        prompt_of_N: NDArray[np.int64],
        device: torch.device | str,
    ) -> SequenceLayout:
        """Of U prompts and N completions with these lengths; a completion follows prompt `prompt_of_N`."""
        begins_U, prompt_tokens = np.cumsum(prompts_U) - prompts_U, int(prompts_U.sum())
        begins_N = prompt_tokens + np.cumsum(completions_N) - completions_N
        rows = [row for row in range(len(completions_N)) if completions_N[row]]  # a sequence has at least one token
        keys = [np.arange(prompt_tokens)]
        for row in rows:
            prompt = prompt_of_N[row]
            keys.append(np.arange(begins_U[prompt], begins_U[prompt] + prompts_U[prompt]))
            keys.append(np.arange(begins_N[row], begins_N[row] + completions_N[row]))
        queries_S = np.concatenate([prompts_U, completions_N[rows]])
        keys_S = np.concatenate([prompts_U, (prompts_U[prompt_of_N] + completions_N)[rows]])

        def starts(lengths_S: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(np.append(0, np.cumsum(lengths_S)).astype(np.int32)).to(device)

        tokens_K = torch.from_numpy(np.concatenate(keys)).to(device)
        return cls(starts(queries_S), starts(keys_S), tokens_K, int(queries_S.max()), int(keys_S.max()))


def varlen_attention(
    query_TE: Tensor,
    key_TE: Tensor,
    value_TE: Tensor,
    heads: int,
    scaling: float | None,
    layout: SequenceLayout,
    kernel: Kernel | None = None,
) -> Tensor:
    """[T, E] for all query heads; keys and values may have fewer heads. Call it only if `why_not_varlen` is None, or
    with a `kernel` that computes elsewhere."""
    kernel = kernel or _kernel()
    dtype, size = product_dtype(query_TE), query_TE.shape[1] // heads
    query_THD, key_THD, value_THD = (
        flat_TE.to(dtype).view(len(flat_TE), -1, size) for flat_TE in (query_TE, key_TE, value_TE)
    )
    # torch 2.13 asks for this argument. 2.11 does not know it, and takes grouped queries without it.
    grouped = {"enable_gqa": key_THD.shape[1] != heads} if "enable_gqa" in _arguments(kernel) else {}
    mixed_THD = kernel(
        query_THD,
        key_THD.index_select(0, layout.tokens_K),
        value_THD.index_select(0, layout.tokens_K),
        layout.queries_S1,
        layout.keys_S1,
        layout.longest_query,
        layout.longest_key,
        scale=scaling,
        window_size=(-1, 0),  # causal, from the end of queries and keys
        **grouped,
    )
    return mixed_THD.flatten(1)


_GPU_PLANNED = ContextVar("_GPU_PLANNED", default=False)


@contextmanager
def attention_as_on_a_gpu() -> Iterator[None]:
    """Attention takes the way that it takes on a GPU. For tensors without memory (pvg.planning.memory)."""
    token = _GPU_PLANNED.set(True)
    try:
        yield
    finally:
        _GPU_PLANNED.reset(token)


def why_not_varlen(query_TE: Tensor, heads: int) -> str | None:
    """Why `varlen_attention` cannot compute these queries; None if it can."""
    if query_TE.device.type != "cuda" and not _GPU_PLANNED.get():
        return f"they are on {query_TE.device.type}"
    size = query_TE.shape[1] // heads
    if (dtype := product_dtype(query_TE)) not in HALVES:
        return f"products are computed in {dtype}"
    if size > LARGEST_HEAD or size % HEAD_MULTIPLE:
        return f"a head has {size} dimensions"
    return None if _GPU_PLANNED.get() else _missing(query_TE.device)


def product_dtype(query_TE: Tensor) -> torch.dtype:
    """The dtype of matrix products with this tensor: that of autocast, or its own."""
    kind = query_TE.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query_TE.dtype


@cache
def _missing(device: torch.device) -> str | None:
    try:
        if {"scale", "window_size"} <= _arguments(_kernel()):
            return "the GPU is older than Ampere" if torch.cuda.get_device_capability(device) < (8, 0) else None
    except ImportError:
        pass
    return f"torch {torch.__version__} has no variable-length attention"


@cache
def _arguments(kernel: Kernel) -> frozenset[str]:
    """The names of its arguments."""
    return frozenset(inspect.signature(kernel).parameters)


def _kernel() -> Kernel:
    from torch.nn.attention import varlen

    return cast(Kernel, cast(Any, varlen).varlen_attn)


def lengths_of(rows: Sequence[Int32] | Sequence[Float32]) -> NDArray[np.int64]:
    return np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))


def counted(lengths_S: NDArray[np.int64], starts_S: NDArray[np.int64]) -> NDArray[np.int64]:
    """start, start + 1, ... for each length, concatenated."""
    ends_S = np.cumsum(lengths_S)
    return np.arange(int(lengths_S.sum())) + np.repeat(starts_S - ends_S + lengths_S, lengths_S)


def pad_right(rows: Sequence[Int32], pad_id: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """B rows of token ids -> (ids_BL int64, lengths_B int64) on `device`. L is the longest row, the rest is `pad_id`.

    Raises ValueError if there are no rows.
    """
    if not rows:
        raise ValueError("pad_right needs at least one row")
    lengths_B = lengths_of(rows)
    ids_BL = np.full((len(rows), int(lengths_B.max())), pad_id, dtype=np.int64)
    ids_BL[np.arange(ids_BL.shape[1]) < lengths_B[:, None]] = np.concatenate(rows)
    return torch.from_numpy(ids_BL).to(device), torch.from_numpy(lengths_B).to(device)


def token_budget_batches(lengths: ArrayLike, budget: int) -> list[NDArray[np.int64]]:
    """Row numbers in batches with rows x longest <= `budget`.

    The longest rows come first, so a batch that does not fit in memory fails at once. Rows of equal length keep
    their order, so the result depends only on the lengths. Each row is in exactly one batch.

    Raises ConfigurationError if a single row is over the budget.
    """
    lengths_N = np.asarray(lengths, dtype=np.int64)
    if not lengths_N.size:
        return []
    order_N = np.argsort(-lengths_N, kind="stable")
    check_budget(lengths_N, budget)
    batches = []
    start = 0
    while start < len(order_N):
        rows = budget // max(1, int(lengths_N[order_N[start]]))
        batches.append(order_N[start : start + rows])
        start += rows
    return batches


def check_budget(lengths_N: NDArray[np.int64], budget: int) -> int:
    """The largest of the lengths. Raises ConfigurationError if it is over the budget."""
    longest = int(lengths_N.max(initial=0))
    if longest > budget:
        row = int(lengths_N.argmax())
        raise ConfigurationError(
            f"A sequence of {longest} tokens (row {row}) is over the token budget of {budget} per batch.",
            "Raise the budget (micro_batch_tokens) or shorten the completions (rollout.max_tokens).",
        )
    return longest


# --- batches in which a row's result does not depend on the others ---------------------------------------------------

WIDTH = 16
HEIGHT = 8


class PaddedBatch(NamedTuple):
    """The input of a VerifierModel. Rows beyond the given ones repeat the first; discard their results."""

    ids_BL: Tensor
    lengths_B: Tensor
    prompt_lengths_B: Tensor


def padded_width(length: int, max_length: int) -> int:
    """The width for a row of `length` tokens: a multiple of WIDTH, at most `max_length`."""
    return min(-(-length // WIDTH) * WIDTH, max_length)


def batches(lengths: Sequence[int], token_budget: int, max_length: int) -> list[NDArray[np.int64]]:
    """Row numbers in batches whose rectangles are within the budget. Raises ConfigurationError like
    `token_budget_batches`."""
    return token_budget_batches([padded_width(length, max_length) for length in lengths], token_budget)


def pad_batch(
    rows: Sequence[Int32],
    prompt_lengths: Sequence[int],
    pad_id: int,
    device: torch.device,
    *,
    token_budget: int,
    max_length: int,
) -> PaddedBatch:
    """The rows of one of `batches`, padded to the right width, and in height as far as the budget allows."""
    width = padded_width(max(map(len, rows)), max_length)
    height = max(len(rows), min(-(-len(rows) // HEIGHT) * HEIGHT, token_budget // width))
    missing = height - len(rows)
    ids_BL, lengths_B = pad_right([*rows, *[rows[0]] * missing], pad_id, device)
    starts = [*prompt_lengths, *[prompt_lengths[0]] * missing]
    wide_BL = pad(ids_BL, (0, width - ids_BL.shape[1]), value=pad_id)
    return PaddedBatch(wide_BL, lengths_B, torch.tensor(starts, dtype=torch.int64, device=device))


@dataclass(frozen=True)
class PackedRows:
    """N rows with U distinct prompts as one row of T tokens: the prompts, then each row's completion without its last
    token, which predicts nothing. Both parts are in the order of `packing_order`.

    On the host: `prompt_lengths_U` and `inner_N`, the lengths of both parts among the T tokens, and `prompt_numbers_N`,
    the prompt of each row; `longest`, the tokens of the longest row. `places_N`: where each given row is in the order.

    There are M completion tokens: first the first token of each row, then all others. `rows_M` and `columns_M` are
    their positions in the given rows, padded; `targets_M` their ids. The last prompt token (`lasts_R`) predicts a row's
    first token; the completion tokens among the T predict the others, in order.
    """

    ids_1T: Tensor
    positions_1T: Tensor
    prompt_lengths_U: NDArray[np.int64]
    inner_N: NDArray[np.int64]
    prompt_numbers_N: NDArray[np.int64]
    completion_tokens: int
    longest: int
    places_N: Tensor
    lasts_R: Tensor
    rows_M: Tensor
    columns_M: Tensor
    targets_M: Tensor

    @cached_property
    def blocks(self) -> list[Block]:
        """For attention without variable lengths."""
        return blocks_of(self.prompt_lengths_U, self.inner_N, self.prompt_numbers_N, self.ids_1T.device)

    @cached_property
    def last_blocks(self) -> list[Block]:
        """As `blocks`, for the results of `ends_N` alone."""
        return blocks_of(self.prompt_lengths_U, self.inner_N, self.prompt_numbers_N, self.ids_1T.device, last=True)

    @cached_property
    def sequences(self) -> SequenceLayout:
        """For variable-length attention."""
        return SequenceLayout.of(self.prompt_lengths_U, self.inner_N, self.prompt_numbers_N, self.ids_1T.device)

    @cached_property
    def ends_N(self) -> Tensor:
        """The place among the T tokens of each row's last one, which must be a completion token."""
        ends_N = self.prompt_lengths_U.sum() + np.cumsum(self.inner_N) - 1
        return torch.from_numpy(ends_N).to(self.ids_1T.device)


def packing_order(
    sequences: Sequence[Int32], prompt_lengths: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(firsts_U, order_N, prompt_of_N): a row with each prompt, in the order of the prompts; the rows in their order;
    and the prompt of each row, in this order. Similar lengths are next to each other, so that blocks have little
    padding."""
    starts_N = np.asarray(prompt_lengths, dtype=np.int64)
    own_N = lengths_of(sequences) - starts_N
    firsts_U, prompt_of_N = distinct_prompts(sequences, starts_N)
    order_U = np.argsort(-starts_N[firsts_U], kind="stable")
    order_N = np.lexsort((-own_N, -_size(starts_N + own_N)))
    return firsts_U[order_U], order_N, np.argsort(order_U)[prompt_of_N][order_N]


def pack_rows(sequences: Sequence[Int32], prompt_lengths: NDArray[Any], device: torch.device | str) -> PackedRows:
    """Pack rows of prompt + completion. Prompts with equal tokens count as one, even across groups."""
    starts_N = np.asarray(prompt_lengths, dtype=np.int64)
    firsts_U, order_N, prompt_of_N = packing_order(sequences, starts_N)
    prompts = [sequences[row][: starts_N[row]] for row in firsts_U]
    sequences, starts_N = [sequences[row] for row in order_N], starts_N[order_N]
    lengths_N, prompts_U = lengths_of(sequences), lengths_of(prompts)
    completions = [row[start:-1] for row, start in zip(sequences, starts_N, strict=True)]
    inner_N = np.maximum(lengths_N - starts_N - 1, 0)  # completion tokens that predict another token
    begun_R = np.flatnonzero(lengths_N > starts_N)
    rows_M = np.concatenate([begun_R, np.repeat(np.arange(len(sequences)), inner_N)])
    columns_M = np.concatenate([starts_N[begun_R], counted(inner_N, starts_N + 1)])
    before_N = np.cumsum(lengths_N) - lengths_N
    parts = {
        "ids_1T": np.concatenate([*prompts, *completions])[None],
        "positions_1T": counted(np.concatenate([prompts_U, inner_N]), np.append(0 * prompts_U, starts_N))[None],
        "places_N": np.argsort(order_N),
        "lasts_R": (np.cumsum(prompts_U) - 1)[prompt_of_N[begun_R]],
        "rows_M": order_N[rows_M],
        "columns_M": columns_M,
        "targets_M": np.concatenate(sequences)[before_N[rows_M] + columns_M],
    }
    return PackedRows(
        prompt_lengths_U=prompts_U,
        inner_N=inner_N,
        prompt_numbers_N=prompt_of_N,
        completion_tokens=int(inner_N.sum()),
        longest=int(lengths_N.max()),
        **{name: torch.from_numpy(array.astype(np.int64)).to(device) for name, array in parts.items()},
    )


def distinct(rows: Iterable[Hashable]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """firsts_U: the first of each distinct row, in order. number_of_N: row n equals row firsts_U[number_of_N[n]]."""
    firsts: dict[Hashable, tuple[int, int]] = {}
    number_of_N = [firsts.setdefault(row, (len(firsts), place))[0] for place, row in enumerate(rows)]
    return np.array([place for _, place in firsts.values()], dtype=np.int64), np.array(number_of_N, dtype=np.int64)


def distinct_prompts(
    sequences: Sequence[Int32], prompt_lengths: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`distinct`, of the prompts of sequences."""
    return distinct(ids[:length].tobytes() for ids, length in zip(sequences, prompt_lengths, strict=True))


def distinct_rows(
    sequences: Sequence[Int32], prompt_lengths: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`distinct`, of sequences with their prompt lengths."""
    return distinct((int(length), ids.tobytes()) for ids, length in zip(sequences, prompt_lengths, strict=True))


def row_batches(
    sequences: Sequence[Int32],
    prompt_lengths: NDArray[Any],
    budget: int,
    *,
    shared_prompts: bool = True,
    shared_rows: bool = True,
    units_N: NDArray[np.int64] | None = None,
) -> list[NDArray[np.int64]]:
    """Row numbers in batches for one forward pass each, as `packed_batches`; with `shared_rows`, rows with the same
    tokens are in one batch and count once. Without `shared_prompts`, as `token_budget_batches`."""
    lengths_N, starts_N = lengths_of(sequences), np.asarray(prompt_lengths, dtype=np.int64)
    if not shared_prompts:
        return token_budget_batches(lengths_N, budget)
    firsts_U = number_of_N = np.arange(len(sequences))
    if shared_rows:
        firsts_U, number_of_N = distinct_rows(sequences, starts_N)
    _, prompt_of_U = distinct_prompts([sequences[row] for row in firsts_U.tolist()], starts_N[firsts_U])
    units_U = None if units_N is None else units_N[firsts_U]
    parts = packed_batches(prompt_of_U, starts_N[firsts_U], lengths_N[firsts_U], budget, units_U)
    same_U = np.split(np.argsort(number_of_N, kind="stable"), np.cumsum(np.bincount(number_of_N))[:-1])
    return [np.concatenate([same_U[row] for row in part]) for part in parts]


# To fill batches, a prompt is computed in two of them only if it takes at most this part of one.
REPEATED = 16


def packed_batches(
    prompt_of_N: NDArray[np.int64],
    prompt_lengths: NDArray[Any],
    lengths: NDArray[np.int64],
    budget: int,
    units_N: NDArray[np.int64] | None = None,
) -> list[NDArray[np.int64]]:
    """Row numbers in as few batches as possible, with similar numbers of tokens of at most `budget`; each prompt of a
    batch counts once. The batch with the longest row comes first. Depends on prompts and lengths alone.

    Rows with the same prompt stay together if this costs no batch. Rows of a unit (`units_N`, numbers) always do if the
    unit is within the budget, in which each unit counts its own prompts.

    Raises ConfigurationError if a single row is over the budget.
    """
    check_budget(lengths, budget)
    whole, units_N = units_N is not None, prompt_of_N if units_N is None else units_N
    order_N = np.lexsort((-lengths, prompt_of_N, units_N))
    changes_N2 = np.diff(np.stack([units_N, prompt_of_N], axis=1)[order_N], axis=0, prepend=-1) != 0
    first_N = changes_N2.any(axis=1)  # the row that brings a prompt into its unit
    starts_N = np.asarray(prompt_lengths, dtype=np.int64)[order_N]
    tokens_N = lengths[order_N] - starts_N + first_N * starts_N
    bounds = np.append(np.flatnonzero(changes_N2[:, 0]), len(order_N)).tolist()
    units = [(int(tokens_N[first:end].sum()), first, end) for first, end in itertools.pairwise(bounds)]
    units.sort(key=lambda unit: -unit[0])

    def filled(count: int) -> list[list[int]] | None:
        """Each unit in the batch with the fewest tokens so far; None if they do not fit into so many batches."""
        batches: list[list[int]] = [[] for _ in range(count)]
        loads = [(0, batch) for batch in range(count)]
        for size, start, end in units:
            first = start
            while first < end:
                load, batch = loads[0]
                again = 0 if first_N[first] else int(starts_N[first])
                ends_R = again + np.cumsum(tokens_N[first:end])
                rows = int(np.searchsorted(ends_R, budget - load, side="right"))
                cuts = size > budget or (not whole and REPEATED * int(starts_N[first]) <= budget)
                if not rows or (rows < len(ends_R) and not cuts):
                    return None
                batches[batch].extend(range(first, first + rows))
                heapreplace(loads, (load + int(ends_R[rows - 1]), batch))
                first += rows
        return batches

    count = -(-int(tokens_N.sum()) // budget)
    while (found := filled(count)) is None:
        count += 1 + count // 32
    return sorted((order_N[rows] for rows in found if rows), key=lambda rows: -int(lengths[rows].max()))


# --- attention of packed rows: prompts over themselves, each completion over its prompt and itself -------------------


@dataclass(frozen=True, slots=True)
class Block:
    """B rows of similar length as a rectangle of queries and one of keys, for attention without variable lengths.

    `queries_BQ` and `keys_BK` are tokens among the T of packed rows; padding is some token of the row. `results_S`: the
    positions of [B * Q] whose results count, in the order of the tokens. `mask`: what is added to the products, [1 or
    B, 1, Q, K]; None: causal.
    """

    queries_BQ: Tensor
    keys_BK: Tensor
    results_S: Tensor
    mask: Tensor | None

    @classmethod
    def of(
        cls,
        prompts_B: NDArray[np.int64],
        own_B: NDArray[np.int64],
        starts_B2: NDArray[np.int64],
        device: torch.device,
        last: bool,
    ) -> Block:
        """The block of B rows. `prompts_B` and `own_B`: tokens of each row's prompt and of its completion. `starts_B2`:
        the first token of both. `last`: only the result of each row's last token counts.

        Where the own tokens are more, those of the prompt are queries too, whose results are thrown away: causal
        attention then needs no mask, whose size would be the square of the length.
        """
        columns_K, longest = np.arange(int((prompts_B + own_B).max())), int(own_B.max())
        after_BK = columns_K - prompts_B[:, None]  # the place among the row's own tokens; negative in its prompt
        keys_BK = starts_B2[:, 1:] + np.where(after_BK < own_B[:, None], after_BK, 0)
        keys_BK = np.where(after_BK < 0, starts_B2[:, :1] + columns_K, keys_BK)
        queries_BQ, counts_BQ, hidden_BQK = keys_BK, (after_BK >= 0) & (after_BK < own_B[:, None]), None
        if last or int(prompts_B.max()) >= longest:
            own_BQ = own_B[:, None] - 1 if last else np.broadcast_to(np.arange(longest), (len(own_B), longest))
            counts_BQ = own_BQ < own_B[:, None]
            queries_BQ = starts_B2[:, 1:] + np.where(counts_BQ, own_BQ, 0)
            equal = (prompts_B == prompts_B[0]).all() and not last
            hidden_BQK = (after_BK[:, None] > own_BQ[:, :, None])[: 1 if equal else None]
        mask = None if hidden_BQK is None else np.where(hidden_BQK, -np.inf, 0.0).astype(np.float32)[:, None]
        arrays = (queries_BQ, keys_BK, np.flatnonzero(counts_BQ))
        queries, keys, results = (torch.from_numpy(array).to(device) for array in arrays)
        return cls(queries, keys, results, mask if mask is None else torch.from_numpy(mask).to(device))


def blocks_of(
    prompts_U: NDArray[np.int64],
    inner_N: NDArray[np.int64],
    prompt_of_N: NDArray[np.int64],
    device: torch.device,
    *,
    last: bool = False,
) -> list[Block]:
    """U prompts, then N completions that follow the prompts `prompt_of_N`, in blocks of rows next to each other.
    `last`: only the results of the completions' last tokens count."""
    begins_U, begins_N = np.cumsum(prompts_U) - prompts_U, np.cumsum(inner_N) - inner_N + prompts_U.sum()
    before_R, own_R = np.append(0 * prompts_U, prompts_U[prompt_of_N]), np.append(prompts_U, inner_N)
    starts_R2 = np.stack([np.append(begins_U, begins_U[prompt_of_N]), np.append(begins_U, begins_N)], axis=1)
    rows = np.flatnonzero(own_R)
    rows = rows[rows >= last * len(prompts_U)]
    blocks, first = list[Block](), 0
    sizes, lengths = _size(before_R + own_R)[rows].tolist(), own_R[rows].tolist()
    for row in range(1, len(rows) + 1):
        if row == len(rows) or sizes[row] != sizes[first] or not _near(lengths[row], lengths[first]):
            own = rows[first:row]
            blocks.append(Block.of(before_R[own], own_R[own], starts_R2[own], device, last))
            first = row
    return blocks


def _size(lengths_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """A class of lengths: 0 up to 64 tokens, 1 up to 128, and so on."""
    return np.ceil(np.log2(np.maximum(lengths_N, 64) / 64)).astype(np.int64)


def _near(length: int, other: int) -> bool:
    """Whether rows may be padded to one length: one is at most a third and 16 tokens longer than the other."""
    return 3 * max(length, other) <= 4 * min(length, other) + 48


def packed_attention(
    query_TE: Tensor,
    key_TE: Tensor,
    value_TE: Tensor,
    heads: int,
    scaling: float | None,
    packed: PackedRows,
    *,
    last: bool = False,
) -> Tensor:
    """[T, E] for all query heads. Keys and values may have fewer heads, each for several query heads. `last`: [N, E],
    of each row's last token alone (`PackedRows.ends_N`)."""
    if not last and why_not_varlen(query_TE, heads) is None:
        return varlen_attention(query_TE, key_TE, value_TE, heads, scaling, packed.sequences)
    mixed = []
    for block in packed.last_blocks if last else packed.blocks:
        keys, values = embedding(block.keys_BK, key_TE), embedding(block.keys_BK, value_TE)
        mixed_BQE = _attend(embedding(block.queries_BQ, query_TE), keys, values, block.mask, heads, scaling)
        mixed.append(mixed_BQE.flatten(0, 1).index_select(0, block.results_S))
    return torch.cat(mixed)


def _attend(
    query_BQE: Tensor, key_BKE: Tensor, value_BKE: Tensor, mask: Tensor | None, heads: int, scaling: float | None
) -> Tensor:
    """Attention of padded rows [B, Q, E]; causal if there is no mask."""
    size = query_BQE.shape[2] // heads
    query, key, value = (
        tensor.view(*tensor.shape[:2], -1, size).transpose(1, 2) for tensor in (query_BQE, key_BKE, value_BKE)
    )
    repeats = heads // key.shape[1]
    if query.device.type != "cpu":  # a CPU's kernel takes fewer heads of keys as they are
        key, value, repeats = repeat_kv(key, repeats), repeat_kv(value, repeats), 1
    mask = mask if mask is None else mask.to(query.dtype)
    mixed_BHQE = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=repeats > 1
    )
    return mixed_BHQE.transpose(1, 2).flatten(2)
