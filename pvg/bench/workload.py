"""`Workload`: the work that a benchmark profile repeats, the same every time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class BenchMetric:
    """What a metric of a benchmark is: its unit ("s", "tokens/s", "MB", "1" for a ratio), and which way is better."""

    unit: str
    better: Better
    meaning: str = ""


class Workload(Protocol):
    """One variant of one profile. The runner opens it, samples it (warm-up first), asks what it was, and closes it.

    All of it runs in the task that drives a `pvg.telemetry.spans.Tracer`: what lies under a `span` goes into the
    report's budget, and a sample is one step of it.
    """

    measures: Mapping[str, BenchMetric]  # of everything `sample` returns; the runner adds wall_s

    async def open(self) -> None: ...

    def work(self) -> Mapping[str, Any]:
        """What one sample does, as JSON data (models, counts, lengths, seeds): two reports can be compared only where
        it is equal. Not how it is done: batch sizes and switches do not belong here."""
        ...

    async def sample(self, index: int) -> Mapping[str, float]:
        """Do the work once and measure it: one value per measure. The same work for every index; where chance decides
        how long it takes, another draw for each index, which is the same in all variants."""
        ...

    def derived(self) -> Mapping[str, float]:
        """Figures that are no raw samples: shares, ratios, utilisation. Asked after the last sample."""
        ...

    async def close(self) -> None: ...
