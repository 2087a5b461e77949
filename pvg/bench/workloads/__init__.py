"""The table of workloads: what a profile's `profile` key may name.

Each lives in a module of its own, imported when it is asked for, with one function

    def make(settings: BenchSettings) -> Workload

that validates the `[workload]` table with the workload's own pydantic model (pvg.bench.profile.workload_settings) and
raises what is wrong with it. Making a workload is cheap and holds nothing; `Workload.open` loads and allocates.
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
    """The module's `make`, imported when it is called: most workloads need torch."""

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

# The workloads that can take their work from a recorded run (`--replay RUN`).
REPLAYING = frozenset({"rollout", "trainer"})

# The workloads that measure what vLLM servers do (`--server URL`, `--serve`).
SERVED = frozenset({"rollout", "sync", "e2e"})
