"""`StandInEngine`: an engine that computes nothing, for workloads that measure everything around the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from pvg.records import FinishReason, Float32, Int32, RoutedExperts, VersionSpan
from pvg.rollout.engine import Completion, Engine, EngineStats, GenerationRequest
from pvg.servers.publishing import SyncTiming, WeightUpdate


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request: token ids int32 [C], log-probs float32 [C], and the seconds in which the tokens arrive
    at an even pace. `experts` makes those of prompt and completion when the last token is there."""

    token_ids: Int32
    logprobs: Float32
    finish_reason: FinishReason
    seconds: float
    experts: Callable[[], RoutedExperts] | None = None


class StandInEngine(Engine):
    """Gives to each request what `answer` has for it, in chunks of `chunk` tokens (0: all together). It accepts any
    weights. An update interrupts nothing: each token has the version that is current when it arrives."""

    def __init__(self, max_in_flight: int, answer: Callable[[GenerationRequest], Answer], chunk: int = 0) -> None:
        self._max_in_flight, self._answer, self._chunk = max_in_flight, answer, chunk
        self._updates = [(0.0, 0)]  # (time, version that is current from then on)
        self._stats = EngineStats()

    @property
    def version(self) -> int:
        return self._updates[-1][1]

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    async def generate(self, request: GenerationRequest) -> Completion:
        found, first, began = self._answer(request), self.version, time.perf_counter()
        tokens = len(found.token_ids)
        chunks = -(-tokens // (self._chunk or tokens))
        for number in range(1, chunks + 1):
            # Relative to the start, so that a busy loop delays one chunk and not all later ones.
            due = began + found.seconds * number / chunks
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        seconds = max(time.perf_counter() - began, 1e-9)
        spans = {0: first}
        for since, version in self._updates:
            if since >= began:  # if two versions arrive with the same token, the newer one counts
                spans[min(tokens - 1, int(tokens * (since - began) / seconds))] = version
        prompt = len(request.prompt_ids)
        self._stats = self._stats.plus(EngineStats(1, 1, tokens, seconds, prompt, prompt))
        return Completion(
            request_id=request.id,
            token_ids=found.token_ids,
            logprobs=found.logprobs,
            spans=tuple(VersionSpan(*item) for item in spans.items()),
            finish_reason=found.finish_reason,
            timing=request.timing(0.0, seconds),
            routed_experts=None if found.experts is None else found.experts(),
        )

    async def load_weights(self, update: WeightUpdate) -> SyncTiming:
        self._updates.append((time.perf_counter(), update.version))
        return SyncTiming(update.version, wall_ms=0.0, rpc_ms=0.0)

    async def close(self) -> None: ...
