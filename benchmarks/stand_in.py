"""`StandInEngine`: the base of engines that compute nothing, for workloads that measure everything around the engine.

A subclass implements `generate` and creates its completions with `completed`.
"""

from __future__ import annotations

from pvg.records import FinishReason, Float32, Int32, RoutedExperts
from pvg.rollout.engine import Completion, Engine, EngineStats, GenerationRequest
from pvg.servers.publishing import SyncTiming, WeightUpdate


class StandInEngine(Engine):
    """Accepts any weights, keeps their version, and counts each completion as a separate batch."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
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

    def completed(
        self,
        request: GenerationRequest,
        token_ids: Int32,
        logprobs: Float32,
        finish_reason: FinishReason,
        service_s: float,
        routed_experts: RoutedExperts | None = None,
    ) -> Completion:
        """Count a request that took `service_s` seconds, and return its completion."""
        self.count(request, len(token_ids), service_s)
        return Completion(
            request_id=request.id,
            token_ids=token_ids,
            logprobs=logprobs,
            spans=request.spans(len(token_ids), self._version),
            finish_reason=finish_reason,
            timing=request.timing(0.0, service_s),
            routed_experts=routed_experts,
        )

    def count(self, request: GenerationRequest, length: int, service_s: float) -> None:
        """Count a request whose completion, possibly partial, has `length` tokens so far."""
        stats, known = self._stats, len(request.known_ids)
        self._stats = EngineStats(
            batches=stats.batches + 1,
            rows=stats.rows + 1,
            tokens=stats.tokens + length - request.tokens_resumed,
            seconds=stats.seconds + service_s,
            prompt_tokens=stats.prompt_tokens + known,
            prompt_tokens_computed=stats.prompt_tokens_computed + known,
        )

    async def load_weights(self, update: WeightUpdate) -> SyncTiming:
        self._version = update.version  # nothing here depends on the weights
        return SyncTiming(update.version, wall_ms=0.0, rpc_ms=0.0)

    async def close(self) -> None: ...
