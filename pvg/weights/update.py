"""What is published and what publishing cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A new version of the policy's weights, by parameter name. `version` counts up from the engine's own."""

    version: int
    tensors: Mapping[str, Tensor]
    trace_id: str = ""


@dataclass(frozen=True, slots=True)
class SyncTiming:
    """Milliseconds of one update: all of it, the work itself, and the rest, which is waiting (wall - rpc)."""

    version: int
    wall_ms: float
    rpc_ms: float

    @property
    def queue_ms(self) -> float:
        return self.wall_ms - self.rpc_ms
