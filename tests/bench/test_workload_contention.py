"""The contention workload: steps beside busy processes, in a process with another number of threads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from bench_runs import load_profile, run_variant

from pvg.bench.planning import plan_bench
from pvg.bench.report import BenchReport
from pvg.bench.runner import run_plan
from pvg.bench.workloads import WORKLOADS, contention
from pvg.errors import ConfigurationError

SMALL = ["training.groups=1", "rollout.group_size=2", "rollout.max_tokens=8", "warmup=0", "repeats=1"]


@pytest.fixture(scope="module")
def report() -> Iterator[BenchReport]:
    """A sample of each variant of the profile, on a machine that says it has three cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contention, "usable_cores", lambda: 3)
        plan = plan_bench("contention", SMALL)
        assert plan.interleave
        yield run_plan(plan, command="test").report


@pytest.mark.drill
def test_the_profile_compares_one_thread_for_each_core_with_the_default_in_turn(report: BenchReport) -> None:
    assert report.status == "ok", report.reason
    assert [variant.label for variant in report.variants] == ["threads=cores", "threads=default", "cluster.kind=local"]
    assert [variant.derived["threads"] for variant in report.variants] == [3, 1, 1]  # 1: that of the embedded prover
    shares = [variant.derived.get("exchange_share", 0.0) for variant in report.variants]
    assert shares[:2] == [0.0, 0.0]  # they have no workers
    assert shares[2] > 0.0
    assert report.variants[2].derived["workers"] >= 1
    assert "by_variant" not in report.work  # both do the same
    assert not plan_bench("contention", SMALL, interleave=False).interleave


@pytest.mark.drill
def test_a_sample_is_the_same_steps_beside_no_one_and_two_busy_processes(report: BenchReport) -> None:
    assert (report.work["beside"], report.work["steps"], report.work["groups"]) == ([0, 1, 2], 1, 1)
    for variant in report.variants:
        samples = {name: found.values for name, found in variant.samples.items()}
        assert all(seconds > 0 for seconds in samples["step_s"])
        for busy in (1, 2):
            pairs = zip(samples["step_s"], samples[f"step_{busy}_s"], strict=True)
            assert samples[f"kept_{busy}"] == tuple(idle / beside for idle, beside in pairs)
        assert variant.budget is not None
        assert {"beside_0", "beside_1", "beside_2"} <= variant.budget.exposed.keys()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["models.threads=2"], "compares numbers of threads"),
        (["workload.steps=3", "training.minibatches=2"], "workload.steps = 3 ends within a batch"),
        (["workload.threads=many"], "workload.threads"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_opened(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        WORKLOADS["contention"](load_profile("contention", overrides))


@pytest.mark.drill
def test_what_the_child_cannot_play_fails_the_variant() -> None:
    # Room for a completion, but not for its prompt: known only when the problems are rendered.
    settings = load_profile("contention", [*SMALL, "training.micro_batch_tokens=12"])
    variant, _ = asyncio.run(run_variant(lambda: WORKLOADS["contention"](settings), warmup=0, repeats=1))
    assert variant.status == "failed"
    assert "training.micro_batch_tokens = 12 is too small" in variant.reason
