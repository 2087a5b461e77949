"""The `Engine` protocol: token ids in, token ids out. Nothing here decodes or encodes text, or imports torch.

Invariants: the log-probs of a completion are those of exactly the distribution its tokens were sampled from; the random
numbers of a request depend on its own seed alone, never on the requests it happens to share a batch with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pvg.errors import ConfigurationError
from pvg.records import FinishReason, Float32, Int32, RoutedExperts, Timing, VersionSpan
from pvg.weights import SyncTiming, WeightUpdate


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. `top_k = 0` and `top_p = 1` switch the two cuts off; a token of `stop_ids` ends a completion."""

    max_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to sample. `prompt_ids` int32 [P], P >= 1; `seed` fixes this request's random numbers.

    `on_tokens` is told how many tokens there are, as they come, by engines that can tell before the end; an attempt
    that failed begins again from few.
    """

    id: str
    prompt_ids: Int32
    sampling: Sampling
    seed: int
    on_tokens: Callable[[int], None] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine sampled: `token_ids` int32 [C] (stop token included), `logprobs` float32 [C] in nats.
    `routed_experts` [P + C - 1, layers, k], of the prompt too, from an engine that was opened to tell them."""

    request_id: str
    token_ids: Int32
    logprobs: Float32
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    timing: Timing
    routed_experts: RoutedExperts | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since the engine was opened: batches decoded, their rows, the tokens sampled and the seconds that took;
    prompt tokens asked for, and those among them that were computed (the others were shared with another request).

    An engine that makes no batches itself counts seconds as batches, and requests in flight times seconds as rows. One
    that decodes step by step in this process also counts its steps, and the live rows summed over them."""

    batches: float = 0
    rows: float = 0
    tokens: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    prompt_tokens_computed: int = 0
    steps: int = 0
    live_rows: int = 0

    @property
    def mean_batch(self) -> float:
        """Live rows per decoding step; where steps are not counted, rows per batch."""
        if self.steps:
            return self.live_rows / self.steps
        return self.rows / self.batches if self.batches else 0.0

    @property
    def prefix_share(self) -> float:
        """The share of the prompt tokens that needed no computation."""
        return 1.0 - self.prompt_tokens_computed / self.prompt_tokens if self.prompt_tokens else 0.0

    def since(self, before: EngineStats) -> EngineStats:
        """What was added after `before` was taken."""
        return EngineStats(
            batches=self.batches - before.batches,
            rows=self.rows - before.rows,
            tokens=self.tokens - before.tokens,
            seconds=self.seconds - before.seconds,
            prompt_tokens=self.prompt_tokens - before.prompt_tokens,
            prompt_tokens_computed=self.prompt_tokens_computed - before.prompt_tokens_computed,
            steps=self.steps - before.steps,
            live_rows=self.live_rows - before.live_rows,
        )


class Engine(Protocol):
    """Samples completions from one policy; versions count the weights that were loaded into it: 0 as opened, -1 where
    the engine cannot know what it has before something is loaded."""

    @property
    def version(self) -> int: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def max_in_flight(self) -> int:
        """Most requests the engine accepts at once; the dispatcher asserts at start that its concurrency fits."""
        ...

    async def ready(self) -> None:
        """Make sure, before anything is asked of it, that the engine can serve; raises what the user can mend."""
        return  # where the model is in this process, it can

    async def generate(self, request: GenerationRequest) -> Completion: ...

    async def load_weights(self, update: WeightUpdate) -> SyncTiming: ...

    async def close(self) -> None: ...


def check_request(request: GenerationRequest) -> None:
    """Raises ConfigurationError for a request that no engine can serve."""
    if complaint := _complaint(request):
        raise ConfigurationError(f"Request {request.id!r}: {complaint}.")


def _complaint(request: GenerationRequest) -> str:
    prompt, sampling = request.prompt_ids, request.sampling
    complaints = {
        f"max_tokens is {sampling.max_tokens}, but must be at least 1": sampling.max_tokens < 1,
        f"the temperature is {sampling.temperature}, but must be above 0 (a tiny one is greedy choice)": not (
            math.isfinite(sampling.temperature) and sampling.temperature > 0.0
        ),
        f"top_p is {sampling.top_p}, but must be above 0 and at most 1": not 0.0 < sampling.top_p <= 1.0,
        f"top_k is {sampling.top_k}, but must be 0 (no cut) or more": sampling.top_k < 0,
        f"the seed is {request.seed}, but must not be negative": request.seed < 0,
        "the prompt has no tokens": prompt.ndim != 1 or len(prompt) == 0,
    }
    return next((complaint for complaint, is_so in complaints.items() if is_so), "")
