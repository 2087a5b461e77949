"""`LeanRows`: rows that `LeanDecoder` decodes together, and that may join and leave between steps.

Rows with the same tokens have the same logits, so they share one row of the cache, which is computed once. When they
sample different tokens, `_regroup` copies the cache row. The cache rows in use are always the first ones. A group
begins with one cache row. In the embedded game, a step computes about a third of the rows.

State per row is kept in numpy arrays on the host; each step copies its inputs to the device and its tokens back. That
is free on a CPU. On a GPU, pvg.rollout.device_rows keeps the state there.

Invariant: the rows of a step depend only on the requests, their order of admission and the sampled tokens, never on a
clock or another thread. The only exception: rows whose callers have left (`dropped_N`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from pvg.models.compute import KEPT_BYTES, return_freed_memory
from pvg.models.packing import common_tokens, pad_right, token_budget_batches
from pvg.records import Float32, Int32
from pvg.rollout.decoding import PREFILL_TOKENS, DecodedRow, DecodingJob, RunningRows, TurnResult, finished_row
from pvg.rollout.engine import GenerationRequest
from pvg.rollout.lean import CommonPrefix, LeanCache, LeanDecoder
from pvg.rollout.sampler import RowSettings, draw, uniform_numbers
from pvg.telemetry.spans import span

# Fills rows of a `LeanCache` with known tokens, each distinct beginning computed once.


# Parts of prompts that several prompts begin with, so that a prefill computes each part once.

LEAST_SHARED = 32  # tokens; an estimate: the separate pass for a few tokens costs more than it saves
MOST_SHARED = 2


@dataclass(frozen=True, slots=True)
class SharedPart:
    """The tokens `start:end`, which all `prompts` have, as all tokens before them. Prompts are numbers in a list."""

    prompts: tuple[int, ...]
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def shared_parts(prompts: Sequence[Int32]) -> list[list[SharedPart]]:
    """The parts of distinct prompts int32 [P], level by level. The parts of a prompt cover each of its tokens once.
    Without shared parts there is one level, in the order of the prompts."""
    # The bytes of numbers that are not negative have the order of the numbers, if the high byte is the first one.
    order = sorted(range(len(prompts)), key=lambda number: prompts[number].astype(">i4").tobytes())
    common = [common_tokens(prompts[one], prompts[next_]) for one, next_ in pairwise(order)]
    levels: list[list[SharedPart]] = [[]]

    def add(low: int, high: int, start: int, end: int, level: int) -> None:
        if level == len(levels):
            levels.append([])
        if end > start:
            levels[level].append(SharedPart(tuple(sorted(order[low:high])), start, end))

    def split(low: int, high: int, start: int, level: int) -> None:
        """The parts of order[low:high], which share `start` tokens of earlier levels."""
        first = low
        for place in range(low, high):
            if place + 1 < high and level < MOST_SHARED and common[place] >= start + LEAST_SHARED:
                continue
            if first == place:
                add(first, place + 1, start, len(prompts[order[place]]), level)
            else:
                end = min(common[first:place])
                add(first, place + 1, start, end, level)
                split(first, place + 1, end, level + 1)
            first = place + 1

    split(0, len(order), 0, 0)
    return [sorted(level, key=lambda part: part.prompts[0]) for level in levels]


def prefill_rows(decoder: LeanDecoder, cache: LeanCache, prefix_of: Mapping[int, Int32]) -> None:
    """Fill the cache's rows with their prefixes int32 [P]: all known tokens but the last, which is the row's first
    input. What several prefixes begin with is computed once."""
    rows_of: dict[bytes, list[int]] = {}
    for row, prefix in prefix_of.items():
        if len(prefix):
            rows_of.setdefault(prefix.tobytes(), []).append(row)
    groups, device = list(rows_of.values()), decoder.device
    prefixes = [prefix_of[rows[0]] for rows in groups]
    for parts in shared_parts(prefixes):
        lengths_P = np.asarray([part.length for part in parts], dtype=np.int64)
        for batch in token_budget_batches(lengths_P, max(PREFILL_TOKENS, int(lengths_P.max(initial=0)))):
            chosen = [parts[number] for number in batch]
            ids_BL, _ = pad_right([prefixes[part.prompts[0]][part.start : part.end] for part in chosen], 0, device)
            starts = [part.start for part in chosen]
            pairs = [(row, b) for b, part in enumerate(chosen) for prompt in part.prompts for row in groups[prompt]]
            rows_F, prompts_F = torch.tensor(pairs, device=device).T
            decoder.prefill(
                ids_BL, cache, rows_F, prompts_F, torch.tensor(starts, device=device) if any(starts) else None
            )


# In continuous batching a turn ends when this share of its rows has finished, or after TURN_STEPS. More often would
# spend too much on prefills and trips to the event loop; less often would leave places empty.
TURN_SHARE = 1 / 16
TURN_STEPS = 16
# The number of columns is a multiple of this, so a slightly longer request needs no new cache, plus one: rows that are
# a power of two apart would compete for the same CPU cache lines.
COLUMNS = 32
# By how many columns a large cache grows, besides. Each time its rows are copied, which is little beside what they are
# read in as many steps.
GROWTH = 96


def _whole(columns: int) -> int:
    return -(-columns // COLUMNS) * COLUMNS + 1


@dataclass(slots=True)
class _Slots:
    """One entry per row. `cache`: its row of the cache. `prompt`: equal for equal prompts. `position`: where the next
    input token is written. `count`: tokens of the completion so far, including those it began with."""

    ticket_R: NDArray[np.int64]
    live_R: NDArray[np.bool_]
    cache_R: NDArray[np.int64]
    prompt_R: NDArray[np.int64]
    token_R: NDArray[np.int64]
    position_R: NDArray[np.int64]
    count_R: NDArray[np.int64]
    limit_R: NDArray[np.int64]
    stop_RS: NDArray[np.int64]
    uniform_RC: NDArray[np.float64]
    tokens_RC: NDArray[np.int64]
    logprobs_RC: Float32
    requests: list[GenerationRequest | None]

    @classmethod
    def empty(cls, rows: int, columns: int, stops: int) -> _Slots:
        def whole(*shape: int) -> NDArray[np.int64]:
            return np.zeros(shape, dtype=np.int64)

        return cls(
            ticket_R=whole(rows),
            live_R=np.zeros(rows, dtype=bool),
            cache_R=whole(rows),
            prompt_R=whole(rows),
            token_R=whole(rows),
            position_R=whole(rows),
            count_R=whole(rows),
            limit_R=whole(rows),
            stop_RS=np.full((rows, stops), -1, dtype=np.int64),
            uniform_RC=np.zeros((rows, columns)),
            tokens_RC=whole(rows, columns),
            logprobs_RC=np.zeros((rows, columns), dtype=np.float32),
            requests=[None] * rows,
        )

    def arrays(self) -> list[NDArray[np.generic]]:
        """All fields but the requests, in the order of the fields."""
        found = [getattr(self, name) for name in type(self).__slots__]
        return [array for array in found if isinstance(array, np.ndarray)]


class LeanRows(RunningRows):
    """Decodes at most `max_rows` rows at once. Only the compute thread may call `turn`; see `RunningRows` in
    pvg.rollout.decoding."""

    def __init__(self, decoder: LeanDecoder, max_rows: int, *, continuous: bool) -> None:
        self._decoder = decoder
        self._max_rows = max_rows
        self.joins = continuous
        self._extent = 0
        self._slots = _Slots.empty(0, 0, 1)
        self._cache: LeanCache | None = None
        self._firsts_E = np.zeros(0, dtype=np.int64)  # a live slot of each cache row in use
        self._prefix: CommonPrefix | None = None  # of these cache rows
        self._prompts: dict[bytes, int] = {}  # numbers of the running rows' prompts
        self._settings: RowSettings | None = None  # of the live rows; None: compute them again

    @torch.inference_mode()
    def turn(self, jobs: Sequence[DecodingJob], dropped_N: NDArray[np.bool_]) -> TurnResult:
        """Admit `jobs`, then decode until enough rows have finished. Including `jobs`, at most `max_rows` may run."""
        if jobs:
            with span("prefill", device=True):
                self._admit(jobs)
        with span("decode", device=True):
            return self._decode(dropped_N)

    # --- admission ---------------------------------------------------------------------------------------------------

    def _admit(self, jobs: Sequence[DecodingJob]) -> None:
        requests = [job.request for job in jobs]
        slots = self._places(len(jobs))
        self._make_room(max(slots) + 1, requests)
        state = self._slots
        uniform_NC = uniform_numbers(requests, max(request.sampling.max_tokens for request in requests))
        rows_N = np.asarray(slots)
        state.ticket_R[rows_N] = [job.ticket for job in jobs]
        known = [request.known_ids for request in requests]
        state.token_R[rows_N] = [ids[-1] for ids in known]
        state.position_R[rows_N] = [len(ids) - 1 for ids in known]
        state.limit_R[rows_N] = [request.sampling.max_tokens for request in requests]
        state.live_R[rows_N], state.stop_RS[rows_N] = True, -1
        state.count_R[rows_N] = [request.tokens_resumed for request in requests]
        state.uniform_RC[rows_N, : uniform_NC.shape[1]] = uniform_NC
        for row, request in zip(slots, requests, strict=True):
            state.stop_RS[row, : len(request.sampling.stop_ids)] = request.sampling.stop_ids
            state.requests[row] = request
            if request.resumed_from is not None:
                state.tokens_RC[row, : request.tokens_resumed] = request.resumed_from.token_ids
                state.logprobs_RC[row, : request.tokens_resumed] = request.resumed_from.logprobs
        if not len(self._firsts_E):
            self._prompts.clear()
        prompts = [request.prompt_ids.tobytes() for request in requests]
        state.prompt_R[rows_N] = [self._prompts.setdefault(key, len(self._prompts)) for key in prompts]
        self._extent = max(self._extent, max(slots) + 1)
        rows: dict[bytes, int] = {}  # new cache rows, by their tokens
        new: dict[int, tuple[int, Int32]] = {}  # a slot and all tokens but the last of each
        for slot, ids in zip(slots, known, strict=True):
            row = rows.setdefault(ids.tobytes(), len(self._firsts_E) + len(rows))
            state.cache_R[slot] = row
            new[row] = slot, ids[:-1]
        self._firsts_E = np.append(self._firsts_E, [slot for slot, _ in new.values()])
        assert self._cache is not None
        prefill_rows(self._decoder, self._cache, {row: prefix for row, (_, prefix) in new.items()})
        self._rows_changed()

    def _places(self, count: int) -> list[int]:
        """Slots for new rows: first those of finished rows."""
        finished = np.flatnonzero(~self._slots.live_R[: self._extent]).tolist()
        return (finished + list(range(self._extent, self._extent + count)))[:count]

    def _make_room(self, rows: int, requests: Sequence[GenerationRequest]) -> None:
        """Grow slots and cache if they are too small for `rows` such requests."""
        needed = max(len(request.prompt_ids) + request.sampling.max_tokens for request in requests)
        stops = max(len(request.sampling.stop_ids) for request in requests)
        old = self._slots
        have = old.uniform_RC.shape
        if rows > have[0] or needed > have[1] or stops > old.stop_RS.shape[1]:
            rows = have[0] if rows <= have[0] else min(self._max_rows, max(rows, 2 * have[0]))
            new = _Slots.empty(rows, max(have[1], _whole(needed)), max(stops, old.stop_RS.shape[1]))
            for target, source in zip(new.arrays(), old.arrays(), strict=True):
                target[tuple(slice(size) for size in source.shape)] = source
            new.requests[: len(old.requests)] = old.requests
            self._slots = new
        self._enlarge(len(self._slots.requests), max(len(request.known_ids) for request in requests))

    def _enlarge(self, rows: int, columns: int) -> None:
        """Make the cache large enough for `rows` rows and `columns` columns. One of at most KEPT_BYTES gets the size of
        the slots and never shrinks, so that a small model's run stops allocating. A larger one grows as its rows get
        longer, by a few columns at a time: most rows end before the longest, and a new cache has no room for them."""
        cache, most = self._cache, self._slots.uniform_RC.shape
        have = (0, 0) if cache is None else (cache.rows, cache.columns)
        if rows <= have[0] and columns <= have[1]:
            return
        if most[0] * most[1] * self._decoder.token_bytes <= KEPT_BYTES:
            rows, columns = most
        else:
            columns = max(have[1], min(most[1], _whole(columns + GROWTH)))
            return_freed_memory(rows * columns * self._decoder.token_bytes)
        self._cache = cache = cache if self._extent else None  # frees an empty old cache first
        self._cache = self._decoder.new_cache(rows, columns, cache)

    # --- decoding ----------------------------------------------------------------------------------------------------

    def _decode(self, dropped_N: NDArray[np.bool_]) -> TurnResult:
        done: list[tuple[int, DecodedRow]] = []
        steps = live_rows = 0
        live = self._live
        enough = max(1, int(TURN_SHARE * live)) if self.joins else live
        while live and len(done) < enough and not (self.joins and steps == TURN_STEPS):
            steps += 1
            live_rows += live
            ended = self._ended(self._step(), dropped_N)
            done += ended
            live -= len(ended)
            self._regroup(ended=bool(ended))
        if not live:
            self._extent = 0
            if self._cache is not None and self._cache.nbytes > KEPT_BYTES:  # training needs the memory now
                self._cache, self._slots = None, _Slots.empty(0, 0, 1)
        return TurnResult(done, steps, live_rows)

    @property
    def _live(self) -> int:
        return int(np.count_nonzero(self._slots.live_R[: self._extent]))

    def _step(self) -> NDArray[np.int64]:
        """Sample one token for each live row. Returns the slots of these rows."""
        state, device, firsts_E = self._slots, self._decoder.device, self._firsts_E
        rows_L = np.flatnonzero(state.live_R[: self._extent])
        columns = int(state.position_R[firsts_E].max()) + 1
        assert self._cache is not None
        if columns > self._cache.columns:
            self._enlarge(self._cache.rows if self.joins else len(rows_L), columns)
        if self._settings is None:
            samplings = [request.sampling for row in rows_L if (request := state.requests[row]) is not None]
            self._settings = RowSettings.of(samplings, device)
        logits_EV = self._decoder.step(
            torch.from_numpy(state.token_R[firsts_E]).to(device),
            torch.from_numpy(state.position_R[firsts_E]).to(device),
            self._cache,
            columns,
            self._prefix,
        )
        cache_L, count_L = torch.from_numpy(state.cache_R[rows_L]).to(device), state.count_R[rows_L]
        uniform_L = torch.from_numpy(state.uniform_RC[rows_L, count_L]).to(device)
        tokens_L, logprobs_L = draw(logits_EV.index_select(0, cache_L), self._settings, uniform_L)
        state.token_R[rows_L] = state.tokens_RC[rows_L, count_L] = tokens_L.cpu().numpy()
        state.logprobs_RC[rows_L, count_L] = logprobs_L.cpu().numpy()
        state.count_R[rows_L] += 1
        state.position_R[rows_L] += 1
        return rows_L

    def _ended(self, rows_L: NDArray[np.int64], dropped_N: NDArray[np.bool_]) -> list[tuple[int, DecodedRow]]:
        """Tickets and results of the rows that ended in this step. The log-probs of dropped rows are not checked."""
        state = self._slots
        stopped_L = (state.token_R[rows_L, None] == state.stop_RS[rows_L]).any(axis=1)
        ended_L = stopped_L | (state.count_R[rows_L] >= state.limit_R[rows_L])
        if dropped_N.any():
            ended_L |= dropped_N[state.ticket_R[rows_L]]
        if not ended_L.any():
            return []
        found = []
        for row, stopped in zip(rows_L[ended_L].tolist(), stopped_L[ended_L].tolist(), strict=True):
            request, ticket, length = state.requests[row], int(state.ticket_R[row]), int(state.count_R[row])
            assert request is not None
            state.live_R[row], state.requests[row] = False, None
            tokens, logprobs = state.tokens_RC[row, :length], state.logprobs_RC[row, :length]
            found.append((ticket, finished_row(request, tokens, logprobs, stopped, bool(dropped_N[ticket]))))
        return found

    def _regroup(self, *, ended: bool) -> None:
        """Give the distinct live rows the first cache rows, and copy as few of them as possible. Call after a step."""
        assert self._cache is not None
        state, live_L = self._slots, np.flatnonzero(self._slots.live_R[: self._extent])
        span = int(state.token_R.max()) + 1
        keys_U, firsts_U, which_L = np.unique(
            state.cache_R[live_L] * span + state.token_R[live_L], return_index=True, return_inverse=True
        )
        row_U = keys_U // span  # in increasing order; the first of equal ones keeps its place
        moved_U = (row_U >= len(row_U)) | np.insert(row_U[1:] == row_U[:-1], 0, False)[: len(row_U)]
        if moved_U.any():
            targets_M = np.setdiff1d(np.arange(len(row_U)), row_U[~moved_U])
            columns, device = int(state.position_R[live_L[firsts_U[moved_U]]].max()), self._decoder.device
            sources = torch.from_numpy(row_U[moved_U]).to(device)
            self._cache.move(sources, torch.from_numpy(targets_M).to(device), columns)
            row_U[moved_U] = targets_M
        self._firsts_E = np.empty_like(row_U)
        self._firsts_E[row_U] = live_L[firsts_U]
        state.cache_R[live_L] = row_U[which_L.reshape(-1)]
        if ended or moved_U.any():
            self._rows_changed()

    def _rows_changed(self) -> None:
        state, firsts_E = self._slots, self._firsts_E
        self._settings = self._prefix = None
        if len(firsts_E):
            _, owners_P, prompt_E = np.unique(state.prompt_R[firsts_E], return_index=True, return_inverse=True)
            # The last prompt token does not count: it is the first input of decoding.
            columns = min(len(request.prompt_ids) for row in firsts_E if (request := state.requests[row])) - 1
            if columns and len(owners_P) < len(firsts_E):
                owner_E = torch.from_numpy(owners_P[prompt_E.reshape(-1)])
                self._prefix = CommonPrefix(owner_E.to(self._decoder.device), columns)
