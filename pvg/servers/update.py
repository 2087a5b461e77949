"""What is published and what publishing cost."""

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
    """A new version of the policy's weights, by parameter name. `version` counts up from the engine's own.

    `tensors` are always the whole model's, adapters merged in; `adapter` is what makes them of the base model, where
    there is one.
    """

    version: int
    tensors: Mapping[str, Tensor]
    trace_id: str = ""
    adapter: LowRankAdapter | None = None


@dataclass(frozen=True, slots=True)
class SyncTiming:
    """Milliseconds of one update: all of it, the work itself, and the rest, which is waiting (wall - rpc).

    `parts` divides the work where the engine tells; `canary_gap` is the largest difference, in nats, between the
    trainer's log-probs and a server's under the new weights, None where there is nothing to prove.
    """

    version: int
    wall_ms: float
    rpc_ms: float
    parts: Mapping[str, float] = field(default_factory=dict)
    canary_gap: float | None = None

    @property
    def queue_ms(self) -> float:
        return self.wall_ms - self.rpc_ms
