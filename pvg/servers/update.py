"""A weight update and its timing, as plain records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pvg.models.low_rank import LowRankAdapter

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LowRankAdapter", "SyncTiming", "WeightUpdate"]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A new version of the policy's weights by parameter name. `version` is above the engine's current one.

    `tensors` always holds the whole model with adapters merged in. `adapter`: what turns the base model into it, if
    any.
    """

    version: int
    tensors: Mapping[str, Tensor]
    trace_id: str = ""
    adapter: LowRankAdapter | None = None


@dataclass(frozen=True, slots=True)
class SyncTiming:
    """Milliseconds of one update: `wall_ms` in total, `rpc_ms` of work. The rest is waiting (`queue_ms`).

    `parts` divides the work, if the engine reports it. `canary_gap`: the largest difference in nats between the
    trainer's and a server's log-probs under the new weights; None without a canary.
    """

    version: int
    wall_ms: float
    rpc_ms: float
    parts: Mapping[str, float] = field(default_factory=dict)
    canary_gap: float | None = None

    @property
    def queue_ms(self) -> float:
        return self.wall_ms - self.rpc_ms
