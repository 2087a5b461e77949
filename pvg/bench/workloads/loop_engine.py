"""`RecordedEngine`: completions recorded once and served again in chunks, as a streaming server would send them.

It computes nothing, so that what is measured is the orchestrator. Every completion is stretched to a length that a
reasoning model writes, and comes after delays that are the same every time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pvg.models.tokenizer import Tokenizer
from pvg.records import FinishReason, Float32, Int32, Rollout, Timing, VersionSpan
from pvg.rollout.engine import Completion, Engine, EngineStats, GenerationRequest
from pvg.weights import SyncTiming, WeightUpdate

STEP_ENDS = (";", "\n")  # a step of a solution ends with one of these
GOLDEN = (5**0.5 - 1) / 2  # its multiples modulo 1 spread the rollouts' durations evenly


@dataclass(frozen=True, slots=True)
class Payload:
    """What one request gets: token ids int32 [C], log-probs float32 [C], and the seconds over which they arrive."""

    token_ids: Int32
    logprobs: Float32
    finish_reason: FinishReason
    duration_s: float


class Join(Protocol):
    """Puts the chunks of one completion together. `copied`: the bytes it has copied so far."""

    copied: int

    def add(self, token_ids: Int32, logprobs: Float32) -> None: ...

    def result(self) -> tuple[Int32, Float32]: ...


class JoinOnce:
    """Keeps the chunks and copies each of them once, at the end."""

    def __init__(self) -> None:
        self.copied = 0
        self._ids: list[Int32] = []
        self._logprobs: list[Float32] = []

    def add(self, token_ids: Int32, logprobs: Float32) -> None:
        self._ids.append(token_ids)
        self._logprobs.append(logprobs)

    def result(self) -> tuple[Int32, Float32]:
        ids, logprobs = np.concatenate(self._ids), np.concatenate(self._logprobs)
        self.copied += ids.nbytes + logprobs.nbytes
        return ids, logprobs


class JoinEachTime:
    """Appends every chunk to a new copy of all that came before it: quadratic in the number of chunks."""

    def __init__(self) -> None:
        self.copied = 0
        self._ids: Int32 = np.empty(0, np.int32)
        self._logprobs: Float32 = np.empty(0, np.float32)

    def add(self, token_ids: Int32, logprobs: Float32) -> None:
        self._ids = np.concatenate([self._ids, token_ids])
        self._logprobs = np.concatenate([self._logprobs, logprobs])
        self.copied += self._ids.nbytes + self._logprobs.nbytes

    def result(self) -> tuple[Int32, Float32]:
        return self._ids, self._logprobs


# `workload.join` of the loop profile.
JOINS: dict[str, Callable[[], Join]] = {"once": JoinOnce, "quadratic": JoinEachTime}


class RecordedEngine(Engine):
    """Serves `payloads` by request id, in chunks of `chunk` tokens. `copied` counts the bytes that joining copied."""

    def __init__(
        self, payloads: Mapping[str, Payload], *, chunk: int, join: Callable[[], Join], max_in_flight: int
    ) -> None:
        self._payloads = payloads
        self._chunk = chunk
        self._join = join
        self._max_in_flight = max_in_flight
        self._version = 0
        self._stats = EngineStats()
        self.copied = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def stats(self) -> EngineStats:
        """Each completion is a batch of its own here."""
        return self._stats

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    async def generate(self, request: GenerationRequest) -> Completion:
        payload = self._payloads[request.id]
        started = time.perf_counter()
        starts = range(0, len(payload.token_ids), self._chunk)
        join = self._join()
        for number, start in enumerate(starts, start=1):
            # Against the clock, so that a busy loop delays a chunk and not all those behind it as well.
            due = started + payload.duration_s * number / len(starts)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            end = start + self._chunk
            join.add(payload.token_ids[start:end], payload.logprobs[start:end])
        token_ids, logprobs = join.result()
        self.copied += join.copied
        service_s = time.perf_counter() - started
        self._count(request, len(token_ids), service_s)
        return Completion(
            request_id=request.id,
            token_ids=token_ids,
            logprobs=logprobs,
            spans=(VersionSpan(0, self._version),),
            finish_reason=payload.finish_reason,
            timing=Timing(queued_s=0.0, service_s=service_s),
        )

    def _count(self, request: GenerationRequest, tokens: int, seconds: float) -> None:
        stats, prompt = self._stats, len(request.prompt_ids)
        self._stats = EngineStats(
            batches=stats.batches + 1,
            rows=stats.rows + 1,
            tokens=stats.tokens + tokens,
            seconds=stats.seconds + seconds,
            prompt_tokens=stats.prompt_tokens + prompt,
            prompt_tokens_computed=stats.prompt_tokens_computed + prompt,
        )

    async def load_weights(self, update: WeightUpdate) -> SyncTiming:
        self._version = update.version  # recorded completions depend on no weights
        return SyncTiming(update.version, wall_ms=0.0, rpc_ms=0.0)

    async def close(self) -> None: ...


def recorded(rollout: Rollout, number: int, *, tokens: int, seconds: float, tokenizer: Tokenizer) -> Payload:
    """A rollout stretched to about `tokens` tokens (by less than a step too few), arriving within half to all of
    `seconds`; `number` decides which."""
    ids, logprobs = rollout.completion_ids, rollout.logprobs
    step = first_step(ids, tokenizer)
    repeats = max(0, tokens - len(ids)) // max(1, step)
    return Payload(
        token_ids=np.concatenate([np.tile(ids[:step], repeats), ids]),
        logprobs=np.concatenate([np.tile(logprobs[:step], repeats), logprobs]),
        finish_reason=rollout.finish_reason,
        duration_s=seconds * (0.5 + 0.5 * (number * GOLDEN % 1)),
    )


def first_step(ids: Int32, tokenizer: Tokenizer) -> int:
    """How many tokens the first step of a solution takes: repeated, it leaves the solution well-formed where a step
    may come again. The whole solution but its last token where no step ends."""
    for end in range(1, len(ids)):
        if tokenizer.decode(ids[:end]).endswith(STEP_ENDS):
            return end
    return max(1, len(ids) - 1)
