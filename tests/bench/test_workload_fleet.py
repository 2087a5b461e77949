"""The fleet workload: stub workers in other processes serve pvg's own pool, engine and dispatcher."""

from __future__ import annotations

import asyncio

import pytest
from bench_runs import load_profile, run_variant

from benchmarks import fleet
from pvg.bench.planning import plan_bench
from pvg.errors import ConfigurationError

TINY = ("workload.rollouts=8", "workload.seconds=0.2", "task.problems=64", "task.test_problems=8")


def made(*overrides: str):
    return fleet.make(load_profile("benchmarks/fleet.toml", [*TINY, *overrides]))


def test_every_worker_completes_its_rollouts_in_every_sample() -> None:
    async def play():
        return await run_variant(lambda: made("workload.workers=6"), warmup=0, repeats=2)

    variant, work = asyncio.run(asyncio.wait_for(play(), 120))
    assert variant.status == "ok"
    assert work["workers"] == 6
    assert variant.derived["rollouts"] == 48.0
    assert {"sync", "rollout"} <= variant.budget.exposed.keys()
    assert all(value > 0.0 for value in variant.samples["driver_us"].values)
    # They take at least `seconds`, in which each worker answers several times.
    assert all(value <= 48 / 0.2 for value in variant.samples["rollouts_per_s"].values)


def test_what_the_workload_cannot_measure_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is not a multiple of"):
        made("workload.rollouts=9")
    with pytest.raises(ConfigurationError, match="modchain's alphabet"):
        made("task.kind=gsm8k")


def test_the_sweep_is_over_the_number_of_workers() -> None:
    plan = plan_bench("benchmarks/fleet.toml", [])
    assert [choice.label for choice in plan.choices] == [f"workload.workers={count}" for count in (10, 100, 1000)]
