"""Replacements for the models of the `loop` workload.

The engine streams recorded completions in chunks, as a streaming server would. The verifier's scores are available at
once. Neither computes anything, so the benchmark measures the orchestrator. Every completion is stretched to the length
of a reasoning model's output and has the experts of a mixture-of-experts model for each token. The delays are the same
in every sample.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pvg.models.tokenizer import Tokenizer
from pvg.records import FinishReason, Float32, Int32, Rollout, RoutedExperts, VersionSpan
from pvg.rollout.engine import Completion, Engine, EngineStats, GenerationRequest
from pvg.servers.publishing import SyncTiming, WeightUpdate
from pvg.verifier.scorer import ScoreCache, ScoredBatch, ScoreInput

STEP_ENDS = (";", "\n")  # a step of a solution ends with one of these
EXPERT_ROWS = 4096  # tokens after which the experts repeat
GOLDEN = (5**0.5 - 1) / 2  # its multiples modulo 1 spread the rollouts' durations evenly over an interval


class RecordedScoringModel:
    """A verifier for contexts of up to `max_length` tokens, without a model. `RecordedScores` provides its scores."""

    reads: Literal["scalar", "implicit", "yes_token"] = "scalar"

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length


class RecordedScores:
    """A ScoreBackend that returns every score at once: a number in [-1, 1) derived from the solution's digest."""

    def __init__(self) -> None:
        self.references = ScoreCache(1)

    def batches(self, lengths: Sequence[int]) -> list[NDArray[np.int64]]:
        return [np.arange(len(lengths))]

    def weights_changed(self) -> None: ...

    def submit(self, inputs: Sequence[ScoreInput]) -> asyncio.Future[ScoredBatch]:
        numbers = np.array([int.from_bytes(entry.digest[:4], "little") for entry in inputs])
        done: asyncio.Future[ScoredBatch] = asyncio.get_running_loop().create_future()
        done.set_result(ScoredBatch((numbers / 2**31 - 1).astype(np.float32)))
        return done


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request: token ids int32 [C], log-probs float32 [C], and the seconds in which the tokens arrive
    at an even pace. `experts` makes those of prompt and completion when the last token is there."""

    token_ids: Int32
    logprobs: Float32
    finish_reason: FinishReason
    seconds: float
    experts: Callable[[], RoutedExperts]


class StandInEngine(Engine):
    """Gives to each request what `answer` has for it, in chunks of `chunk` tokens. It accepts any weights, which
    interrupt nothing: a completion has the version of its start."""

    def __init__(self, max_in_flight: int, answer: Callable[[GenerationRequest], Answer], chunk: int) -> None:
        self._max_in_flight, self._answer, self._chunk = max_in_flight, answer, chunk
        self._version = 0
        self._stats = EngineStats()

    @property
    def version(self) -> int:
        return self._version

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    async def generate(self, request: GenerationRequest) -> Completion:
        found, version, began = self._answer(request), self.version, time.perf_counter()
        tokens = len(found.token_ids)
        chunks = -(-tokens // self._chunk)
        for number in range(1, chunks + 1):
            # Relative to the start, so that a busy loop delays one chunk and not all later ones.
            due = began + found.seconds * number / chunks
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        seconds = max(time.perf_counter() - began, 1e-9)
        prompt = len(request.prompt_ids)
        self._stats = self._stats.plus(EngineStats(1, 1, tokens, seconds, prompt, prompt))
        return Completion(
            request_id=request.id,
            token_ids=found.token_ids,
            logprobs=found.logprobs,
            spans=(VersionSpan(0, version),),
            finish_reason=found.finish_reason,
            timing=request.timing(0.0, seconds),
            routed_experts=found.experts(),
        )

    async def load_weights(self, update: WeightUpdate) -> SyncTiming:
        self._version = update.version
        return SyncTiming(update.version, wall_ms=0.0, rpc_ms=0.0)

    async def close(self) -> None: ...


def some_experts(layers: int, k: int) -> RoutedExperts:
    return np.random.default_rng(0).integers(0, 256, (EXPERT_ROWS, layers, k), dtype=np.uint8)


def recorded(
    rollout: Rollout, number: int, tokenizer: Tokenizer, tokens: int, seconds: float, experts: RoutedExperts
) -> Answer:
    """A rollout stretched to almost `tokens` tokens in whole steps, which arrive within half to all of `seconds`.
    `number` selects its duration and its experts. They repeat `experts` [E, layers, k] from that row on: so what is
    served is not in memory before."""
    ids, logprobs = rollout.completion_ids, rollout.logprobs
    step = first_step(ids, tokenizer)
    repeats = max(0, tokens - len(ids)) // max(1, step)
    rows = len(rollout.prompt_ids) + repeats * step + len(ids) - 1
    return Answer(
        token_ids=np.concatenate([np.tile(ids[:step], repeats), ids]),
        logprobs=np.concatenate([np.tile(logprobs[:step], repeats), logprobs]),
        finish_reason=rollout.finish_reason,
        seconds=seconds * (0.5 + 0.5 * (number * GOLDEN % 1)),
        experts=lambda: experts[(np.arange(rows) + number) % len(experts)],
    )


def first_step(ids: Int32, tokenizer: Tokenizer) -> int:
    """The number of tokens of a solution's first step. Repeating it keeps the solution well-formed if steps may repeat.
    If no step ends, all tokens but the last."""
    for end in range(1, len(ids)):
        if tokenizer.decode(ids[:end]).endswith(STEP_ENDS):
            return end
    return max(1, len(ids) - 1)
