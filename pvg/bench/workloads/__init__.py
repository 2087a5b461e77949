"""`Workload`, the protocol of the work behind a benchmark profile, and the table of workloads.

A profile names one of pvg's workloads, or one in a user's file:

    workload = make_workload(settings)      # settings.profile.profile: "rollout", or "benchmarks/loop.py:make"

Each of pvg's workloads has its own module, imported on demand, with one function

    def make(settings: BenchSettings) -> Workload

that validates the `[workload]` table with the workload's pydantic model (pvg.bench.profile.workload_settings) and
raises errors in it. `make` is cheap and allocates nothing; `Workload.open` loads and allocates. A user's file has such
a function too. Its path is relative to the working directory, and it can import modules from there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pvg.errors import ConfigurationError
from pvg.extensions import called, is_reference, load

if TYPE_CHECKING:
    from pvg.bench.profile import BenchSettings

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


WALL = "wall_s"
WALL_MEASURE = BenchMetric("s", "lower", "wall time of one sample")


# --- the table of workloads -------------------------------------------------------------------------------------------

MakeWorkload = Callable[["BenchSettings"], "Workload"]
WorkloadTable = Mapping[str, MakeWorkload]
MEMBERS = ("measures", "open", "work", "sample", "derived", "close")  # of a Workload


def _lazily(module: str) -> MakeWorkload:
    """The module's `make`, imported at the call, because most workloads need torch."""

    def make(settings: BenchSettings) -> Workload:
        found: Workload = importlib.import_module(f"{__name__}.{module}").make(settings)
        return found

    return make


WORKLOADS: WorkloadTable = {name: _lazily(name) for name in ("rollout", "trainer", "e2e", "verifier", "sync")}

# Workloads that can run on vLLM servers (`--server URL`, `--serve`).
SERVED = frozenset({"rollout", "sync", "e2e"})


def make_workload(settings: BenchSettings, table: WorkloadTable = WORKLOADS) -> Workload:
    """The workload that the profile names. Raises ConfigurationError if a user's file does not make one."""
    name = settings.profile.profile
    if not is_reference(name):
        return table[name](settings)
    with _importing_from_here():
        found: Workload = called("profile", name, load("profile", name), settings)
    if missing := [member for member in MEMBERS if not hasattr(found, member)]:
        raise ConfigurationError(
            f"profile = {name!r} made a {type(found).__name__} without {', '.join(missing)}.",
            "It must return a Workload (pvg/bench/workloads/__init__.py).",
        )
    return found


@contextmanager
def _importing_from_here() -> Iterator[None]:
    """Modules in the working directory can be imported, as with `python -m`."""
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)
