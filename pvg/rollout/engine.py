"""The `Engine` protocol: token ids in, token ids out. Nothing here decodes or encodes text, or imports torch.

Invariants: the log-probs of a completion are those of exactly the distribution its tokens were sampled from; the random
numbers of a request depend on its own seed alone, never on the requests it happens to share a batch with. (In the torch
engine each is that of a position, so that a completion which was cut short and continued under the same weights is the
one that was never cut. A server draws anew from where it was cut: the same only in distribution.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pvg.errors import ConfigurationError, StateError
from pvg.records import FinishReason, Float32, Int32, RoutedExperts, Timing, VersionSpan
from pvg.servers.update import SyncTiming, WeightUpdate


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. `top_k = 0` and `top_p = 1` switch the two cuts off; a token of `stop_ids` ends a completion."""

    max_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """What there is of a completion that was cut short: `token_ids` int32 [T], T >= 1, no stop token among them, and
    `logprobs` float32 [T] in nats, of the versions in `spans` that sampled them. `timing` is what it has taken;
    `routed_experts` [P + T - 1, layers, k], from an engine that was opened to tell them."""

    token_ids: Int32
    logprobs: Float32
    spans: tuple[VersionSpan, ...]
    timing: Timing = field(default_factory=Timing)
    routed_experts: RoutedExperts | None = None

    @property
    def version(self) -> int:
        """The oldest policy version among its tokens."""
        return min(span.version for span in self.spans)


class CutShort(Exception):
    """`generate` ends with this where `Engine.cut` was heard in time. `begun`: what there is; None: not a token."""

    def __init__(self, begun: PartialCompletion | None) -> None:
        super().__init__("the request was cut short")
        self.begun = begun


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to sample. `prompt_ids` int32 [P], P >= 1; `seed` fixes this request's random numbers.

    `begun` is what an earlier request of the same prompt and seed had sampled when it was cut short: the completion
    begins with it, its log-probs and versions stay what they were, and `sampling.max_tokens` counts it.
    `on_tokens` is told how many tokens there are, as they come, by engines that can tell before the end; an attempt
    that failed begins again from few.
    """

    id: str
    prompt_ids: Int32
    sampling: Sampling
    seed: int
    on_tokens: Callable[[int], None] | None = field(default=None, compare=False)
    begun: PartialCompletion | None = field(default=None, compare=False)

    @property
    def tokens_begun(self) -> int:
        return 0 if self.begun is None else len(self.begun.token_ids)

    @property
    def known_ids(self) -> Int32:
        """The prompt and what was sampled before, int32 [P + T]: what is prefilled."""
        return self.prompt_ids if self.begun is None else np.concatenate([self.prompt_ids, self.begun.token_ids])

    def spans(self, length: int, version: int) -> tuple[VersionSpan, ...]:
        """Of its completion of `length` tokens, when those beyond `begun` were sampled by `version`."""
        if self.begun is None:
            return (VersionSpan(0, version),)
        spans, first = self.begun.spans, self.tokens_begun
        return spans if length == first or spans[-1].version == version else (*spans, VersionSpan(first, version))

    def timing(self, queued_s: float, service_s: float) -> Timing:
        """What its completion has taken in all, when this request took so long."""
        before = Timing() if self.begun is None else self.begun.timing
        return Timing(before.queued_s + queued_s, before.service_s + service_s)

    def experts(self, computed: RoutedExperts | None) -> RoutedExperts | None:
        """Of its completion, when those of all its tokens are `computed` now: tokens that were computed before keep
        the experts that the next one was sampled with."""
        before = None if self.begun is None else self.begun.routed_experts
        if before is None or computed is None:
            return computed
        return np.concatenate([before, computed[len(before) :]])


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
    prompt tokens asked for, and those among them that were computed (the others were shared with another request). What
    a continued completion begins with counts as prompt.

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
    def requests_in_flight(self) -> int:
        """Requests that have begun and not ended. 0 for an engine that does not count them."""
        return 0

    @property
    def max_in_flight(self) -> int:
        """Most requests the engine accepts at once; the dispatcher asserts at start that its concurrency fits."""
        ...

    @property
    def remote(self) -> bool:
        """Whether other processes do the sampling, so that this process has nothing to compute meanwhile."""
        return False

    async def ready(self) -> None:
        """Make sure, before anything is asked of it, that the engine can serve; raises what the user can mend."""
        return  # where the model is in this process, it can

    async def generate(self, request: GenerationRequest) -> Completion: ...

    def cut(self, request_ids: Collection[str]) -> None:
        """End these requests at their next token: their `generate` raises `CutShort`. One that is not there, or ends
        by itself first, is not concerned. Raises StateError where the engine cannot hand back what it has."""
        raise StateError("This engine hands back no unfinished completions.", "Set rollout.partial to false.")

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
        "what it begins with is no unfinished completion": request.begun is not None
        and not _can_go_on(request.begun, len(prompt), sampling),
    }
    return next((complaint for complaint, is_so in complaints.items() if is_so), "")


def _can_go_on(begun: PartialCompletion, prompt: int, sampling: Sampling) -> bool:
    ids, spans, experts = begun.token_ids, begun.spans, begun.routed_experts
    return (
        0 < len(ids) < sampling.max_tokens
        and len(begun.logprobs) == len(ids)
        and not np.isin(ids, sampling.stop_ids).any()
        and bool(spans)
        and spans[0].start == 0
        and spans[-1].start < len(ids)
        and (experts is None or len(experts) == prompt + len(ids) - 1)
    )
