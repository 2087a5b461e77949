"""`RecordedEngine`: completions recorded once and served again in chunks and turns, as a streaming server would send
them.

It computes nothing, so that what is measured is the orchestrator. Every completion is stretched to a length that a
reasoning model writes, carries the experts of a mixture-of-experts model for each of its tokens, and comes after delays
that are the same every time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pvg.bench.workloads.loop_sides import Join, Pieces
from pvg.bench.workloads.stand_in import StandInEngine
from pvg.models.tokenizer import Tokenizer
from pvg.records import FinishReason, Float32, Int32, Rollout, RoutedExperts
from pvg.rollout.engine import Completion, GenerationRequest

STEP_ENDS = (";", "\n")  # a step of a solution ends with one of these
GOLDEN = (5**0.5 - 1) / 2  # its multiples modulo 1 spread the rollouts' durations evenly


@dataclass(frozen=True, slots=True)
class Payload:
    """What one request gets: token ids int32 [C], log-probs float32 [C], the experts [P + C - 1, layers, k] of prompt
    and completion, and the seconds over which they arrive, in `turns` of about equally many tokens."""

    token_ids: Int32
    logprobs: Float32
    experts: RoutedExperts
    finish_reason: FinishReason
    duration_s: float
    turns: int = 1

    def chunk(self, start: int, end: int) -> Pieces:
        """Tokens `start` to `end`, and the experts that were chosen to sample them: before the first token, those of
        the whole prompt."""
        before = len(self.experts) - len(self.token_ids)
        first = 0 if start == 0 else before + start
        return Pieces(self.token_ids[start:end], self.logprobs[start:end], self.experts[first : before + end])


class RecordedEngine(StandInEngine):
    """Serves `payloads` by request id, in chunks of `chunk` tokens. `copied` counts the bytes that joining copied,
    `in_flight` has the version with which each request under way began."""

    def __init__(
        self, payloads: Mapping[str, Payload], *, chunk: int, join: Callable[[], Join], max_in_flight: int
    ) -> None:
        super().__init__(max_in_flight)
        self._payloads = payloads
        self._chunk = chunk
        self._join = join
        self.copied = 0
        self.in_flight: dict[str, int] = {}

    async def generate(self, request: GenerationRequest) -> Completion:
        payload = self._payloads[request.id]
        self.in_flight[request.id] = self.version
        try:
            return await self._served(request, payload)
        finally:
            self.in_flight.pop(request.id, None)

    async def _served(self, request: GenerationRequest, payload: Payload) -> Completion:
        started = time.perf_counter()
        starts = range(0, len(payload.token_ids), self._chunk)
        turn_ends = {len(starts) * turn // payload.turns for turn in range(1, payload.turns)}
        join = self._join()
        for number, start in enumerate(starts, start=1):
            # Against the clock, so that a busy loop delays a chunk and not all those behind it as well.
            due = started + payload.duration_s * number / len(starts)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            join.add(payload.chunk(start, min(start + self._chunk, len(payload.token_ids))))
            if number in turn_ends:
                join.next_turn()
        joined = join.result()
        self.copied += join.copied
        return self.completed(
            request,
            joined.token_ids,
            joined.logprobs,
            payload.finish_reason,
            time.perf_counter() - started,
            joined.experts,
        )


@dataclass(frozen=True, slots=True)
class Stretching:
    """How recorded rollouts are stretched: to about `tokens` tokens, arriving within half to all of `seconds` in
    `turns`, with `layers` x `k` experts for each token."""

    tokens: int
    seconds: float
    turns: int = 1
    layers: int = 0
    k: int = 0


def recorded(rollout: Rollout, number: int, how: Stretching, tokenizer: Tokenizer) -> Payload:
    """A rollout stretched (by less than a step too few); `number` decides how long it takes and which experts."""
    ids, logprobs = rollout.completion_ids, rollout.logprobs
    step = first_step(ids, tokenizer)
    repeats = max(0, how.tokens - len(ids)) // max(1, step)
    token_ids = np.concatenate([np.tile(ids[:step], repeats), ids])
    shape = (len(rollout.prompt_ids) + len(token_ids) - 1, how.layers, how.k)
    return Payload(
        token_ids=token_ids,
        logprobs=np.concatenate([np.tile(logprobs[:step], repeats), logprobs]),
        experts=np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8),
        finish_reason=rollout.finish_reason,
        duration_s=how.seconds * (0.5 + 0.5 * (number * GOLDEN % 1)),
        turns=how.turns,
    )


def first_step(ids: Int32, tokenizer: Tokenizer) -> int:
    """How many tokens the first step of a solution takes: repeated, it leaves the solution well-formed where a step
    may come again. The whole solution but its last token where no step ends."""
    for end in range(1, len(ids)):
        if tokenizer.decode(ids[:end]).endswith(STEP_ENDS):
            return end
    return max(1, len(ids) - 1)
