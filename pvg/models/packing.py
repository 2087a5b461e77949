"""Rows of different length as one batch: packed into one long row, or padded to a rectangle.

Packing puts the distinct prompts first, then the completions, without padding. numpy computes the layout, so nothing
waits for a device.

The result of a row must not depend on its batch; on a GPU, up to rounding. On a CPU, a matrix product with an odd
number of rows rounds differently, so rows are padded to widths and batches to heights that agree (`pad_batch`). A
resumed run needs this: its cache is empty, so its batches differ, but scores and weights must be equal."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
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


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """R rows with T tokens in total, stored consecutively, and their layout as a rectangle of width W, the longest row.

    `slots_T` is the position of each token in the rectangle [R * W]. `tokens_S` is the token at each position (any
    token in the padding). Both are None if all rows have length W: then both layouts are the same memory.
    """

    width: int
    ends_R: Tensor
    slots_T: Tensor | None
    tokens_S: Tensor | None

    @classmethod
    def of(cls, lengths: ArrayLike, device: torch.device | str = "cpu") -> JoinedRows:
        lengths_R = np.asarray(lengths, dtype=np.int64)
        width = int(lengths_R.max(initial=0))
        ends_R = np.cumsum(lengths_R)
        ends = torch.from_numpy(ends_R).to(device)
        if (lengths_R == width).all():
            return cls(width, ends, None, None)
        real_RW = np.arange(width) < lengths_R[:, None]
        slots_T = np.flatnonzero(real_RW)
        tokens_S = np.where(real_RW, np.arange(width) + (ends_R - lengths_R)[:, None], 0).reshape(-1)
        return cls(width, ends, torch.from_numpy(slots_T).to(device), torch.from_numpy(tokens_S).to(device))

    def spread(self, flat_TE: Tensor) -> Tensor:
        """[T, E] -> [R, W, E]. The padding holds the values of some token and gets no gradient."""
        if self.slots_T is not None:
            flat_TE = cast(Tensor, _Spread.apply(flat_TE, self.slots_T, self.tokens_S))  # type: ignore[no-untyped-call]
        return flat_TE.reshape(-1, self.width, flat_TE.shape[1])

    def gather(self, spread_RWE: Tensor) -> Tensor:
        """[R, W, E] -> [T, E]: the inverse, without the padding."""
        if self.slots_T is None:
            return spread_RWE.flatten(0, 1)
        return spread_RWE.flatten(0, 1).index_select(0, self.slots_T)


class _Spread(torch.autograd.Function):
    """index_select whose gradient ignores the padding; torch's would add it up."""

    @staticmethod
    def forward(ctx: Any, flat_TE: Tensor, slots_T: Tensor, tokens_S: Tensor) -> Tensor:
        ctx.save_for_backward(slots_T)
        return flat_TE.index_select(0, tokens_S)

    @staticmethod
    def backward(ctx: Any, grad_SE: Tensor) -> tuple[Tensor, None, None]:
        (slots_T,) = ctx.saved_tensors
        return grad_SE.index_select(0, slots_T), None, None


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
    token, which predicts nothing.

    `prompts` and `completions` give the layout of both parts; `prompt_of_N` is each row's prompt. On the host:
    `prompt_lengths_U` and `inner_N`, the lengths of both parts among the T tokens, and `prompt_numbers_N`, as
    `prompt_of_N`.

    There are M completion tokens: first the first token of each row, then all others. `rows_M` and `columns_M` are
    their positions in the padded rows, `targets_M` their ids. The last prompt token (`lasts_R`) predicts a row's first
    token; the completion tokens among the T predict the others, in order.
    """

    ids_1T: Tensor
    positions_1T: Tensor
    prompts: JoinedRows
    completions: JoinedRows
    prompt_of_N: Tensor
    prompt_lengths_U: NDArray[np.int64]
    inner_N: NDArray[np.int64]
    prompt_numbers_N: NDArray[np.int64]
    completion_tokens: int
    lengths_N: NDArray[np.int64]
    lasts_R: Tensor
    rows_M: Tensor
    columns_M: Tensor
    targets_M: Tensor

    @cached_property
    def mask(self) -> Tensor:
        """True where a completion token may attend: [1 or N, 1, W, P + W], of the padded widths of both parts."""
        width = self.completions.width
        return _mask(self.prompt_lengths_U, self.prompt_numbers_N, width).to(self.ids_1T.device)

    @cached_property
    def sequences(self) -> SequenceLayout:
        """For variable-length attention."""
        return SequenceLayout.of(self.prompt_lengths_U, self.inner_N, self.prompt_numbers_N, self.ids_1T.device)


def pack_rows(sequences: Sequence[Int32], prompt_lengths: NDArray[Any], device: torch.device | str) -> PackedRows:
    """Pack rows of prompt + completion. Prompts with equal tokens count as one, even across groups."""
    lengths_N, starts_N = lengths_of(sequences), np.asarray(prompt_lengths, dtype=np.int64)
    firsts_U, prompt_of_N = distinct_prompts(sequences, starts_N)
    prompts = [sequences[row][: starts_N[row]] for row in firsts_U]
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
        prompt_lengths_U=prompts_U,
        inner_N=inner_N,
        prompt_numbers_N=prompt_of_N,
        completion_tokens=int(inner_N.sum()),
        lengths_N=lengths_N,
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


def shared_prompt_batches(
    prompt_of_N: NDArray[np.int64], prompt_lengths: NDArray[Any], lengths: NDArray[np.int64], budget: int
) -> list[NDArray[np.int64]]:
    """Row numbers in batches where distinct prompts x longest prompt + rows x longest completion <= `budget`. This is
    attention's work, including padding.

    Rows with the same prompt stay together, and those with the longest row come first. The result depends only on
    prompts and lengths. Each row is in exactly one batch.

    Raises ConfigurationError if a single row is over the budget.
    """
    check_budget(lengths, budget)
    longest_U = np.zeros(int(prompt_of_N.max(initial=-1)) + 1, dtype=np.int64)
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
        if not batches or positions > budget:
            batches.append([])
            prompts, widest, longest = set(), start, int(lengths[row]) - start
        batches[-1].append(row)
        prompts.add(prompt)
    return [np.asarray(found, dtype=np.int64) for found in batches]


def _mask(prompt_lengths_U: NDArray[np.int64], prompt_of_N: NDArray[np.int64], width: int) -> Tensor:
    """See PackedRows.mask. Completions are padded on the right, where causal attention does not look."""
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
    if why_not_varlen(query_TE, heads) is None:
        return varlen_attention(query_TE, key_TE, value_TE, heads, scaling, packed.sequences)
    parts = [len(query_TE) - packed.completion_tokens, packed.completion_tokens]
    of_prompts, of_completions = zip(*(torch.split(flat, parts) for flat in (query_TE, key_TE, value_TE)), strict=True)
    query_UPE, key_UPE, value_UPE = map(packed.prompts.spread, of_prompts)
    mixed = [packed.prompts.gather(_attend(query_UPE, key_UPE, value_UPE, None, heads, scaling))]
    if packed.completions.width:
        query_NWE, key_NWE, value_NWE = map(packed.completions.spread, of_completions)
        keys, values = _after_prompts(key_UPE, key_NWE, packed), _after_prompts(value_UPE, value_NWE, packed)
        mixed.append(packed.completions.gather(_attend(query_NWE, keys, values, packed.mask, heads, scaling)))
    return torch.cat(mixed)


def last_attention(
    query_TE: Tensor, key_TE: Tensor, value_TE: Tensor, heads: int, scaling: float | None, packed: PackedRows
) -> Tensor:
    """[N, E] of only the last completion token of each row. Every row has one (see `last_tokens`)."""
    parts = [len(key_TE) - packed.completion_tokens, packed.completion_tokens]
    keys, values = (
        _after_prompts(packed.prompts.spread(prompts), packed.completions.spread(completions), packed)
        for prompts, completions in (torch.split(flat, parts) for flat in (key_TE, value_TE))
    )
    lasts_N = last_tokens(packed)
    rows_N = torch.arange(len(lasts_N), device=lasts_N.device)
    columns_N = torch.diff(packed.completions.ends_R, prepend=rows_N[:1]) - 1
    mask_N11K = packed.mask.expand(len(rows_N), -1, -1, -1)[rows_N, :, columns_N][:, :, None]
    return _attend(query_TE.index_select(0, lasts_N)[:, None], keys, values, mask_N11K, heads, scaling).flatten(0, 1)


def last_tokens(packed: PackedRows) -> Tensor:
    """lasts_N: the position among the T tokens of each row's last one, which must be a completion token."""
    return packed.completions.ends_R + (packed.ids_1T.shape[1] - packed.completion_tokens - 1)


def _after_prompts(prompts_UPE: Tensor, own_NWE: Tensor, packed: PackedRows) -> Tensor:
    """[N, P + W, E]: each row's prompt and completion."""
    return torch.cat([prompts_UPE.index_select(0, packed.prompt_of_N), own_NWE], dim=1)


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
