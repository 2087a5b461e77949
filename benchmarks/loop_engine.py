"""Replacements for the models of the `loop` workload, and the slow sides of its switches.

The engine streams recorded completions in chunks, as a streaming server would. The verifier's scores are available at
once. Neither computes anything, so the benchmark measures the orchestrator. Every completion is stretched to the length
of a reasoning model's output and has the experts of a mixture-of-experts model for each token. The delays are the same
in every sample.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.stand_in import StandInEngine
from pvg.models.tokenizer import Tokenizer
from pvg.records import FinishReason, Float32, Int32, Rollout, RoutedExperts
from pvg.rollout.engine import Completion, GenerationRequest
from pvg.verifier.scorer import ScoreCache, ScoredBatch, ScoreInput

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NO_MODEL = "It has no model."
STEP_ENDS = (";", "\n")  # a step of a solution ends with one of these
EXPERT_ROWS = 4096  # tokens after which the experts repeat
GOLDEN = (5**0.5 - 1) / 2  # its multiples modulo 1 spread the rollouts' durations evenly over an interval


@dataclass(frozen=True, slots=True)
class Payload:
    """The answer to one request: token ids int32 [C], log-probs float32 [C], and the seconds over which the tokens
    arrive. The experts [P + C - 1, layers, k] of prompt and completion repeat `some_experts` [E, layers, k], which many
    payloads share, from row `place` on: so what is served is not in memory before."""

    token_ids: Int32
    logprobs: Float32
    prompt_tokens: int
    some_experts: RoutedExperts
    place: int
    finish_reason: FinishReason
    duration_s: float

    @property
    def experts(self) -> RoutedExperts:
        """A copy, as each reply of a server is one."""
        rows = np.arange(self.prompt_tokens + len(self.token_ids) - 1) + self.place
        return self.some_experts[rows % len(self.some_experts)]


class RecordedEngine(StandInEngine):
    """Serves `payloads` by request id: the tokens in chunks of `chunk`, and at the end, as vLLM does, the experts."""

    def __init__(self, payloads: Mapping[str, Payload], *, chunk: int, max_in_flight: int) -> None:
        super().__init__(max_in_flight)
        self._payloads = payloads
        self._chunk = chunk

    async def generate(self, request: GenerationRequest) -> Completion:
        payload = self._payloads[request.id]
        started = time.perf_counter()
        starts = range(0, len(payload.token_ids), self._chunk)
        token_ids, logprobs = list[Int32](), list[Float32]()
        for number, start in enumerate(starts, start=1):
            # Relative to the start, so that a busy loop delays one chunk and not all later ones.
            due = started + payload.duration_s * number / len(starts)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            end = min(start + self._chunk, len(payload.token_ids))
            token_ids.append(payload.token_ids[start:end])
            logprobs.append(payload.logprobs[start:end])
        return self.completed(
            request,
            np.concatenate(token_ids),
            np.concatenate(logprobs),
            payload.finish_reason,
            time.perf_counter() - started,
            payload.experts,
        )


class RecordedScoringModel:
    """A verifier for contexts of up to `max_length` tokens, without a model. `RecordedScores` provides its scores."""

    needs_reference = False
    reads: Literal["scalar", "implicit", "yes_token"] = "scalar"

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.closed = False

    @property
    def device(self) -> torch.device:
        raise NotImplementedError(NO_MODEL)

    def __call__(
        self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor, reference_B: Tensor | None = None
    ) -> Tensor:
        raise NotImplementedError(NO_MODEL)

    def reference(self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor) -> Tensor:
        raise NotImplementedError(NO_MODEL)

    def version(self) -> str:
        return "recorded"

    def close(self) -> None: ...


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
class RolloutStretch:
    """How to stretch recorded rollouts: to about `tokens` tokens that arrive within half to all of `seconds`, with
    `layers` x `k` experts per token."""

    tokens: int
    seconds: float
    layers: int = 0
    k: int = 0


def some_experts(how: RolloutStretch) -> RoutedExperts:
    return np.random.default_rng(0).integers(0, 256, (EXPERT_ROWS, how.layers, how.k), dtype=np.uint8)


def recorded(
    rollout: Rollout, number: int, how: RolloutStretch, tokenizer: Tokenizer, experts: RoutedExperts
) -> Payload:
    """A rollout stretched to almost `tokens` tokens in whole steps. `number` selects its duration and its experts."""
    ids, logprobs = rollout.completion_ids, rollout.logprobs
    step = first_step(ids, tokenizer)
    repeats = max(0, how.tokens - len(ids)) // max(1, step)
    token_ids = np.concatenate([np.tile(ids[:step], repeats), ids])
    return Payload(
        token_ids=token_ids,
        logprobs=np.concatenate([np.tile(logprobs[:step], repeats), logprobs]),
        prompt_tokens=len(rollout.prompt_ids),
        some_experts=experts,
        place=number,
        finish_reason=rollout.finish_reason,
        duration_s=how.seconds * (0.5 + 0.5 * (number * GOLDEN % 1)),
    )


def first_step(ids: Int32, tokenizer: Tokenizer) -> int:
    """The number of tokens of a solution's first step. Repeating it keeps the solution well-formed if steps may repeat.
    If no step ends, all tokens but the last."""
    for end in range(1, len(ids)):
        if tokenizer.decode(ids[:end]).endswith(STEP_ENDS):
            return end
    return max(1, len(ids) - 1)


# --- the slow sides: work on the event loop ---------------------------------------------------------------------------
# Research code often does this: it is correct, but it blocks all other work of the loop. pvg is the fast side.


class CallingThreadExecutor(Executor):
    """Runs each call immediately in the calling thread, which is the event loop's."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - the future passes it to the caller, as in any executor
            done.set_exception(error)
        return done
