"""`TorchEngine`: an `Engine` over a transformers model in this process, on a CPU or a GPU.

    engine = TorchEngine(model, max_rows=256, max_in_flight=1024, executor=executor)
    completion = await engine.generate(GenerationRequest("r0", prompt_ids, Sampling(48, (eos,)), seed=7))

Concurrent `generate` calls form batches in order of arrival. A batch is decoded in turns in the executor, so the event
loop stays free. With continuous batching, each turn delivers finished rows and new ones take their places. Otherwise
one turn decodes the whole batch.

A batch lasts until no row runs. New weights are loaded between batches. While they wait, no row joins.

Invariants:
- One version of the weights samples a batch.
- The same requests submitted in the same order give the same bits. The wait for further requests is counted in turns of
  the event loop (`gather_requests`), not in seconds.
- Every call of `generate` ends with a completion or the error that prevented it.
- A request samples the same tokens in any batch, up to floating-point ties (Philox seeds).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pvg.errors import ConfigurationError, StateError
from pvg.models.compute import KEPT_BYTES, return_freed_memory
from pvg.records import Int32
from pvg.rollout.decoding import DecodedRow, DecodingJob, ModuleRows, RunningRows, TurnResult, check_layers, diverged
from pvg.rollout.engine import (
    Completion,
    CutShort,
    Engine,
    EngineStats,
    GenerationRequest,
    PartialCompletion,
    check_request,
    gather_requests,
)
from pvg.rollout.lean import LeanDecoder, NotLeanError
from pvg.rollout.lean_rows import LeanRows, shared_parts
from pvg.servers.publishing import SyncTiming, WeightUpdate
from pvg.telemetry.events import Events, SilentEvents
from pvg.telemetry.spans import run_in, submit_in

if TYPE_CHECKING:
    from pvg.models.language_model import LanguageModel


@dataclass(slots=True)
class _Pending:
    request: GenerationRequest
    future: asyncio.Future[Completion]
    arrived: float
    admitted: float = 0.0
    cut: bool = False


_Batch = dict[int, _Pending]  # the running requests by ticket


class TorchEngine(Engine):
    """Owns `model` and belongs to one event loop. `max_rows` are decoded together; `max_in_flight` may wait or run.

    `executor`: used for one thing at a time, so one thread is enough. `lean`: use `LeanDecoder` if it supports the
    model; an event tells which decoder runs. `continuous`: rows join while others run (lean decoding only).
    `routed_experts`: completions carry the experts of their tokens; decoding then uses the module.
    """

    version: int = 0
    stats: EngineStats = EngineStats()
    requests_in_flight: int = 0
    max_in_flight: int = 0

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_rows: int,
        max_in_flight: int,
        executor: Executor,
        events: Events | None = None,
        lean: bool = True,
        continuous: bool = True,
        routed_experts: bool = False,
    ) -> None:
        if max_rows < 1 or max_in_flight < 1:
            raise ConfigurationError(f"max_rows ({max_rows}) and max_in_flight ({max_in_flight}) must be at least 1.")
        check_layers(model.module)
        self._model = model
        self._vocabulary, self._longest = int(model.module.get_input_embeddings().weight.shape[0]), model.max_length
        self._max_rows = max_rows
        self.max_in_flight = max_in_flight
        self._executor = executor
        self._lean = lean
        self._continuous = continuous
        self._routed_experts = routed_experts
        self._refusal = ""  # why torch records no CUDA graphs
        self._rows: RunningRows | None = None  # created in the executor by the first batch; discarded after an error
        self._events = events or SilentEvents()
        self._queue: deque[_Pending] = deque()
        self._batch: _Batch = {}
        self._dropped_N: NDArray[np.bool_] = np.zeros(max_rows, dtype=bool)  # by ticket
        self._loads_waiting = 0
        self._arrivals = 0
        self._closed = self._without_weights = False
        self._pump_task: asyncio.Task[None] | None = None
        self._model_lock = asyncio.Lock()  # fair: new weights wait only for the running rows

    @property
    def decoding(self) -> str:
        """How rows are decoded, "lean" or "module"; "" before the first batch."""
        return "" if self._rows is None else "module" if isinstance(self._rows, ModuleRows) else "lean"

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion. Cancelling the caller drops the request, and its row if it is being decoded.

        Raises ConfigurationError for a request that cannot be served, StateError if the engine is closed, or the error
        of decoding its batch. After the latter the engine still serves.
        """
        self._assert_open()
        if self._without_weights:
            raise StateError("A request came before the weights that `rest` expects; this is a defect of pvg.")
        self._check(request)
        if self.requests_in_flight >= self.max_in_flight:
            raise ConfigurationError(
                f"The engine takes at most {self.max_in_flight} requests at once.",
                "Bound the callers (rollout.concurrency), or open the engine with a larger max_in_flight.",
            )
        pending = _Pending(request, asyncio.get_running_loop().create_future(), time.perf_counter())
        self._queue.append(pending)
        self._arrivals += 1
        self.requests_in_flight += 1
        if self._pump_task is None or self._pump_task.done():
            self._pump_task = asyncio.create_task(self._pump())
            self._pump_task.add_done_callback(self._pump_ended)
        try:
            return await pending.future
        finally:
            self.requests_in_flight -= 1

    def cut(self, request_ids: Collection[str]) -> None:
        """End these requests: waiting ones now, running ones at their next token."""
        wanted = frozenset(request_ids)
        waiting, self._queue = self._queue, deque()
        for pending in waiting:
            if pending.request.id in wanted:
                _fail(pending, CutShort(pending.request.resumed_from))
            else:
                self._queue.append(pending)
        for ticket, pending in self._batch.items():
            if pending.request.id in wanted:
                pending.cut = self._dropped_N[ticket] = True

    async def load_weights(self, update: WeightUpdate) -> SyncTiming:
        """Load a newer version between two batches; waiting requests are sampled from it. Tensors are copied.

        The update completes even if the caller is cancelled. Raises StateError for a version that is not above the
        current one, ConfigurationError for names or shapes that do not fit (the old weights stay).
        """
        self._assert_open()
        return await asyncio.shield(asyncio.create_task(self._load(update)))

    async def rest(self, *, replaced: bool = False) -> None:
        """On a CPU, free the weights if newer ones will come before the next request, because training needs the memory
        now. On a GPU they stay: recorded graphs know their addresses."""
        if not replaced or self._closed or self.requests_in_flight or self._model.device.type != "cpu":
            return
        async with self._model_lock:
            if not self.requests_in_flight:
                self._without_weights = True  # from now on, whatever the executor does first
                self._without_weights = await run_in(self._executor, self._drop_weights)

    def _drop_weights(self) -> bool:
        if dropped := self._model.drop_weights(KEPT_BYTES):
            return_freed_memory(2 * KEPT_BYTES)  # activations come next
        return dropped

    async def close(self) -> None:
        """Fail waiting requests, stop running ones, and free the model. A second call does nothing."""
        self._closed = True
        self._refuse(_closed_error())
        async with self._model_lock:
            self._rows = None  # it also holds the weights
            self._model.close()

    # --- serving -----------------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        while self._queue:
            await self._gather(self._max_rows)
            async with self._model_lock:
                if first := self._take(self._max_rows):
                    await self._run(first)

    async def _gather(self, wanted: int) -> None:
        """Yield to the event loop until `wanted` requests wait or no new one arrives."""
        await gather_requests(lambda: self._arrivals, lambda: len(self._queue) >= wanted)

    def _take(self, most: int) -> list[_Pending]:
        """Take up to `most` requests from the queue, in order of arrival; skip those whose callers have left."""
        taken: list[_Pending] = []
        while self._queue and len(taken) < most:
            pending = self._queue.popleft()
            if not pending.future.done():
                taken.append(pending)
        return taken

    async def _run(self, newcomers: list[_Pending]) -> None:
        batch = self._batch
        try:
            while newcomers or batch:
                if error := await self._turn(batch, newcomers):
                    for pending in batch.values():
                        _fail(pending, error)
                    return
                newcomers = await self._joining(batch)
        finally:
            self._dropped_N[:] = True  # either all rows are done, or this task was cancelled and the thread must stop
            self._batch = {}
            if batch:
                self._rows = None
        self.stats = replace(self.stats, batches=self.stats.batches + 1)

    async def _joining(self, batch: _Batch) -> list[_Pending]:
        """Requests that join the running rows. None while weights wait; otherwise the weights might wait forever."""
        free = self._max_rows - len(batch)
        if not batch or not free or self._rows is None or not self._rows.joins:
            return []
        await self._gather(free)
        return [] if self._loads_waiting or self._closed else self._take(free)

    async def _turn(self, batch: _Batch, newcomers: list[_Pending]) -> BaseException | None:
        """Admit the newcomers, decode in the executor, and deliver finished rows. Returns an error of decoding, if
        any."""
        jobs = self._admit(batch, newcomers)
        started = time.perf_counter()
        work = submit_in(self._executor, self._decode, jobs)
        await asyncio.wait([work])
        if error := work.exception():
            return error
        self._deliver(batch, jobs, work.result(), time.perf_counter() - started)
        return None

    def _decode(self, jobs: list[DecodingJob]) -> TurnResult:
        if self._rows is None:
            self._rows = self._open_rows()
        found = self._rows.turn(jobs, self._dropped_N)
        refusal = self._rows.refusal
        if refusal != self._refusal:
            self._refusal = refusal
            self._events.event("gen", event="graphs.refused", reason=refusal)
        return found

    def _open_rows(self) -> RunningRows:
        """Choose the decoder and log an event with the choice and its reason. Runs in the executor, because it
        computes."""
        model, reason = self._model, "rollout.engine.decoding"
        if self._routed_experts:
            reason = "training.router_replay"
        elif self._lean:
            try:
                lean = LeanDecoder.over(model.module)
            except NotLeanError as error:
                reason = str(error)
            else:
                batching = "continuous" if self._continuous else "whole"
                self._events.event("gen", event="decoder", decoding="lean", batching=batching)
                most = min(self._max_rows, self.max_in_flight)  # DeviceRows takes memory for all of them at once
                if lean.device.type != "cuda":
                    return LeanRows(lean, most, continuous=self._continuous)
                from pvg.rollout.device_rows import DeviceRows

                return DeviceRows(lean, most, continuous=self._continuous)
        self._events.event("gen", event="decoder", decoding="module", batching="whole", reason=reason)
        return ModuleRows(model.module, model.device, routed_experts=self._routed_experts)

    def _admit(self, batch: _Batch, newcomers: list[_Pending]) -> list[DecodingJob]:
        free = (ticket for ticket in range(self._max_rows) if ticket not in batch)
        jobs, now = [], time.perf_counter()
        for ticket, pending in zip(free, newcomers, strict=False):
            jobs.append(DecodingJob(ticket, pending.request))
            self._dropped_N[ticket] = pending.future.done()
            pending.admitted = now
            pending.future.add_done_callback(partial(self._drop, ticket, pending))
        batch.update((job.ticket, pending) for job, pending in zip(jobs, newcomers, strict=True))
        return jobs

    def _drop(self, ticket: int, pending: _Pending, _future: asyncio.Future[Completion]) -> None:
        """The caller of a row has left or was served. Its ticket may already belong to another request."""
        if self._batch.get(ticket) is pending:
            self._dropped_N[ticket] = True

    def _deliver(self, batch: _Batch, jobs: list[DecodingJob], turn: TurnResult, seconds: float) -> None:
        delivered = 0
        now = time.perf_counter()
        for ticket, result in turn.finished:
            pending = batch.pop(ticket)
            if not pending.future.done():
                delivered += len(result.token_ids) - pending.request.tokens_resumed
                self._hand_over(pending, result, now)
        stats = self.stats
        prompts = [job.request.known_ids for job in jobs]
        self.stats = replace(
            stats,
            rows=stats.rows + len(jobs),
            tokens=stats.tokens + delivered,
            seconds=stats.seconds + seconds,
            prompt_tokens=stats.prompt_tokens + sum(map(len, prompts)),
            prompt_tokens_computed=stats.prompt_tokens_computed + self._computed_of(prompts),
            steps=stats.steps + turn.steps,
            live_rows=stats.live_rows + turn.live_rows,
        )

    def _computed_of(self, prompts: Sequence[Int32]) -> int:
        """Prompt tokens that the decoder computes: each distinct prefix once, and the last token of every prompt, which
        is the first input of decoding. Lean decoding shares parts, and on a CPU computes the last token once for equal
        prompts."""
        prefixes = list({p[:-1].tobytes(): p[:-1] for p in prompts}.values())
        if isinstance(self._rows, ModuleRows):
            return sum(map(len, prefixes)) + len(prompts)
        computed = sum(part.length for level in shared_parts(prefixes) for part in level)
        return computed + len({p.tobytes() for p in prompts} if isinstance(self._rows, LeanRows) else prompts)

    def _hand_over(self, pending: _Pending, result: DecodedRow, now: float) -> None:
        request, length = pending.request, len(result.token_ids)
        spans, experts = request.spans(length, self.version), request.experts(result.routed_experts)
        timing = request.timing(pending.admitted - pending.arrived, now - pending.admitted)
        if pending.cut and not np.isfinite(result.logprobs).all():
            _fail(pending, diverged(request))
        elif pending.cut and result.finish_reason == "length" and length < request.sampling.max_tokens:
            _fail(pending, CutShort(PartialCompletion(result.token_ids, result.logprobs, spans, timing, experts)))
        else:
            finish, logprobs = result.finish_reason, result.logprobs
            completion = Completion(request.id, result.token_ids, logprobs, spans, finish, timing, experts)
            pending.future.set_result(completion)

    async def _load(self, update: WeightUpdate) -> SyncTiming:
        called = time.perf_counter()
        place = {"trace": update.trace_id, "version": update.version}
        self._events.event("weights", event="server.recv", **place)
        self._loads_waiting += 1  # meanwhile no row joins
        try:
            await self._model_lock.acquire()  # when no row runs
        finally:
            self._loads_waiting -= 1
        try:
            self._assert_open()
            if update.version <= self.version:
                raise StateError(
                    f"The engine has version {self.version} of the weights and was sent version {update.version}.",
                    "Versions only go up.",
                )
            self._events.event("weights", event="rpc.start", **place)
            started = time.perf_counter()
            await run_in(self._executor, self._model.load_policy, update.tensors, update.adapter)
            self.version, self._without_weights = update.version, False
        finally:
            self._model_lock.release()
        ended = time.perf_counter()
        rpc_ms = (ended - started) * 1e3
        self._events.event("weights", event="rpc.done", **place, rpc_ms=rpc_ms)
        return SyncTiming(update.version, wall_ms=(ended - called) * 1e3, rpc_ms=rpc_ms)

    # --- failing requests ---------------------------------------------------------------------------------------------

    def _pump_ended(self, task: asyncio.Task[None]) -> None:
        """If the pump was cancelled or failed, fail all requests, so that no caller waits forever."""
        if task.cancelled():
            self._refuse(_closed_error())
        elif error := task.exception():
            self._refuse(error)

    def _refuse(self, error: BaseException) -> None:
        """Raise `error` in every caller that waits or whose row is being decoded, and stop decoding."""
        waiting, self._queue = [*self._batch.values(), *self._queue], deque()
        for pending in waiting:
            _fail(pending, error)
        self._dropped_N[:] = True

    def _assert_open(self) -> None:
        if self._closed:
            raise _closed_error()

    def _check(self, request: GenerationRequest) -> None:
        check_request(request)
        prompt, sampling, known = request.prompt_ids, request.sampling, request.known_ids
        if int(known.min()) < 0 or int(known.max()) >= self._vocabulary:
            raise ConfigurationError(
                f"Request {request.id!r}: the prompt has token ids outside the model's vocabulary of "
                f"{self._vocabulary}.",
                "Encode prompts with the tokenizer of the same model.",
            )
        longest = len(prompt) + sampling.max_tokens
        if longest > self._longest:
            raise ConfigurationError(
                f"Request {request.id!r}: a prompt of {len(prompt)} tokens plus {sampling.max_tokens} new ones is "
                f"{longest} tokens, more than the model's {self._longest}.",
                "Lower rollout.max_tokens or shorten the prompts.",
            )


def _closed_error() -> StateError:
    return StateError("The engine is closed.", "Open a new one to continue sampling.")


def _fail(pending: _Pending, error: BaseException) -> None:
    if not pending.future.done():
        pending.future.set_exception(error)
