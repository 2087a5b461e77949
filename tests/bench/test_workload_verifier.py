"""The verifier workload: scoring cold and warm, and training on pairs, the same in every sample."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from bench_runs import load_profile, run_variant

from pvg.bench.planning import plan_bench
from pvg.bench.report import Variant
from pvg.bench.runner import run_plan
from pvg.bench.workloads import WORKLOADS
from pvg.bench.workloads.verifier import VerifierWork
from pvg.errors import ConfigurationError
from pvg.telemetry.spans import Tracer

pytestmark = pytest.mark.slow

SMALL = [
    "workload.solutions=64",
    "workload.steps=2",
    "workload.warm_passes=2",
    "verifier.pairs=16",
    "models.threads=1",
    "warmup=0",
    "repeats=1",
]


def measured(*overrides: str) -> Variant:
    settings = load_profile("verifier", [*SMALL, *overrides])
    variant, _ = asyncio.run(run_variant(lambda: WORKLOADS["verifier"](settings), warmup=0, repeats=1))
    return variant


def test_a_sample_scores_and_trains_and_leaves_nothing_behind(scratch: Path) -> None:
    variant = measured()
    assert variant.status == "ok", variant.reason
    assert variant.budget is not None
    wanted = {"reset", "score", "score_service", "open_store", "draw_pairs", "reference", "forward_backward"}
    assert wanted <= variant.budget.exposed.keys()
    assert variant.derived["cache_hit_rate"] == 1.0
    assert 0.1 < variant.derived["distinct"] < 1.0  # this prover does repeat itself
    assert 0.0 <= variant.derived["padding"] < 0.5
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("head", ["implicit"])
def test_every_sample_begins_with_the_same_verifier(head: str) -> None:
    async def run() -> list[str]:
        workload = WORKLOADS["verifier"](load_profile("verifier", [*SMALL, f"verifier.head={head}"]))
        assert isinstance(workload, VerifierWork)
        with Tracer().drive():
            await workload.open()
            try:
                versions = [workload._verifier.version()]
                for index in range(2):
                    await workload.sample(index)
                    versions.append(workload._verifier.version())
                return versions
            finally:
                await workload.close()

    start, first, second = asyncio.run(run())
    assert start != first  # it was trained
    assert first == second


@pytest.mark.drill
def test_all_rungs_of_the_ladder_do_the_same_work() -> None:
    plan = plan_bench("verifier", SMALL, ablate=True)
    report = run_plan(plan, command="test").report
    assert report.status == "ok", report.reason
    assert len(report.variants) == 1 + len(plan.base.profile.ladder)
    slow, *_, fast = report.variants
    assert (slow.derived["padding"], fast.derived["cache_hit_rate"]) == (pytest.approx(0.0, abs=0.1), 1.0)


@pytest.mark.parametrize(
    ("overrides", "message"), [(["workload.solutions=12"], "not a multiple of 8, the solutions per problem")]
)
def test_what_cannot_be_measured_is_refused_before_anything_is_opened(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        WORKLOADS["verifier"](load_profile("verifier", overrides))
