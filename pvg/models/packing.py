"""Rows of different length as one batch: packed into one long row, or padded to a rectangle.

Packing puts the distinct prompts first, then the completions, without padding. numpy computes the layout, so nothing
waits for a device.

The result of a row must not depend on its batch; on a GPU, up to rounding. On a CPU, a matrix product with an odd
number of rows rounds differently, so rows are padded to widths and batches to heights that agree (`pad_batch`). A
resumed run needs this: its cache is empty, so its batches differ, but scores and weights must be equal."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
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
from torch.nn.functional import embedding, pad

from pvg.errors import ConfigurationError
from pvg.models.compute import HALVES, attend, product_dtype
from pvg.records import Float32, Int32

# Attention of packed rows on a GPU, by torch's flash attention for sequences of different lengths.
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
    def of(cls, trie: Trie, device: torch.device | str) -> SequenceLayout:
        """A sequence for each segment, which attends to its path."""
        keys_S = trie.starts_S + trie.lengths_S

        def starts(lengths_S: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(np.append(0, np.cumsum(lengths_S)).astype(np.int32)).to(device)

        tokens_K = torch.from_numpy(np.concatenate(trie.paths)).to(device)
        return cls(starts(trie.lengths_S), starts(keys_S), tokens_K, int(trie.lengths_S.max()), int(keys_S.max()))


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


# --- what rows have in common ----------------------------------------------------------------------------------------

# Fewer tokens in common are computed for each row, because a segment costs something too.
LEAST_SHARED = 8
Place = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Trie:
    """N rows as S segments, whose T tokens are computed once, one segment after the other. The tokens before a segment
    in its rows are those of its parent, its parent's parent, and so on: its path ends with its own tokens.

    `parents_S` (-1: none); `starts_S`, the position in a row of a segment's first token; `lengths_S`; `rows_S`, a row
    that has it. `hosts_N`: a row that begins with the given row, or equals it; itself if there is none other.
    `leaves_N`: the last segment of the host. The segments from `inner` on belong to one host each; those before end
    where rows part, or with a prompt. `order_N`: the rows such that those with more in common are closer together, the
    longest first. `again_N`: what each of them has in common with the one before it, in tokens; all, if it begins it.

    The last token of a host predicts nothing, so it is not computed, unless it belongs to the prompt.
    """

    inner: int
    hosts_N: NDArray[np.int64]
    leaves_N: NDArray[np.int64]
    parents_S: NDArray[np.int64]
    starts_S: NDArray[np.int64]
    lengths_S: NDArray[np.int64]
    rows_S: NDArray[np.int64]
    order_N: NDArray[np.int64]
    again_N: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Int32], prompt_lengths: NDArray[Any], *, prompts_alone: bool = False) -> Trie:
        """`prompts_alone`: no row shares tokens after its prompt."""
        prompts_N, lengths_N = np.asarray(prompt_lengths, dtype=np.int64), lengths_of(rows)
        keys, lengths = [np.asarray(row, dtype=np.int32) for row in rows], lengths_N.tolist()
        if prompts_alone:
            keys = [np.where(np.arange(len(key)) < prompts_N[n], key, -1 - n) for n, key in enumerate(keys)]
        order = np.array(sorted(range(len(rows)), key=[key.tobytes() for key in keys].__getitem__), dtype=np.int64)
        common_N = np.array([0, *(common_tokens(keys[one], keys[other]) for one, other in itertools.pairwise(order))])
        # J hosts. The rows before each in the order begin it.
        ends_J = np.flatnonzero(np.append(common_N[1:] < lengths_N[order][:-1], True))
        begins_J = np.append(0, ends_J[:-1] + 1)
        common_J, hosts_J, sizes_J = common_N[begins_J], order[ends_J], np.diff(begins_J, append=len(rows))
        computed_J = np.maximum(lengths_N - 1, prompts_N)[hosts_J]
        prompts_J = np.maximum.reduceat(prompts_N[order], begins_J)
        firsts_J = np.minimum.reduceat(order, begins_J)
        segments, leaves_J = list[tuple[int, ...]](), np.zeros(len(ends_J), dtype=np.int64)
        # A place is the way to a host: for each segment the longest row, the first row, and where it stops.
        places, work = list[tuple[Place, int]](), list[tuple[int, int, int, int, Place]]([(0, len(ends_J), 0, -1, ())])
        while work:
            begin, end, start, parent, place = work.pop()
            alone, here = end == begin + 1, slice(begin, end)
            common = int(computed_J[begin] if alone else common_J[begin + 1 : end].min())
            prompt, cut = int(prompts_J[begin]), start
            in_all = start < prompt <= common and (prompts_J[here] == prompt).all()
            if in_all and (alone or common - prompt < LEAST_SHARED):
                cut = prompt
            elif not alone and common - start >= LEAST_SHARED:
                cut = common
            for stop, leaf in ((cut, 0), (common if alone else cut, 1)):
                if stop > start:
                    first = int(firsts_J[here].min())
                    segments.append((parent, start, stop - start, int(hosts_J[begin]), leaf, first))
                    place = (*place, (-int(computed_J[here].max()), first, stop))
                    start, parent = stop, len(segments) - 1
            leaves_J[begin] = parent
            if alone:
                places.append((place, begin))
            else:
                parts = (np.flatnonzero(common_J[begin + 1 : end] == common) + begin + 1).tolist()
                work += [(*pair, start, parent, place) for pair in itertools.pairwise([begin, *parts, end])]
        in_order, again_N, before = list[int](), lengths_N.copy(), Place()
        for place, host in sorted(places):
            in_order += sorted(order[begins_J[host] : ends_J[host] + 1].tolist(), key=lambda row: (-lengths[row], row))
            both = [one for one, other in zip(before, place, strict=False) if one == other]
            again_N[in_order[-int(sizes_J[host])]] = both[-1][2] if both else 0
            before = place
        parents_S, starts_S, lengths_S, rows_S, leaf_S, firsts_S = np.array(segments, dtype=np.int64).T
        # Similar lengths are next to each other, so that blocks have little padding.
        order_S = np.lexsort((firsts_S, -lengths_S, -_size(starts_S + lengths_S + leaf_S), leaf_S))
        place_S = np.append(np.argsort(order_S), -1)  # -1 stays -1
        hosts_N, leaves_N = np.empty((2, len(rows)), dtype=np.int64)
        hosts_N[order], leaves_N[order] = np.repeat(hosts_J, sizes_J), place_S[np.repeat(leaves_J, sizes_J)]
        of_parents_S, inner, order_N = place_S[parents_S], len(leaf_S) - int(leaf_S.sum()), np.array(in_order)
        facts = (of_parents_S[order_S], starts_S[order_S], lengths_S[order_S], rows_S[order_S])
        return cls(inner, hosts_N, leaves_N, *facts, order_N, again_N[order_N])

    @cached_property
    def begins_S(self) -> NDArray[np.int64]:
        """The first of the T tokens of each segment."""
        return np.cumsum(self.lengths_S) - self.lengths_S

    @cached_property
    def paths(self) -> list[NDArray[np.int64]]:
        """For each segment, which of the T tokens are on its path."""
        found = [np.arange(length) + begin for length, begin in zip(self.lengths_S, self.begins_S, strict=True)]
        for segment in np.argsort(self.starts_S, kind="stable").tolist():  # parents first
            if (parent := self.parents_S[segment]) >= 0:
                found[segment] = np.concatenate([found[parent], found[segment]])
        return found

    def tokens_of(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """What `rows` have for each token, for the T tokens."""
        ends_S = self.starts_S + self.lengths_S
        parts = zip(self.rows_S.tolist(), self.starts_S.tolist(), ends_S.tolist(), strict=True)
        return np.concatenate([rows[row][start:end] for row, start, end in parts])


def common_tokens(one: Int32, other: Int32) -> int:
    """The tokens with which both begin."""
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    return int(differ.argmax()) if differ.any() else size


@dataclass(frozen=True)
class PackedRows:
    """N rows as one row of the T tokens of their trie. `longest`: the tokens of the longest row.

    M of the predictions of rows' tokens differ: first those by the tokens `sources_A`, then those by the last `tail` of
    the T tokens, in order. `targets_M` are the predicted ids. `rows_W` and `columns_W` are the positions of all
    completion tokens in the given rows, padded; `picks_W` is the prediction of each, None if it is M in order.
    `ends`: the tokens of the T with which rows end, leaving out their last ones; `places_N`: which of these is a
    row's.
    """

    ids_1T: Tensor
    positions_1T: Tensor
    trie: Trie
    longest: int
    tail: int
    sources_A: Tensor
    targets_M: Tensor
    rows_W: Tensor
    columns_W: Tensor
    picks_W: Tensor | None
    ends: NDArray[np.int64]
    places_N: Tensor

    @cached_property
    def ends_E(self) -> Tensor:
        return torch.from_numpy(self.ends).to(self.ids_1T.device)

    @cached_property
    def blocks(self) -> list[Block]:
        """For attention without variable lengths."""
        return blocks_of(self.trie, np.arange(len(self.trie.starts_S)), self.trie.lengths_S, self.ids_1T.device)

    @cached_property
    def last_blocks(self) -> list[Block]:
        """As `blocks`, for the results of `ends_E` alone."""
        segments_E = np.searchsorted(self.trie.begins_S, self.ends, side="right") - 1
        own_E = self.ends - self.trie.begins_S[segments_E] + 1
        return blocks_of(self.trie, segments_E, own_E, self.ids_1T.device, last=True)

    @cached_property
    def sequences(self) -> SequenceLayout:
        """For variable-length attention."""
        return SequenceLayout.of(self.trie, self.ids_1T.device)


def pack_rows(
    sequences: Sequence[Int32], prompt_lengths: NDArray[Any], device: torch.device | str, *, prompts_alone: bool = False
) -> PackedRows:
    """Pack rows of prompt + completion, also those of different groups. `prompts_alone`: as in Trie.of."""
    trie = Trie.of(sequences, prompt_lengths, prompts_alone=prompts_alone)
    starts_N, lengths_N = np.asarray(prompt_lengths, dtype=np.int64), lengths_of(sequences)
    own_N, tokens, paths = lengths_N - starts_N, int(trie.lengths_S.sum()), trie.paths
    order_N = np.lexsort((-own_N, -_size(lengths_N)))
    rows_W, columns_W = np.repeat(order_N, own_N[order_N]), counted(own_N[order_N], starts_N[order_N])
    # What each completion token follows, and its number: its place among the T tokens; for a host's last, T + the host.
    sources, numbers = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for row in order_N[own_N[order_N] > 0].tolist():
        path, start, last = paths[trie.leaves_N[row]], int(starts_N[row]), int(lengths_N[row]) - 1
        sources.append(path[start - 1 : last])
        numbers.append(path[start : last + 1])
        if last == len(path):
            numbers.append(np.array([tokens + trie.hosts_N[row]]))
    sources_W, numbers_W = np.concatenate(sources), np.concatenate(numbers)
    first = int(trie.lengths_S[: trie.inner].sum())
    after_T = np.arange(1, tokens + 1)
    after_T[[path[-1] for path in paths[trie.inner :]]] = tokens + trie.rows_S[trie.inner :]
    in_order_W = (sources_W >= first) & (numbers_W == after_T[sources_W])
    order_W = np.argsort(in_order_W, kind="stable")
    rows_W, columns_W, sources_W, numbers_W = (each[order_W] for each in (rows_W, columns_W, sources_W, numbers_W))
    before = len(order_W) - int(in_order_W.sum())
    _, firsts_A, number_A = np.unique(numbers_W[:before], return_index=True, return_inverse=True)
    picks_W = np.concatenate([np.argsort(np.argsort(firsts_A))[number_A], len(firsts_A) + sources_W[before:] - first])
    begins_N = np.cumsum(lengths_N) - lengths_N
    targets_M = np.zeros(len(firsts_A) + tokens - first, dtype=np.int64)  # some are not picked, and need an id too
    targets_M[picks_W] = np.concatenate(sequences)[begins_N[rows_W] + columns_W]
    ends_N = [paths[leaf][max(length, 2) - 2] for leaf, length in zip(trie.leaves_N, lengths_N, strict=True)]
    ends, places_N = np.unique(np.array(ends_N, dtype=np.int64), return_inverse=True)
    in_order = np.array_equal(picks_W, np.arange(len(targets_M)))
    found = {
        "ids_1T": trie.tokens_of(sequences)[None],
        "positions_1T": counted(trie.lengths_S, trie.starts_S)[None],
        "sources_A": sources_W[np.sort(firsts_A)],
        "targets_M": targets_M,
        "rows_W": rows_W,
        "columns_W": columns_W,
        "picks_W": None if in_order else picks_W,
        "places_N": places_N,
    }
    tensors = {
        name: None if array is None else torch.from_numpy(array.astype(np.int64)).to(device)
        for name, array in found.items()
    }
    return PackedRows(trie=trie, longest=int(lengths_N.max()), tail=tokens - first, ends=ends, **cast(Any, tensors))


def distinct_rows(
    sequences: Sequence[Int32], prompt_lengths: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """firsts_U: the first of each distinct row with its prompt length, in order. number_of_N: row n equals row
    firsts_U[number_of_N[n]]."""
    firsts: dict[tuple[int, bytes], tuple[int, int]] = {}
    rows = ((int(length), ids.tobytes()) for ids, length in zip(sequences, prompt_lengths, strict=True))
    number_of_N = [firsts.setdefault(row, (len(firsts), place))[0] for place, row in enumerate(rows)]
    return np.array([place for _, place in firsts.values()], dtype=np.int64), np.array(number_of_N, dtype=np.int64)


# To fill batches, what rows have in common is computed in two of them only if it takes at most this part of one.
REPEATED = 16

# Autograd keeps the keys and values that a row gathers from before its own tokens, and those of a segment that it
# splits. So a row counts as more than its own tokens if it gathers more than FREE_KEYS for each: KEYS_PER_TOKEN of the
# others as one. In a small model with as many heads of keys as of queries, a batch of one dialogue whose rows part at
# many places then takes at most 1.6 times the memory of one group; larger models and grouped queries keep less.
FREE_KEYS, KEYS_PER_TOKEN = 2, 8


def row_batches(
    sequences: Sequence[Int32],
    prompt_lengths: NDArray[Any],
    budget: int,
    *,
    prompts_alone: bool = False,
    units_N: NDArray[np.int64] | None = None,
) -> list[NDArray[np.int64]]:
    """Row numbers in as few batches as possible, one forward pass of packed rows each, with similar numbers of tokens
    of at most `budget`; what rows of a batch have in common counts once. The batch with the longest row comes first.
    Many gathered keys count as tokens too (KEYS_PER_TOKEN), but not where a row follows one with the same prompt.

    Rows that have something in common stay together if this costs no batch. Rows of a unit (`units_N`, numbers) always
    do if the unit is within the budget. Units count what they have in common with others again.

    Raises ConfigurationError if a single row is over the budget.
    """
    whole = units_N is not None
    check_budget(lengths_of(sequences), budget)
    if not sequences:
        return []
    trie = Trie.of(sequences, prompt_lengths, prompts_alone=prompts_alone)
    if units_N is None:  # rows that have something in common
        begins = np.flatnonzero(trie.again_N == 0)
        firsts = np.minimum.reduceat(trie.order_N, begins)
        units_N = np.repeat(firsts, np.diff(begins, append=len(sequences)))[np.argsort(trie.order_N)]
    ranks = np.argsort(units_N[trie.order_N], kind="stable")
    order_N = trie.order_N[ranks]
    between = (trie.again_N[one + 1 : other + 1].min(initial=budget) for one, other in itertools.pairwise(ranks))
    again_N = np.array([0, *between]) * (np.diff(units_N[order_N], prepend=-1) == 0)
    lengths_N, prompts_N = lengths_of(sequences)[order_N], np.asarray(prompt_lengths, dtype=np.int64)[order_N]
    begun = 0  # the length of the last row that no row before it in its unit contains
    for place, length in enumerate(lengths_N.tolist()):
        again_N[place] = min(again_N[place], begun)  # the row with more in common may be in another unit
        begun = length if length > again_N[place] else begun
    tokens_N = lengths_N - again_N
    of_group_N = (again_N >= prompts_N) & (np.diff(prompts_N, prepend=-1) == 0)
    beyond_N = np.maximum(np.where(of_group_N | (tokens_N == 0), 0, again_N) - FREE_KEYS * tokens_N, 0)
    loads_N = tokens_N + beyond_N // KEYS_PER_TOKEN
    bounds = np.append(np.flatnonzero(np.diff(units_N[order_N], prepend=-1)), len(order_N)).tolist()
    parts = [(int(loads_N[first:end].sum()), first, end) for first, end in itertools.pairwise(bounds)]
    parts.sort(key=lambda part: -part[0])
    # What it costs to begin another batch with a row. Rows that begin a row before them stay in its batch.
    cut_N = np.where(tokens_N > 0, again_N, budget + 1)

    def filled(count: int) -> list[list[int]] | None:
        """Each unit in the batch with the lowest load so far; None if they do not fit into so many batches."""
        batches: list[list[int]] = [[] for _ in range(count)]
        loads = [(0, batch) for batch in range(count)]
        for size, start, end in parts:
            first = start
            while first < end:
                load, batch = loads[0]
                ends_R = int(lengths_N[first] - loads_N[first]) + np.cumsum(loads_N[first:end])
                rows = int(np.searchsorted(ends_R, budget - load, side="right"))
                if not rows:
                    return None
                if rows < len(ends_R):
                    rest, room = int(ends_R[-1]), budget - load
                    goal = rest / -(-rest // room) if size > budget else room  # parts of one size
                    most = max(1, min(rows, int(np.searchsorted(ends_R, goal + goal / REPEATED, side="right"))))
                    least = min(most, int(np.searchsorted(ends_R, goal - goal / REPEATED)) + 1)
                    costs = cut_N[first + least : first + most + 1]
                    rows = most - int(costs[::-1].argmin())
                    rows = int(np.searchsorted(ends_R, ends_R[rows - 1], side="right"))
                    if size <= budget and (whole or REPEATED * int(cut_N[first + rows]) > budget):
                        return None
                batches[batch].extend(range(first, first + rows))
                heapreplace(loads, (load + int(ends_R[rows - 1]), batch))
                first += rows
        return batches

    count = -(-int(loads_N.sum()) // budget)
    while (found := filled(count)) is None:
        count += 1 + count // 32
    found.sort(key=lambda rows: -int(lengths_N[rows].max(initial=0)))
    most_N = tokens_N + (LEAST_SHARED - 1) * (again_N > 0)

    def over(rows: NDArray[np.int64]) -> bool:
        """Whether a batch computes too much: without the other rows, segments may end a few tokens earlier."""
        begun_N = np.where(np.diff(rows, prepend=-2) == 1, 0, again_N[rows])  # not after the row before it
        own, starts = order_N[rows], np.asarray(prompt_lengths)
        return int((most_N[rows] + begun_N).sum()) > budget and budget < int(
            Trie.of([sequences[row] for row in own], starts[own], prompts_alone=prompts_alone).lengths_S.sum()
        )

    return [order_N[rows] for rows in _halved([np.array(rows) for rows in found if rows], units_N[order_N], over)]


def _halved(
    batches: list[NDArray[np.int64]], units_P: NDArray[np.int64], over: Callable[[NDArray[np.int64]], bool]
) -> Iterator[NDArray[np.int64]]:
    """Batches of places, those that are `over` cut into two, between two units where there are some."""
    work = batches[::-1]
    while work:
        rows = work.pop()
        if not over(rows):
            yield rows
            continue
        ends = np.flatnonzero(np.diff(units_P[rows])) + 1
        middle = int(ends[np.abs(2 * ends - len(rows)).argmin()]) if len(ends) else len(rows) // 2
        work += [rows[middle:], rows[:middle]]


# --- attention of packed rows: of each segment over its path ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """B segments of similar length as a rectangle of queries and one of keys, for attention without variable lengths.

    `queries_BQ` and `keys_BK` are tokens among the T of packed rows; padding is some token of the segment. `results_S`:
    the positions of [B * Q] whose results count, in the order of the tokens. `mask`: what is added to the products,
    [B, 1, Q, K], or [1, 1, Q, K] if it is causal and the last query sees all keys. None: causal, Q = K.
    """

    queries_BQ: Tensor
    keys_BK: Tensor
    results_S: Tensor
    mask: Tensor | None

    @classmethod
    def of(
        cls,
        before_B: NDArray[np.int64],
        own_B: NDArray[np.int64],
        paths: Sequence[NDArray[np.int64]],
        device: torch.device,
        last: bool,
    ) -> Block:
        """The block of B segments. `paths`: the tokens that each sees, of which its own are the last. `before_B` and
        `own_B`: how many are before its own, and how many its own are. `last`: only the result of each segment's last
        token counts.

        Where the own tokens are more, those before them are queries too, whose results are thrown away: causal
        attention then needs no mask, whose size would be the square of the length.
        """
        ends_B, longest = before_B + own_B, int(own_B.max())
        columns_K = np.arange(int(ends_B.max()))
        begins_B1 = np.array([path[before] for path, before in zip(paths, before_B, strict=True)])[:, None]
        keys_BK = np.repeat(begins_B1, len(columns_K), axis=1)
        keys_BK[columns_K < ends_B[:, None]] = np.concatenate(paths)
        after_BK = columns_K - before_B[:, None]  # the place among the own tokens; negative before them
        queries_BQ, counts_BQ, hidden_BQK = keys_BK, (after_BK >= 0) & (after_BK < own_B[:, None]), None
        if last or int(before_B.max()) >= longest:
            own_BQ = own_B[:, None] - 1 if last else np.broadcast_to(np.arange(longest), (len(own_B), longest))
            counts_BQ = own_BQ < own_B[:, None]
            queries_BQ = begins_B1 + np.where(counts_BQ, own_BQ, 0)
            equal = (before_B == before_B[0]).all() and not last
            hidden_BQK = (after_BK[:, None] > own_BQ[:, :, None])[: 1 if equal else None]
        mask = None if hidden_BQK is None else np.where(hidden_BQK, -np.inf, 0.0).astype(np.float32)[:, None]
        arrays = (queries_BQ, keys_BK, np.flatnonzero(counts_BQ))
        queries, keys, results = (torch.from_numpy(array).to(device) for array in arrays)
        return cls(queries, keys, results, mask if mask is None else torch.from_numpy(mask).to(device))


def blocks_of(
    trie: Trie, segments_R: NDArray[np.int64], own_R: NDArray[np.int64], device: torch.device, *, last: bool = False
) -> list[Block]:
    """Segments of a trie, each with its first `own_R` tokens, in blocks of those next to each other. `last`: only the
    results of the last of these tokens count."""
    before_R = trie.starts_S[segments_R]
    blocks, first = list[Block](), 0
    sizes, lengths, ends = _size(before_R + own_R).tolist(), own_R.tolist(), (before_R + own_R).tolist()
    paths = [trie.paths[segment][:end] for segment, end in zip(segments_R.tolist(), ends, strict=True)]
    for row in range(1, len(lengths) + 1):
        if row == len(lengths) or sizes[row] != sizes[first] or not _near(lengths[row], lengths[first]):
            own = slice(first, row)
            blocks.append(Block.of(before_R[own], own_R[own], paths[own], device, last))
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
    """[T, E] for all query heads. Keys and values may have fewer heads, each for several query heads. `last`: [E, E],
    of the last tokens alone (`PackedRows.ends_E`)."""
    if not last and why_not_varlen(query_TE, heads) is None:
        return varlen_attention(query_TE, key_TE, value_TE, heads, scaling, packed.sequences)
    mixed = []
    for block in packed.last_blocks if last else packed.blocks:
        keys, values = embedding(block.keys_BK, key_TE), embedding(block.keys_BK, value_TE)
        mixed_BQE = attend(embedding(block.queries_BQ, query_TE), keys, values, block.mask, heads, scaling)
        mixed.append(mixed_BQE.flatten(0, 1).index_select(0, block.results_S))
    return torch.cat(mixed)
