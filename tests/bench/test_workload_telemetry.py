"""The telemetry workload: a step with spans and the same step without any."""

from __future__ import annotations

import pytest

from pvg.bench.planning import plan_bench
from pvg.bench.runner import run_plan

SMALL = [
    "training.groups=2",
    "rollout.group_size=4",
    "rollout.max_tokens=16",
    "models.threads=1",
    "workload.monitored_s=0",
    "warmup=0",
    "repeats=1",
]
OUTSIDE = {"reset", "step", "replay", "unaccounted"}  # all that the taker of the samples sees of a sample


@pytest.mark.parametrize("tracing", [True, False])
def test_steps_without_spans_have_none(tracing: bool) -> None:
    plan = plan_bench("benchmarks/telemetry.toml", [*SMALL, f"workload.tracing={str(tracing).lower()}"])
    result = run_plan(plan, command="test")
    (variant,) = result.report.variants
    assert variant.status == "ok", variant.reason
    assert variant.budget is not None
    assert variant.budget.exposed.keys() <= OUTSIDE
    assert (variant.derived["spans_per_step"] > 10) == tracing
    assert 0 < variant.samples["overhead"].values[0] < 0.5
