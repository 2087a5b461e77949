"""The table of workloads, which a profile's `profile` key names.

Each workload has its own module, imported on demand, with one function

    def make(settings: BenchSettings) -> Workload

that validates the `[workload]` table with the workload's pydantic model (pvg.bench.profile.workload_settings) and
raises errors in it. `make` is cheap and allocates nothing; `Workload.open` loads and allocates.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pvg.bench.profile import BenchSettings
    from pvg.bench.workload import Workload

MakeWorkload = Callable[["BenchSettings"], "Workload"]
WorkloadTable = Mapping[str, MakeWorkload]


def _lazily(module: str) -> MakeWorkload:
    """The module's `make`, imported at the call, because most workloads need torch."""

    def make(settings: BenchSettings) -> Workload:
        found: Workload = importlib.import_module(f"{__name__}.{module}").make(settings)
        return found

    return make


WORKLOADS: WorkloadTable = {
    name: _lazily(name)
    for name in (
        "rollout",
        "trainer",
        "e2e",
        "verifier",
        "data",
        "credit",
        "sync",
        "loop",
        "telemetry",
        "stragglers",
        "pipeline",
        "scaling",
        "contention",
    )
}

# Workloads that can take their work from a recorded run (`--replay RUN`).
REPLAYING = frozenset({"rollout", "trainer"})

# Workloads that can run on vLLM servers (`--server URL`, `--serve`).
SERVED = frozenset({"rollout", "sync", "e2e"})
