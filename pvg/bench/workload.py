"""`Workload`: the protocol of the repeatable work behind a benchmark profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class BenchMetric:
    """A metric of a benchmark: its unit ("s", "tokens/s", "MB", "1" for a ratio), and which direction is better."""

    unit: str
    better: Better
    meaning: str = ""


class Workload(Protocol):
    """One variant of one profile. The runner opens it, samples it (warm-up first), reads `work`, and closes it.

    It runs in the task that drives a `pvg.telemetry.spans.Tracer`: time in a `span` appears in the report's budget, and
    each sample is one step.
    """

    measures: Mapping[str, BenchMetric]  # of everything that `sample` returns; the runner adds wall_s

    async def open(self) -> None: ...

    def work(self) -> Mapping[str, Any]:
        """What one sample does, as JSON data (models, counts, lengths, seeds). Reports can be compared only if it is
        equal. How the work is done, such as batch sizes and switches, does not belong here."""
        ...

    async def sample(self, index: int) -> Mapping[str, float]:
        """Do the work once; returns one value per measure. The work is the same for every index. If its duration is
        random, each index has its own draw, which is the same in all variants."""
        ...

    def derived(self) -> Mapping[str, float]:
        """Figures that are not raw samples: shares, ratios, utilisation. Called after the last sample."""
        ...

    async def close(self) -> None: ...
