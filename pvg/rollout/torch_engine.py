"""`TorchEngine`: an `Engine` over a transformers model in this process, on a CPU or a GPU.

    engine = TorchEngine(model, max_rows=256, max_in_flight=1024, executor=executor)
    completion = await engine.generate(GenerationRequest("r0", prompt_ids, Sampling(48, (eos,)), seed=7))

Concurrent `generate` calls are gathered into batches in the order they came; a batch is decoded to its end in the
executor, so the event loop stays free. One `TorchEngine` lives on one event loop.

Invariants: one version of the weights samples a batch; the same requests submitted in the same order give the same
bits; every call of `generate` ends, with a completion or with the error that prevented it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pvg.errors import ConfigurationError, StateError
from pvg.records import Int32, Timing, VersionSpan
from pvg.rollout.decoding import Decoded, decode
from pvg.rollout.engine import Completion, Engine, EngineStats, GenerationRequest, check_request
from pvg.telemetry.events import Events, Unheard
from pvg.telemetry.spans import run_in, submit_in
from pvg.weights import SyncTiming, WeightUpdate

if TYPE_CHECKING:
    from pvg.models.language_model import LanguageModel

# Turns of the event loop without a new request after which a batch that is not full starts. A caller that got its
# completion needs a few turns to hand in the next request; turns, not seconds, keep the batches reproducible.
QUIET_TURNS = 8
# A trickle that brings a request on every turn does not delay a batch for longer than this.
GATHER_TURNS = 256
# Layer types whose keys and values pvg.rollout.kv_cache can hold.
KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class _Pending:
    request: GenerationRequest
    future: asyncio.Future[Completion]
    arrived: float


class TorchEngine(Engine):
    """Owns `model`. `max_rows` are decoded together, `max_in_flight` requests may wait or run at once.

    `executor` is used for one thing at a time; one thread is enough. `compaction`, `shared_prefill`: see `decode`.
    A seed's numbers come from Philox, so a request samples the same tokens in any company, up to floating-point ties.
    Temperatures near 0 tend to greedy choice.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_rows: int,
        max_in_flight: int,
        executor: Executor,
        events: Events | None = None,
        compaction: bool = True,
        shared_prefill: bool = True,
    ) -> None:
        if max_rows < 1 or max_in_flight < 1:
            raise ConfigurationError(f"max_rows ({max_rows}) and max_in_flight ({max_in_flight}) must be at least 1.")
        _check_layers(model)
        self._model = model
        self._vocabulary = int(model.module.get_input_embeddings().weight.shape[0])
        self._max_rows = max_rows
        self._max_in_flight = max_in_flight
        self._executor = executor
        self._switches = (compaction, shared_prefill)
        self._shared = shared_prefill
        self._events = events or Unheard()
        self._queue: deque[_Pending] = deque()
        self._batch: Sequence[_Pending] = ()
        self._dropped_N: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self._in_flight = 0
        self._arrivals = 0
        self._version = 0
        self._stats = EngineStats()
        self._closed = False
        self._pump_task: asyncio.Task[None] | None = None
        self._model_lock = asyncio.Lock()  # fair, so new weights wait for one batch at most

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    @property
    def stats(self) -> EngineStats:
        return self._stats

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion. Cancelling the caller drops the request, and its row if it is being decoded.

        Raises ConfigurationError for a request that cannot be served, before anything is sampled; StateError when the
        engine is closed; whatever decoding its batch raised, after which the engine still serves.
        """
        self._assert_open()
        self._check(request)
        if self._in_flight >= self._max_in_flight:
            raise ConfigurationError(
                f"The engine takes at most {self._max_in_flight} requests at once.",
                "Bound the callers (rollout.concurrency), or open the engine with a larger max_in_flight.",
            )
        pending = _Pending(request, asyncio.get_running_loop().create_future(), time.perf_counter())
        self._queue.append(pending)
        self._arrivals += 1
        self._in_flight += 1
        if self._pump_task is None or self._pump_task.done():
            self._pump_task = asyncio.create_task(self._pump())
            self._pump_task.add_done_callback(self._pump_ended)
        try:
            return await pending.future
        finally:
            self._in_flight -= 1

    async def load_weights(self, update: WeightUpdate) -> SyncTiming:
        """Load a newer version between two batches; requests that wait are served by it. Tensors are copied.

        Once begun it is finished, even if the caller is cancelled. Raises StateError for a version that is not above
        the engine's own, ConfigurationError for names or shapes that do not fit (the old weights stay).
        """
        self._assert_open()
        return await asyncio.shield(asyncio.create_task(self._load(update)))

    async def close(self) -> None:
        """Refuse what waits, stop what runs, free the model. Closing twice does nothing."""
        self._closed = True
        self._refuse(_closed_error())
        async with self._model_lock:
            self._model.close()

    # --- serving -----------------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        """Decode batch after batch until the queue is empty."""
        while self._queue:
            await self._gather()
            async with self._model_lock:
                batch = self._take()
                if batch:
                    await self._run(batch)

    async def _gather(self) -> None:
        """Let the event loop run until a batch is full or no new request arrives."""
        quiet = 0
        for _ in range(GATHER_TURNS):
            if len(self._queue) >= self._max_rows or quiet == QUIET_TURNS:
                return
            seen = self._arrivals
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._arrivals == seen else 0

    def _take(self) -> list[_Pending]:
        """The next batch, first come first served; requests whose callers have left are forgotten."""
        batch: list[_Pending] = []
        while self._queue and len(batch) < self._max_rows:
            pending = self._queue.popleft()
            if not pending.future.done():
                batch.append(pending)
        return batch

    async def _run(self, batch: list[_Pending]) -> None:
        self._batch, self._dropped_N = batch, np.zeros(len(batch), dtype=bool)
        for row, pending in enumerate(batch):
            pending.future.add_done_callback(partial(_drop, self._dropped_N, row))
        requests = [pending.request for pending in batch]
        number = self._stats.batches
        self._events.event(
            "gen", event="batch.start", batch=number, inflight=self._in_flight, target_batch=self._max_rows
        )
        started = time.perf_counter()
        model = self._model
        work = submit_in(self._executor, decode, model.module, requests, self._dropped_N, model.device, *self._switches)
        try:
            await asyncio.wait([work])
        finally:
            self._dropped_N[:] = True  # all done, or this task was cancelled and the thread has to stop
            self._batch = ()
        ended = time.perf_counter()
        if error := work.exception():
            for pending in batch:
                _fail(pending, error)
        else:
            results = work.result()
            self._deliver(batch, results, started, ended)
            self._events.event(
                "gen",
                event="batch.done",
                batch=number,
                completions=len(batch),
                tokens=sum(len(result.token_ids) for result in results),
                dur_ms=(ended - started) * 1e3,
                longest_ms=(ended - min(pending.arrived for pending in batch)) * 1e3,
            )

    def _deliver(self, batch: list[_Pending], results: list[Decoded], started: float, ended: float) -> None:
        delivered = 0
        for pending, result in zip(batch, results, strict=True):
            if pending.future.done():
                continue
            delivered += len(result.token_ids)
            completion = Completion(
                request_id=pending.request.id,
                token_ids=result.token_ids,
                logprobs=result.logprobs,
                spans=(VersionSpan(0, self._version),),
                finish_reason=result.finish_reason,
                timing=Timing(queued_s=started - pending.arrived, service_s=ended - started),
            )
            pending.future.set_result(completion)
        stats = self._stats
        prompts = [pending.request.prompt_ids for pending in batch]
        asked = sum(map(len, prompts))
        self._stats = replace(
            stats,
            batches=stats.batches + 1,
            rows=stats.rows + len(batch),
            tokens=stats.tokens + delivered,
            seconds=stats.seconds + ended - started,
            prompt_tokens=stats.prompt_tokens + asked,
            prompt_tokens_computed=stats.prompt_tokens_computed + (_distinct(prompts) if self._shared else asked),
        )

    async def _load(self, update: WeightUpdate) -> SyncTiming:
        called = time.perf_counter()
        place = {"trace": update.trace_id, "version": update.version}
        self._events.event("weights", event="server.recv", **place)
        async with self._model_lock:
            self._assert_open()
            if update.version <= self._version:
                raise StateError(
                    f"The engine has version {self._version} of the weights and was sent version {update.version}.",
                    "Versions only go up.",
                )
            self._events.event("weights", event="rpc.start", **place)
            started = time.perf_counter()
            await run_in(self._executor, self._model.load_weights, update.tensors)
            self._version = update.version
        ended = time.perf_counter()
        rpc_ms = (ended - started) * 1e3
        self._events.event("weights", event="rpc.done", **place, rpc_ms=rpc_ms)
        return SyncTiming(update.version, wall_ms=(ended - called) * 1e3, rpc_ms=rpc_ms)

    # --- refusing ----------------------------------------------------------------------------------------------------

    def _pump_ended(self, task: asyncio.Task[None]) -> None:
        """The pump ends by itself only with an empty queue; if it was cancelled or broke, nobody may wait for ever."""
        if task.cancelled():
            self._refuse(_closed_error())
        elif error := task.exception():
            self._refuse(error)

    def _refuse(self, error: BaseException) -> None:
        """Give `error` to every caller that waits or whose row is being decoded, and stop the decoding."""
        waiting, self._queue = [*self._batch, *self._queue], deque()
        for pending in waiting:
            _fail(pending, error)
        self._dropped_N[:] = True

    def _assert_open(self) -> None:
        if self._closed:
            raise _closed_error()

    def _check(self, request: GenerationRequest) -> None:
        check_request(request)
        prompt, sampling = request.prompt_ids, request.sampling
        if int(prompt.min()) < 0 or int(prompt.max()) >= self._vocabulary:
            raise ConfigurationError(
                f"Request {request.id!r}: the prompt has token ids outside the model's vocabulary of "
                f"{self._vocabulary}.",
                "Encode prompts with the tokenizer of the same model.",
            )
        longest = len(prompt) + sampling.max_tokens
        if longest > self._model.max_length:
            raise ConfigurationError(
                f"Request {request.id!r}: a prompt of {len(prompt)} tokens and {sampling.max_tokens} new ones make "
                f"{longest}, more than the model's {self._model.max_length}.",
                "Lower rollout.max_tokens or shorten the prompts.",
            )


def _check_layers(model: LanguageModel) -> None:
    """Raises ConfigurationError for a model that keeps something else than keys and values."""
    config = model.module.config.get_text_config()
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS)
    if unknown:
        raise ConfigurationError(
            f"The torch engine cannot sample from {type(model.module).__name__}: it has {unknown[0]} layers.",
            "Choose a model with attention layers only.",
        )


def _distinct(prompts: Sequence[Int32]) -> int:
    """Prompt tokens that `decode` computes when prefill is shared: all but the last of a prompt once for each distinct
    beginning, and the last, which is the first input of decoding, for every row."""
    return sum(len(beginning) for beginning in {p[:-1].tobytes(): p[:-1] for p in prompts}.values()) + len(prompts)


def _closed_error() -> StateError:
    return StateError("The engine is closed.", "Open a new one to go on sampling.")


def _fail(pending: _Pending, error: BaseException) -> None:
    if not pending.future.done():
        pending.future.set_exception(error)


def _drop(dropped_N: NDArray[np.bool_], row: int, _future: asyncio.Future[Completion]) -> None:
    dropped_N[row] = True
