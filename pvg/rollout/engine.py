"""The `Engine` protocol: token ids in, token ids out. Nothing here decodes or encodes text, or imports torch.

Invariants: the log-probs of a completion are those of exactly the distribution its tokens were sampled from; the random
numbers of a request depend on its own seed alone, never on the requests it happens to share a batch with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pvg.records import FinishReason, Float32, Int32, Timing, VersionSpan
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
    """One completion to sample. `prompt_ids` int32 [P], P >= 1; `seed` fixes this request's random numbers."""

    id: str
    prompt_ids: Int32
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine sampled: `token_ids` int32 [C] (stop token included), `logprobs` float32 [C] in nats."""

    request_id: str
    token_ids: Int32
    logprobs: Float32
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    timing: Timing


class Engine(Protocol):
    """Samples completions from one policy; versions count the weights that were loaded into it (0 = as opened)."""

    @property
    def version(self) -> int: ...

    @property
    def max_in_flight(self) -> int:
        """Most requests the engine accepts at once; the dispatcher asserts at start that its concurrency fits."""
        ...

    async def generate(self, request: GenerationRequest) -> Completion: ...

    async def load_weights(self, update: WeightUpdate) -> SyncTiming: ...

    async def close(self) -> None: ...
