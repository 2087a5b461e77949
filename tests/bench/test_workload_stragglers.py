"""The stragglers workload: every variant orders the same rollouts, and what is counted is what was trained on."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from bench_runs import load_profile, run_variant

from benchmarks import stragglers
from benchmarks.stragglers import Stragglers, drawn_lengths
from pvg.bench.planning import plan_bench
from pvg.rollout.engine import GenerationRequest

TINY = (
    "workload.batches=2",
    "workload.median_s=0.002",
    "workload.train_s=0.004",
    "workload.longest=8",
    "task.problems=64",
    "task.test_problems=8",
)
SMALL = ("training.groups=4", "rollout.group_size=4")
# Groups of one, of which the first are the batch however late they come.
CUT_AT_ONCE = (
    "training.loss=spo",
    "training.groups=16",
    "rollout.group_size=1",
    "rollout.deadline=cut",
    "rollout.deadline.seconds=0.000001",
)


def ran(*overrides: str) -> tuple[Any, dict[str, Any]]:
    async def play() -> tuple[Any, dict[str, Any]]:
        return await run_variant(
            lambda: stragglers.make(load_profile("benchmarks/stragglers.toml", [*TINY, *overrides])),
            warmup=0,
            repeats=2,
        )

    variant, work = asyncio.run(play())
    assert variant.status == "ok"
    return variant, work


def test_without_a_deadline_every_rollout_is_waited_for() -> None:
    variant, work = ran(*SMALL)
    assert {"rollout", "credit", "forward_backward"} <= variant.budget.exposed.keys()
    assert variant.samples["batch_rollouts"].values == (16.0, 16.0)
    assert variant.samples["tokens_lost"].values == (0.0, 0.0)
    assert variant.derived["length_kept"] == pytest.approx(1.0)
    assert all(0.0 < value < 1.0 for value in variant.samples["trainer_idle"].values)
    assert work["rollouts_ordered"] == 16


def test_partial_rollouts_lose_no_token_and_go_on_from_sample_to_sample() -> None:
    variant, work = ran(
        *SMALL, "rollout.deadline=continue", "rollout.deadline.seconds=0.003", "rollout.max_staleness=99"
    )
    assert work["rollouts_ordered"] == 16
    assert variant.samples["tokens_lost"].values == (0.0, 0.0)
    assert all(2.0 <= value <= 16.0 and value % 2 == 0 for value in variant.samples["batch_rollouts"].values)
    assert all(value >= 0.0 for value in variant.samples["staleness"].values)
    assert variant.derived["staleness_max"] >= 1.0


def asked(samples: int, *overrides: str) -> list[dict[int, int]]:
    """What each sample asked its engine for: place in the order of all rollouts -> length."""

    async def play() -> list[dict[int, int]]:
        workload = stragglers.make(load_profile("benchmarks/stragglers.toml", [*TINY, *overrides]))
        assert isinstance(workload, Stragglers)
        await workload.open()
        engine, size = workload._engine, workload._experiment.rollout.group_size
        generate = engine.generate
        found: list[dict[int, int]] = []

        async def recorded(request: GenerationRequest) -> Any:
            _, group, index = request.id.rsplit("/", 2)
            found[-1][int(group) * size + int(index)] = engine._length(request)
            return await generate(request)

        engine.generate = recorded  # type: ignore[method-assign]
        for index in range(samples):
            found.append({})
            await workload.sample(index)
        return found

    return asyncio.run(play())


def test_each_sample_draws_its_lengths_anew_and_alike_in_all_variants() -> None:
    """Else all samples replay one tail, and their spread is that of the timer."""
    whole, first = asked(3, *SMALL), asked(3, *CUT_AT_ONCE)
    assert [sorted(sample) for sample in whole] == [list(range(32 * i, 32 * i + 32)) for i in range(3)]
    assert len({tuple(sample[place] for place in sorted(sample)) for sample in whole}) == 3
    assert first == whole


def test_the_profile_compares_variants_that_order_the_same() -> None:
    plan = plan_bench("benchmarks/stragglers.toml", list(TINY))
    assert [choice.label.partition("=")[0] for choice in plan.choices] == ["rollout.deadline"] * 5

    async def work_of(settings: Any) -> dict[str, Any]:
        workload = stragglers.make(settings)
        assert isinstance(workload, Stragglers)
        await workload.open()
        return workload.work()

    works = [asyncio.run(work_of(choice.settings)) for choice in plan.choices]
    assert all(work == works[0] for work in works)


def test_lengths_have_the_tail_that_was_asked_for() -> None:
    lengths = drawn_lengths(20_000, median=100, sigma=1.0, longest=3200, seed=0)
    assert 97 <= np.median(lengths) <= 103
    assert 260 <= np.quantile(lengths, 0.8413) <= 285  # one deviation above: e times the median
    assert lengths.max() <= 3200
    assert lengths.min() >= 1
    assert drawn_lengths(9, 100, 0.0, 3200, 1).tolist() == [100] * 9
    np.testing.assert_array_equal(drawn_lengths(50, 9, 1.0, 99, 3), drawn_lengths(50, 9, 1.0, 99, 3))
