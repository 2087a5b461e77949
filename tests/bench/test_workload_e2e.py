"""The e2e workload: whole steps of the real game, the same in every sample, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from bench_runs import load_profile, run_variant

from pvg.bench.planning import plan_bench
from pvg.bench.runner import run_plan
from pvg.bench.workloads import WORKLOADS
from pvg.bench.workloads.e2e import EndToEnd
from pvg.errors import ConfigurationError
from pvg.telemetry.spans import Tracer

pytestmark = pytest.mark.slow

T = TypeVar("T")

PARTS = {"reset", "sync", "prefill", "decode", "grade", "score_service", "credit", "reference", "pack"}
SMALL = ["training.groups=4", "rollout.group_size=4", "rollout.max_tokens=32", "models.threads=1", "warmup=0"]


def opened(overrides: list[str], use: Callable[[EndToEnd], Awaitable[T]]) -> T:
    """Run `use(workload)` on an open workload."""

    async def run() -> T:
        workload = WORKLOADS["e2e"](load_profile("e2e", overrides))
        assert isinstance(workload, EndToEnd)
        with Tracer().drive():
            await workload.open()
            try:
                return await use(workload)
            finally:
                await workload.close()

    return asyncio.run(run())


def tokens_of(sample: dict[str, float]) -> float:
    """Completion tokens per step, from the two rates."""
    return sample["tokens_per_s"] * sample["step_s"]


def test_a_sample_is_whole_steps_and_leaves_nothing_behind(scratch: Path) -> None:
    settings = load_profile("e2e", [*SMALL, "repeats=2"])
    variant, work = asyncio.run(run_variant(lambda: WORKLOADS["e2e"](settings), warmup=0, repeats=2))
    assert variant.status == "ok", variant.reason
    assert variant.budget is not None
    assert variant.budget.exposed.keys() >= PARTS
    rates = variant.samples
    for step_s, per_hour, rollouts_per_s in zip(
        rates["step_s"].values, rates["steps_per_hour"].values, rates["rollouts_per_s"].values, strict=True
    ):
        assert per_hour == pytest.approx(3600 / step_s)
        assert rollouts_per_s == pytest.approx(16 / step_s)
    assert all(step_s < wall_s for step_s, wall_s in zip(rates["step_s"].values, rates["wall_s"].values, strict=True))
    assert 0 < variant.derived["trainer_idle_share"] < 1
    assert 8 < variant.derived["engine_batch"] <= 16
    assert work["groups"] == 4
    assert list(scratch.iterdir()) == []


def test_every_sample_is_the_same_from_the_start() -> None:
    async def use(workload: EndToEnd) -> tuple[list[str], list[float], str]:
        weights, tokens = [], []
        for index in range(3):
            tokens.append(tokens_of(await workload.sample(index)))
            weights.append(workload._learner.fingerprint())
        return weights, tokens, workload._session.players.base.fingerprint()

    weights, tokens, base = opened([*SMALL, "workload.steps=2"], use)
    assert len(set(weights)) == 1
    assert weights[0] != base  # it was trained
    assert tokens == pytest.approx([tokens[0]] * 3)
    assert tokens[0] > 16  # a token a rollout at least


@pytest.mark.drill
def test_all_rungs_of_the_ladder_do_the_same_work() -> None:
    plan = plan_bench("e2e", [*SMALL, "repeats=1", "rollout.concurrency=256"], ablate=True)
    report = run_plan(plan, command="test").report
    assert report.status == "ok", report.reason
    rungs = len(plan.base.profile.ladder)
    assert len(report.variants) == 1 + rungs
    tokens = [variant.derived["completion_tokens"] for variant in report.variants]
    assert tokens == pytest.approx([tokens[0]] * (1 + rungs), rel=0.01)  # up to floating-point ties
    slow, *_, fast = report.variants
    assert slow.budget is not None
    assert fast.budget is not None
    assert "recompute" in slow.budget.exposed
    assert "recompute" not in fast.budget.exposed
    assert slow.derived["engine_batch"] <= 8 < fast.derived["engine_batch"] <= 16


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["workload.steps=3", "training.minibatches=2"], "workload.steps = 3 ends within a batch"),
        (["game.stop=judge_decay"], "may end a sample early"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_opened(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        WORKLOADS["e2e"](load_profile("e2e", overrides))


def test_a_workload_that_cannot_open_fails_and_cleans_up(scratch: Path) -> None:
    # Room for a completion, but not for its prompt: known only when the problems are rendered.
    settings = load_profile("e2e", [*SMALL, "training.micro_batch_tokens=34"])
    variant, _ = asyncio.run(run_variant(lambda: WORKLOADS["e2e"](settings), warmup=0, repeats=1))
    assert variant.status == "failed"
    assert "training.micro_batch_tokens = 34 is too small" in variant.reason
    assert list(scratch.iterdir()) == []
