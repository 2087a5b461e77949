"""Replacements for the models of the `loop` workload, and the slow sides of its switches.

The engine streams recorded completions in chunks, as a streaming server would. The verifier's scores are available at
once. Neither computes anything, so the benchmark measures the orchestrator. Every completion is stretched to the length
of a reasoning model's output and has the experts of a mixture-of-experts model for each token. The delays are the same
in every sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.stand_in import Answer
from pvg.models.tokenizer import Tokenizer
from pvg.records import Int32, Rollout, RoutedExperts
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
