"""`LeanRows`: rows that `LeanDecoder` decodes together, and that may join and leave between steps.

The cache rows are slots. Every step computes all slots below `_extent`. Slots of finished rows stay in that range until
a new row takes them or compaction moves a row from the end into them. State per row is kept in numpy arrays on the
host; each step copies its inputs to the device and its tokens back.

Invariant: the rows of a step depend only on the requests, their order of admission and the sampled tokens, never on a
clock or another thread. The only exception: rows whose callers have left (`dropped_N`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pvg.models.packing import pad_right, token_budget_batches
from pvg.records import Float32, Int32
from pvg.rollout.decoding import COMPACT_SHARE, PREFILL_TOKENS, DecodedRow, DecodingJob, TurnResult, finished_row
from pvg.rollout.engine import GenerationRequest
from pvg.rollout.lean import LeanCache, LeanDecoder, SharedPrefixes
from pvg.rollout.sampler import RowSettings, draw, uniform_numbers
from pvg.telemetry.spans import span

# In continuous batching a turn ends when this share of its rows has finished, or after TURN_STEPS. More often would
# spend too much on prefills and trips to the event loop; less often would leave places empty.
TURN_SHARE = 1 / 16
TURN_STEPS = 16
# The number of columns is a multiple of this, so a slightly longer request needs no new cache, plus one: rows that are
# a power of two apart would compete for the same CPU cache lines.
COLUMNS = 32
# Sharing must save at least this many columns over all rows. Below that, the extra matrix product costs more.
FEW_COLUMNS = 512


@dataclass(slots=True)
class _Slots:
    """One entry per slot. `position`: where the next input token is written. `count`: tokens of the completion so far,
    including those it began with."""

    ticket_R: NDArray[np.int64]
    live_R: NDArray[np.bool_]
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

    def move(self, sources_M: NDArray[np.int64], targets_M: NDArray[np.int64]) -> None:
        for array in self.arrays():
            array[targets_M] = array[sources_M]
        for source, target in zip(sources_M.tolist(), targets_M.tolist(), strict=True):
            self.requests[target] = self.requests[source]


class LeanRows:
    """Decodes at most `max_rows` rows at once. Only the compute thread may call `turn`; see `RunningRows` in
    pvg.rollout.decoding.

    While all slots are equal-sized groups of adjacent rows with the same prompt, a step reads the prompt's columns once
    per group. Each row still has its own copy, so it can continue without the others."""

    def __init__(self, decoder: LeanDecoder, max_rows: int, *, continuous: bool) -> None:
        self._decoder = decoder
        self._max_rows = max_rows
        self._continuous = continuous
        self._extent = 0
        self._slots = _Slots.empty(0, 0, 1)
        self._cache: LeanCache | None = None
        self._settings: RowSettings | None = None  # of the slots in use; None: recompute them, and `_shared`
        self._shared: SharedPrefixes | None = None

    @property
    def joins(self) -> bool:
        return self._continuous

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
        self._extent = max(self._extent, max(slots) + 1)
        self._settings = None
        self._prefill(slots, known)

    def _places(self, count: int) -> list[int]:
        """Slots for new rows: first those of finished rows."""
        finished = np.flatnonzero(~self._slots.live_R[: self._extent]).tolist()
        return (finished + list(range(self._extent, self._extent + count)))[:count]

    def _make_room(self, rows: int, requests: Sequence[GenerationRequest]) -> None:
        """Grow slots and cache if they are too small for `rows` such requests. They never shrink, so a long run stops
        allocating."""
        needed = max(len(request.prompt_ids) + request.sampling.max_tokens for request in requests)
        stops = max(len(request.sampling.stop_ids) for request in requests)
        old, cache = self._slots, self._cache
        if cache is not None and rows <= cache.rows and needed <= cache.columns and stops <= old.stop_RS.shape[1]:
            return
        have = (0, 0) if cache is None else (cache.rows, cache.columns)
        rows = have[0] if rows <= have[0] else min(self._max_rows, max(rows, 2 * have[0]))
        columns = max(have[1], -(-needed // COLUMNS) * COLUMNS + 1)
        new = _Slots.empty(rows, columns, max(stops, old.stop_RS.shape[1]))
        for target, source in zip(new.arrays(), old.arrays(), strict=True):
            target[tuple(slice(size) for size in source.shape)] = source
        new.requests[: len(old.requests)] = old.requests
        self._slots = new
        if (rows, columns) != have:
            self._cache = None if self._extent == 0 else cache  # free an empty old cache first
            grown = self._decoder.new_cache(rows, columns)
            if self._cache is not None:
                grown.kv[:, :, : have[0], : have[1]] = self._cache.kv
            self._cache = grown

    def _prefill(self, slots: Sequence[int], known: Sequence[Int32]) -> None:
        """Compute all known tokens but the last, which is the row's first input. Equal prefixes are computed once."""
        assert self._cache is not None
        rows_of: dict[bytes, list[int]] = {}
        prefix_of = {row: ids[:-1] for row, ids in zip(slots, known, strict=True)}
        for row, prefix in prefix_of.items():
            if len(prefix):
                rows_of.setdefault(prefix.tobytes(), []).append(row)
        groups = list(rows_of.values())
        lengths_U = np.asarray([len(prefix_of[rows[0]]) for rows in groups], dtype=np.int64)
        device = self._decoder.device
        for batch in token_budget_batches(lengths_U, max(PREFILL_TOKENS, int(lengths_U.max(initial=0)))):
            ids_BL, _ = pad_right([prefix_of[groups[group][0]] for group in batch], 0, device)
            pairs = [(row, prompt) for prompt, group in enumerate(batch) for row in groups[group]]
            rows_F, prompts_F = torch.tensor(pairs, device=device).T
            self._decoder.prefill(ids_BL, self._cache, rows_F, prompts_F)

    # --- decoding ----------------------------------------------------------------------------------------------------

    def _decode(self, dropped_N: NDArray[np.bool_]) -> TurnResult:
        done: list[tuple[int, DecodedRow]] = []
        steps = live_rows = 0
        live = self._live
        enough = max(1, int(TURN_SHARE * live)) if self._continuous else live
        while live and len(done) < enough and not (self._continuous and steps == TURN_STEPS):
            steps += 1
            live_rows += live
            ended = self._ended(self._step(), dropped_N)
            done += ended
            live -= len(ended)
            if self._extent - live >= max(1, COMPACT_SHARE * self._extent):
                self._compact()
        if not live:
            self._extent = 0
        return TurnResult(done, steps, live_rows)

    @property
    def _live(self) -> int:
        return int(np.count_nonzero(self._slots.live_R[: self._extent]))

    def _step(self) -> NDArray[np.int64]:
        """Sample one token for each live row. Returns the slots of these rows."""
        assert self._cache is not None
        state, extent, device = self._slots, self._extent, self._decoder.device
        rows_L = np.flatnonzero(state.live_R[:extent])
        every_R = np.arange(extent)
        # A finished row may have used all its random numbers; its sample is discarded, so any number will do.
        count_R = np.minimum(state.count_R[:extent], state.uniform_RC.shape[1] - 1)
        if self._settings is None:
            requests = [request for request in state.requests[:extent] if request is not None]
            self._settings = RowSettings.of([request.sampling for request in requests], device)
            self._shared = _shared_columns(requests)
        logits_RV = self._decoder.step(
            torch.from_numpy(state.token_R[:extent]).to(device),
            torch.from_numpy(state.position_R[:extent]).to(device),
            self._cache,
            int(state.position_R[rows_L].max()) + 1,
            self._shared,
        )
        uniform_R = torch.from_numpy(state.uniform_RC[every_R, count_R]).to(device)
        tokens_R, logprobs_R = draw(logits_RV, self._settings, uniform_R)
        state.token_R[:extent] = tokens_R.cpu().numpy()
        count_L = state.count_R[rows_L]
        state.tokens_RC[rows_L, count_L] = state.token_R[rows_L]
        state.logprobs_RC[rows_L, count_L] = logprobs_R.cpu().numpy()[rows_L]
        state.count_R[rows_L] += 1
        state.position_R[rows_L] += 1  # not for finished rows: they must stay inside their columns
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
            state.live_R[row] = False
            request, ticket, length = state.requests[row], int(state.ticket_R[row]), int(state.count_R[row])
            assert request is not None
            tokens, logprobs = state.tokens_RC[row, :length], state.logprobs_RC[row, :length]
            found.append((ticket, finished_row(request, tokens, logprobs, stopped, bool(dropped_N[ticket]))))
        return found

    def _compact(self) -> None:
        """Move live rows from the end into the places of finished ones, which copies as few rows as possible."""
        assert self._cache is not None
        state, live = self._slots, self._live
        order_R = np.arange(self._extent)
        targets_M = order_R[:live][~state.live_R[:live]]
        sources_M = order_R[live:][state.live_R[live : self._extent]]
        if len(sources_M):
            columns = int(state.position_R[sources_M].max())
            device = self._decoder.device
            self._cache.move(torch.from_numpy(sources_M).to(device), torch.from_numpy(targets_M).to(device), columns)
            state.move(sources_M, targets_M)
        state.live_R[live : self._extent] = False
        state.requests[live : self._extent] = [None] * (self._extent - live)
        self._extent = live
        self._settings = None


def _shared_columns(requests: Sequence[GenerationRequest]) -> SharedPrefixes | None:
    """The columns that groups of adjacent rows share, or None if too few. The group size is the largest for which every
    group has only one prompt. The last prompt token does not count: it is the first input of decoding."""
    prompts = [request.prompt_ids.tobytes() for request in requests]
    changes = [row for row in range(1, len(prompts)) if prompts[row] != prompts[row - 1]]
    rows = math.gcd(len(prompts), *changes)
    columns = min(len(request.prompt_ids) for request in requests) - 1
    saved = columns * (len(prompts) - len(prompts) // rows)
    return SharedPrefixes(rows, columns) if saved > FEW_COLUMNS else None
