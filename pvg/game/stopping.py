"""The stop rule: a prover phase ends after its steps, or earlier if the sneaky role catches up (Kirchner et al.
2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pvg.config.sections import StopAfterSteps, StopAtScoreParity


@dataclass
class StopRule:
    """`score_parity`: stop when the EMA of the mean sneaky-incorrect score reaches that of helpful-correct.

    A batch that lacks one kind leaves that kind's average unchanged. `seen` counts batches.
    """

    stop: StopAfterSteps | StopAtScoreParity
    sneaky: float | None = None
    helpful: float | None = None
    seen: int = 0
    decay: float = 0.9  # of the averages: about the last ten batches, as many as score_parity waits for

    def observe(self, metrics: Mapping[str, float]) -> bool:
        """Add the metrics of a batch. Returns whether the phase ends now."""
        self.seen += 1
        self.sneaky = self._ema(self.sneaky, metrics.get("score_sneaky_incorrect", math.nan))
        self.helpful = self._ema(self.helpful, metrics.get("score_helpful_correct", math.nan))
        if not isinstance(self.stop, StopAtScoreParity) or self.seen < self.stop.min_steps:
            return False
        return self.sneaky is not None and self.helpful is not None and self.sneaky >= self.helpful

    def state(self) -> dict[str, Any]:
        return {"sneaky": self.sneaky, "helpful": self.helpful, "seen": self.seen}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.sneaky, self.helpful, self.seen = state["sneaky"], state["helpful"], state["seen"]

    def _ema(self, before: float | None, value: float) -> float | None:
        if not math.isfinite(value):
            return before
        return value if before is None else self.decay * before + (1 - self.decay) * value
