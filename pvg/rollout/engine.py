"""The `Engine` protocol: token ids in, token ids out. This module imports no torch and no tokenizer.

Invariants:
- The log-probs of a completion belong to exactly the distribution that its tokens were sampled from.
- The random numbers of a request depend only on its seed, never on other requests in its batch.

In the torch engine each position has its own random number. So a completion that was cut and continued under the same
weights equals one that was never cut. A server draws new numbers after a cut: the two are equal only in distribution.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from operator import add, attrgetter, sub
from typing import Protocol

import numpy as np

from pvg.errors import ConfigurationError, StateError
from pvg.records import FinishReason, Float32, Int32, RoutedExperts, Timing, VersionSpan
from pvg.servers.publishing import SyncTiming, WeightUpdate

# Requests count as gathered after this many turns of the event loop without a new one. A caller needs a few turns to
# submit its next request. Counting turns instead of seconds keeps batches reproducible.
QUIET_TURNS = 8
# A steady trickle of requests cannot delay a batch for longer than this.
GATHER_TURNS = 256


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings. Any token of `stop_ids` ends a completion."""

    max_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """The tokens of a completion that was cut short: `token_ids` int32 [T], T >= 1, without a stop token, and
    `logprobs` float32 [T] in nats. `spans`: the versions that sampled them. `timing`: the time so far. `routed_experts`
    [P + T - 1, layers, k] if the engine reports them."""

    token_ids: Int32
    logprobs: Float32
    spans: tuple[VersionSpan, ...]
    timing: Timing = field(default_factory=Timing)
    routed_experts: RoutedExperts | None = None

    @property
    def version(self) -> int:
        """The oldest policy version among the tokens."""
        return min(span.version for span in self.spans)


class CutShort(Exception):
    """Raised by `generate` for a request that `Engine.cut` ended. `partial`: its tokens so far; None: it has none."""

    def __init__(self, partial: PartialCompletion | None) -> None:
        super().__init__("the request was cut short")
        self.partial = partial


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to sample. `prompt_ids` int32 [P], P >= 1. `seed` determines the request's random numbers.

    `resumed_from`: tokens of an earlier request with the same prompt and seed that was cut short. The completion starts
    with them, keeps their log-probs and versions, and counts them in `sampling.max_tokens`. `on_tokens` is called with
    the number of tokens so far, by engines that stream. The number falls if a failed attempt is retried. `group`: the
    number of its group, by which requests are divided among workers.
    """

    id: str
    prompt_ids: Int32
    sampling: Sampling
    seed: int
    on_tokens: Callable[[int], None] | None = field(default=None, compare=False)
    resumed_from: PartialCompletion | None = field(default=None, compare=False)
    group: int = 0

    @property
    def tokens_resumed(self) -> int:
        return 0 if self.resumed_from is None else len(self.resumed_from.token_ids)

    @property
    def known_ids(self) -> Int32:
        """The prompt and the tokens of `resumed_from`, int32 [P + T]. Both are prefilled."""
        if self.resumed_from is None:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, self.resumed_from.token_ids])

    def spans(self, length: int, version: int) -> tuple[VersionSpan, ...]:
        """Version spans of a completion of `length` tokens. `version` sampled those after `resumed_from`."""
        if self.resumed_from is None:
            return (VersionSpan(0, version),)
        spans, first = self.resumed_from.spans, self.tokens_resumed
        return spans if length == first or spans[-1].version == version else (*spans, VersionSpan(first, version))

    def timing(self, queued_s: float, service_s: float) -> Timing:
        """The total time of the completion, given the time of this request."""
        before = Timing() if self.resumed_from is None else self.resumed_from.timing
        return Timing(before.queued_s + queued_s, before.service_s + service_s)

    def experts(self, computed: RoutedExperts | None) -> RoutedExperts | None:
        """Experts of the completion, where `computed` holds those of all tokens as computed now. Resumed tokens keep
        their recorded experts, because those produced the next token."""
        before = None if self.resumed_from is None else self.resumed_from.routed_experts
        if before is None or computed is None:
            return computed
        return np.concatenate([before, computed[len(before) :]])


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampled completion: `token_ids` int32 [C] (stop token included), `logprobs` float32 [C] in nats.
    `routed_experts` [P + C - 1, layers, k], prompt included, if the engine reports them. `reference_logprobs` float32
    [C]: under the base model, if it was asked (`Engine.with_reference`)."""

    request_id: str
    token_ids: Int32
    logprobs: Float32
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    timing: Timing
    routed_experts: RoutedExperts | None = None
    reference_logprobs: Float32 | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since the engine was opened: decoded batches, their rows, sampled tokens and seconds; requested prompt
    tokens, and those of them that were computed (the rest came from a shared prefix). Tokens of `resumed_from` count as
    prompt.

    An engine without batches (a server) counts seconds as batches, and requests in flight times seconds as rows. The
    torch engine also counts decoding steps, and live rows summed over the steps."""

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
        """Live rows per decoding step; rows per batch if steps are not counted."""
        if self.steps:
            return self.live_rows / self.steps
        return self.rows / self.batches if self.batches else 0.0

    @property
    def prefix_share(self) -> float:
        """The share of prompt tokens that needed no computation."""
        return 1.0 - self.prompt_tokens_computed / self.prompt_tokens if self.prompt_tokens else 0.0

    def since(self, before: EngineStats) -> EngineStats:
        return EngineStats(*map(sub, _counts(self), _counts(before)))

    def plus(self, more: EngineStats) -> EngineStats:
        return EngineStats(*map(add, _counts(self), _counts(more)))


# `astuple` copies each value, which takes time with every message of every worker.
_counts = attrgetter(*(entry.name for entry in fields(EngineStats)))


class Engine(Protocol):
    """Samples completions from one policy. `version`: 0 for the initial weights, +1 per update; -1 if the initial
    weights are unknown (external server)."""

    @property
    def version(self) -> int: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def requests_in_flight(self) -> int:
        """Requests in flight; always 0 for an engine that does not count them."""
        return 0

    @property
    def max_in_flight(self) -> int:
        """The most requests that the engine accepts at once. The dispatcher checks its concurrency against this at
        start."""

    @property
    def gives_reference(self) -> bool:
        """Whether completions can have log-probs of the base model (`with_reference`)."""
        return False

    async def ready(self, longest: int = 0) -> None:
        """Check before the first request that the engine can serve. `longest`: most tokens of a prompt and its
        completion. Raises an error that says what the user can fix."""
        return  # a model in this process is always ready

    async def generate(self, request: GenerationRequest) -> Completion: ...

    async def with_reference(self, request: GenerationRequest, found: Completion) -> Completion:
        """`found`, the completion of `request`, with its log-probs under the base model. Raises what `generate`
        raises."""
        raise StateError("This engine computes no log-probs of the base model.", "Let the trainer compute them.")

    def cut(self, request_ids: Collection[str]) -> None:
        """End these requests at their next token; their `generate` raises `CutShort`. Unknown and finished requests are
        ignored. Raises StateError if the engine cannot return unfinished completions."""
        raise StateError("This engine cannot return unfinished completions.", "Set rollout.deadline to 'cut'.")

    async def load_weights(self, update: WeightUpdate) -> SyncTiming: ...

    async def rest(self, *, replaced: bool = False) -> None:
        """Give memory to the trainer until the next request or update. `replaced`: new weights will come before the
        next request. Does nothing if the engine has none to give, or has requests in flight."""
        return

    async def close(self) -> None: ...


async def gather_requests(arrivals: Callable[[], int], enough: Callable[[], bool] = lambda: False) -> None:
    """Yield to the event loop until no new request arrives or there are `enough`. `arrivals`: how many have arrived
    since the engine was opened."""
    quiet = 0
    for _ in range(GATHER_TURNS):
        if enough() or quiet == QUIET_TURNS:
            return
        seen = arrivals()
        await asyncio.sleep(0)
        quiet = quiet + 1 if arrivals() == seen else 0


def check_request(request: GenerationRequest) -> None:
    """Raises ConfigurationError for a request that no engine can serve."""
    if complaint := _complaint(request):
        raise ConfigurationError(f"Request {request.id!r}: {complaint}.")


def _complaint(request: GenerationRequest) -> str:
    prompt, sampling = request.prompt_ids, request.sampling
    complaints = {
        f"max_tokens is {sampling.max_tokens}, but must be at least 1": sampling.max_tokens < 1,
        f"the temperature is {sampling.temperature}, but must be above 0 (a tiny one is greedy)": not (
            math.isfinite(sampling.temperature) and sampling.temperature > 0.0
        ),
        f"the seed is {request.seed}, but must not be negative": request.seed < 0,
        "the prompt has no tokens": prompt.ndim != 1 or len(prompt) == 0,
        "resumed_from has all tokens already": request.tokens_resumed >= max(sampling.max_tokens, 1),
    }
    return next((complaint for complaint, is_so in complaints.items() if is_so), "")
