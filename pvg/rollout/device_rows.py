"""`DeviceRows`: rows that `LeanDecoder` decodes on a GPU, with their whole state in the GPU's memory.

Between the steps of a turn the host reads nothing and sends nothing: a step writes its tokens and marks the rows that
have ended. At the end of a turn, one blocking copy tells the host which rows ended, and a second one brings their
tokens. So the GPU never waits for Python, and a step can be one CUDA graph (`StepGraphs`).

Unlike in pvg.rollout.lean_rows, every row has a row of the cache. Finding equal rows would need the tokens on the host
in each step, and save little: on a GPU, a step's time is mostly that of reading the weights.

A step computes the first rows of the state, rounded up to a power of two, and the first columns of the cache, rounded
up to COLUMN_STEP. So there are few shapes, each with a graph. A row that has ended, or was never used, computes its
last token again, in its own columns. It runs on a CPU too, without graphs. `make gpu` tests it on a GPU.

Invariant: as in LeanRows, the rows of a step depend only on the requests, their order of admission and the sampled
tokens. The only exception: rows whose callers have left (`dropped_N`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pvg.errors import MissingRequirementError
from pvg.records import Float32
from pvg.rollout.decoding import NO_STOP, DecodedRow, DecodingJob, RunningRows, TurnResult, finished_row, stop_numbers
from pvg.rollout.engine import GenerationRequest
from pvg.rollout.lean import LeanCache, LeanDecoder
from pvg.rollout.lean_rows import prefill_rows
from pvg.rollout.sampler import RowSettings, draw, uniform_numbers
from pvg.telemetry.spans import span

# Steps of a turn. A row that ends in the middle of a turn computes on until its end, half of this on average. A turn's
# end costs two transfers and a trip to the event loop, about as long as one step of a small model. An estimate.
TURN_STEPS = 16
LEAST_ROWS = 8
COLUMN_STEP = 128


class StepGraphs:
    """Runs steps on a GPU as CUDA graphs: one launch instead of about ten per layer.

    A step is known by its `key`. The first call of a key runs the step as it is, which also warms up the libraries.
    The second one records and replays it. A step must find its inputs and leave its outputs in the same memory each
    time, and must not read from the GPU. If torch cannot record a step, `refusal` says why, and steps run unrecorded.
    """

    def __init__(self, device: torch.device) -> None:
        self.refusal = ""
        self.recorded = 0
        self._device = device
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # an opaque handle
        self._stream: torch.cuda.Stream | None = None

    def clear(self) -> None:
        """Forget all graphs, because the memory that they use is another one now."""
        self._seen.clear()
        self._graphs.clear()
        self._pool = None

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        graph = self._graphs.get(key)
        if graph is None and self._device.type == "cuda" and key in self._seen and not self.refusal:
            graph = self._record(key, step)
        if graph is not None:
            graph.replay()
        else:
            self._seen.add(key)
            step()

    def _record(self, key: Hashable, step: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Recording runs nothing, so the caller still has to replay the graph, or to run the step."""
        graph = torch.cuda.CUDAGraph()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        try:
            # thread_local: other threads may use the GPU meanwhile, for example to score.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                step()
        except RuntimeError as error:
            self.refusal = (str(error).strip().splitlines() or [type(error).__name__])[0]
            return None
        self._pool = graph.pool()
        self._graphs[key] = graph
        self.recorded += 1
        return graph


@dataclass(slots=True)
class _State:
    """The device's side: one entry per row, always in the same memory. `position`: where the next input token is
    written. `count`: tokens of the completion so far, including those it began with. The extra last column of the
    completion takes the samples of rows that have ended."""

    live_R: Tensor
    stopped_R: Tensor
    token_R: Tensor
    position_R: Tensor
    count_R: Tensor
    limit_R: Tensor
    stop_RS: Tensor
    uniform_RC: Tensor
    tokens_RC: Tensor
    logprobs_RC: Tensor
    temperature_R1: Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, stops: int, device: torch.device) -> _State:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            live_R=zeros(rows, dtype=torch.bool),
            stopped_R=zeros(rows, dtype=torch.bool),
            token_R=zeros(rows),
            position_R=zeros(rows),
            count_R=zeros(rows),
            limit_R=zeros(rows),
            stop_RS=zeros(rows, stops) + NO_STOP,
            uniform_RC=zeros(rows, columns + 1, dtype=torch.float64),
            tokens_RC=zeros(rows, columns + 1, dtype=torch.int32),
            logprobs_RC=zeros(rows, columns + 1, dtype=torch.float32),
            temperature_R1=zeros(rows, 1, dtype=torch.float32) + 1.0,
        )

    def tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in type(self).__slots__]

    def copy_from(self, old: _State) -> None:
        """Take over a smaller state. Its last column, that of ended rows, means nothing."""
        for target, source in zip(self.tensors(), old.tensors(), strict=True):
            target[tuple(slice(size) for size in source.shape)] = source


@dataclass(slots=True)
class _Slot:
    """The host's side of a running row. `count`: as of the last reading."""

    ticket: int
    request: GenerationRequest
    count: int

    @property
    def position(self) -> int:
        return len(self.request.prompt_ids) - 1 + self.count

    @property
    def steps_left(self) -> int:
        return self.request.sampling.max_tokens - self.count


class DeviceRows(RunningRows):
    """Decodes at most `max_rows` rows at once; see `RunningRows` in pvg.rollout.decoding. Only the compute thread may
    call `turn`. The cache has memory for all `max_rows` from the start, so it grows only for longer requests."""

    def __init__(self, decoder: LeanDecoder, max_rows: int, *, continuous: bool) -> None:
        self.graphs = StepGraphs(decoder.device)
        self._decoder = decoder
        self._max_rows = max_rows
        self.joins = continuous
        self._slots: dict[int, _Slot] = {}  # the running rows by their place in the state
        self._columns = 0  # of the completions
        self._stops = 1
        self._state: _State | None = None
        self._cache: LeanCache | None = None
        self._deepest = 0  # no running row's position is above
        self._tempered = False  # whether a running row has another temperature than 1

    @torch.inference_mode()
    def turn(self, jobs: Sequence[DecodingJob], dropped_N: NDArray[np.bool_]) -> TurnResult:
        """Admit `jobs`, then decode TURN_STEPS steps, or to the end of all rows. Including `jobs`, at most `max_rows`
        may run.

        Raises MissingRequirementError if the GPU has too little memory for the cache.
        """
        with _on(self._decoder.device):
            if jobs:
                with span("prefill", device=True):
                    self._admit(jobs)
            with span("decode", device=True):
                found = self._decode(dropped_N)
            self.refusal = self.graphs.refusal
            return found

    # --- admission ---------------------------------------------------------------------------------------------------

    def _admit(self, jobs: Sequence[DecodingJob]) -> None:
        requests = [job.request for job in jobs]
        places = [place for place in range(self._max_rows) if place not in self._slots][: len(jobs)]
        self._make_room(requests)
        assert self._state is not None
        assert self._cache is not None
        self._write(self._state, places, requests)
        for place, job in zip(places, jobs, strict=True):
            self._slots[place] = _Slot(job.ticket, job.request, job.request.tokens_resumed)
        prefixes = {place: request.known_ids[:-1] for place, request in zip(places, requests, strict=True)}
        prefill_rows(self._decoder, self._cache, prefixes)
        self._deepest = max(slot.position for slot in self._slots.values())
        self._tempered = any(slot.request.sampling.temperature != 1.0 for slot in self._slots.values())

    def _make_room(self, requests: Sequence[GenerationRequest]) -> None:
        """Grow cache and state if these requests are longer than all before. They never shrink."""
        needed = max(len(request.prompt_ids) + request.sampling.max_tokens for request in requests)
        columns = max(request.sampling.max_tokens for request in requests)
        stops = max(len(request.sampling.stop_ids) for request in requests)
        if self._cache is None or needed > self._cache.columns:
            have = 0 if self._cache is None else self._cache.columns
            self._grow_cache(_rounded(max(needed, have * 3 // 2 if self._slots else 0)))
        if self._state is None or columns > self._columns or stops > self._stops:
            self._columns, self._stops = max(columns, self._columns), max(stops, self._stops)
            old, device = self._state, self._decoder.device
            self._state = _State.empty(self._max_rows, self._columns, self._stops, device)
            if old is not None and self._slots:
                self._state.copy_from(old)
            self.graphs.clear()

    def _grow_cache(self, columns: int) -> None:
        self.graphs.clear()
        try:
            self._cache = self._cache if self._slots else None  # frees an empty one first
            self._cache = self._decoder.new_cache(self._max_rows, columns, self._cache)
        except torch.OutOfMemoryError:
            raise MissingRequirementError(
                f"The GPU has too little memory for the keys and values of {self._max_rows} rows of {columns} tokens.",
                "Start a new run with a lower rollout.engine.max_rows or rollout.max_tokens. Both change what is "
                "sampled, so a resumed run keeps them.",
            ) from None

    def _write(self, state: _State, places: list[int], requests: Sequence[GenerationRequest]) -> None:
        """Send the new rows to the device, in three copies."""
        device, samplings = self._decoder.device, [request.sampling for request in requests]
        stops = stop_numbers(samplings, self._stops)
        known = [request.known_ids for request in requests]
        facts = np.array(
            [
                (place, int(ids[-1]), len(ids) - 1, request.tokens_resumed, request.sampling.max_tokens)
                for place, ids, request in zip(places, known, requests, strict=True)
            ],
            dtype=np.int64,
        )
        facts_NX = torch.from_numpy(np.concatenate([facts, stops], axis=1)).to(device)
        rows_N, token_N, position_N, count_N, limit_N = facts_NX[:, :5].unbind(1)
        uniform_NC = torch.from_numpy(uniform_numbers(requests, self._columns)).to(device)
        state.token_R[rows_N], state.position_R[rows_N], state.count_R[rows_N] = token_N, position_N, count_N
        state.limit_R[rows_N], state.stop_RS[rows_N] = limit_N, facts_NX[:, 5:]
        state.uniform_RC[rows_N, : self._columns] = uniform_NC
        state.temperature_R1[rows_N] = RowSettings.of(samplings, device).temperature_R1
        state.live_R[rows_N], state.stopped_R[rows_N] = True, False
        for place, request in zip(places, requests, strict=True):
            if (begun := request.resumed_from) is not None:
                state.tokens_RC[place, : request.tokens_resumed] = torch.from_numpy(begun.token_ids).to(device)
                state.logprobs_RC[place, : request.tokens_resumed] = torch.from_numpy(begun.logprobs).to(device)

    # --- decoding ----------------------------------------------------------------------------------------------------

    def _decode(self, dropped_N: NDArray[np.bool_]) -> TurnResult:
        done: list[tuple[int, DecodedRow]] = []
        steps = live_rows = 0
        while self._slots:
            number = min(TURN_STEPS, max(slot.steps_left for slot in self._slots.values()))
            for _ in range(number):
                self._step()
            sampled, ended = self._read(dropped_N)
            steps, live_rows = steps + number, live_rows + sampled
            done += ended
            if self.joins:
                break
        return TurnResult(done, steps, live_rows)

    def _step(self) -> None:
        """Sample a token for each live row, without waiting for it."""
        assert self._cache is not None
        rows = _bucket(max(self._slots) + 1, self._max_rows)
        columns = min(_rounded(self._deepest + 1), self._cache.columns)
        self._deepest += 1
        self.graphs.run((rows, columns, self._tempered), partial(self._advance, rows, columns))

    def _advance(self, rows: int, columns: int) -> None:
        """One step of the first `rows` rows, of which none is at a column above `columns`."""
        state, cache = self._state, self._cache
        assert state is not None
        assert cache is not None
        token_R, position_R, count_R, live_R = (
            tensor[:rows] for tensor in (state.token_R, state.position_R, state.count_R, state.live_R)
        )
        logits_RV = self._decoder.step(token_R, position_R, cache, columns)
        settings = RowSettings(state.temperature_R1[:rows], self._tempered)
        drawn_R, logprobs_R = draw(logits_RV, settings, state.uniform_RC[:rows].gather(1, count_R[:, None])[:, 0])
        last = state.tokens_RC.shape[1] - 1
        column_R1 = torch.where(live_R, count_R, last)[:, None]
        state.tokens_RC[:rows].scatter_(1, column_R1, drawn_R[:, None].to(torch.int32))
        state.logprobs_RC[:rows].scatter_(1, column_R1, logprobs_R[:, None])
        token_R.copy_(torch.where(live_R, drawn_R, token_R))
        count_R += live_R
        position_R += live_R
        stops_R = live_R & (drawn_R[:, None] == state.stop_RS[:rows]).any(dim=1)
        state.stopped_R[:rows].logical_or_(stops_R)
        live_R.logical_and_(~stops_R & (count_R < state.limit_R[:rows]))

    # --- the end of a turn -------------------------------------------------------------------------------------------

    def _read(self, dropped_N: NDArray[np.bool_]) -> tuple[int, list[tuple[int, DecodedRow]]]:
        """The number of tokens that the turn sampled, and the tickets and results of the rows that have ended."""
        state = self._state
        assert state is not None
        extent = max(self._slots) + 1
        facts = torch.stack([tensor[:extent].long() for tensor in (state.live_R, state.stopped_R, state.count_R)])
        live_R, stopped_R, count_R = facts.cpu().numpy()
        sampled, ended = 0, list[int]()
        for place, slot in self._slots.items():
            sampled += int(count_R[place]) - slot.count
            slot.count = int(count_R[place])
            if not live_R[place] or dropped_N[slot.ticket]:
                ended.append(place)
        found = self._results(state, ended, stopped_R, dropped_N) if ended else []
        if left := [place for place in ended if live_R[place]]:
            state.live_R[torch.tensor(left, device=self._decoder.device)] = False
        for place in ended:
            del self._slots[place]
        if self._slots:
            self._compact()
            self._deepest = max(slot.position for slot in self._slots.values())
        return sampled, found

    def _results(
        self, state: _State, ended: list[int], stopped_R: NDArray[np.int64], dropped_N: NDArray[np.bool_]
    ) -> list[tuple[int, DecodedRow]]:
        width = max(self._slots[place].count for place in ended)
        rows_N = torch.tensor(ended, device=self._decoder.device)
        tokens_NC, logprobs_NC = (tensor[rows_N, :width] for tensor in (state.tokens_RC, state.logprobs_RC))
        both_2NC = torch.stack([tokens_NC, logprobs_NC.view(torch.int32)]).cpu().numpy()  # one copy
        found = []
        for row, place in enumerate(ended):
            slot = self._slots[place]
            tokens: NDArray[np.int64] = both_2NC[0, row, : slot.count].astype(np.int64)
            logprobs: Float32 = both_2NC[1, row, : slot.count].view(np.float32)
            dropped = bool(dropped_N[slot.ticket])
            found.append((slot.ticket, finished_row(slot.request, tokens, logprobs, bool(stopped_R[place]), dropped)))
        return found

    def _compact(self) -> None:
        """If the running rows fit into half of the places or less, move the last ones to free places."""
        assert self._state is not None
        assert self._cache is not None
        live = sorted(self._slots)
        if _bucket(len(live), self._max_rows) == _bucket(live[-1] + 1, self._max_rows):
            return
        sources = [place for place in live if place >= len(live)]
        targets = [place for place in range(len(live)) if place not in self._slots]
        sources_M, targets_M = torch.tensor([sources, targets], device=self._decoder.device)
        for tensor in self._state.tensors():
            tensor[targets_M] = tensor[sources_M]
        self._state.live_R[sources_M] = False
        self._cache.move(sources_M, targets_M, max(self._slots[place].position for place in sources))
        for source, target in zip(sources, targets, strict=True):
            self._slots[target] = self._slots.pop(source)


def _bucket(rows: int, most: int) -> int:
    """The number of rows that a step computes: a power of two, from LEAST_ROWS to `most`."""
    return min(most, max(LEAST_ROWS, 1 << (rows - 1).bit_length()))


def _rounded(columns: int) -> int:
    return -(-columns // COLUMN_STEP) * COLUMN_STEP


def _on(device: torch.device) -> AbstractContextManager[object]:
    """The thread's current GPU. A graph is recorded on this one, whatever its tensors say."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
