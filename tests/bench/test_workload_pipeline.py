"""The pipeline workload: real steps beside a child process, the same work in every variant, and nothing left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from bench_runs import load_profile, run_variant

from benchmarks import pipeline
from benchmarks.pipeline import DelayedAnswers, drawn_time
from benchmarks.stand_in import StandInEngine
from pvg.bench.planning import plan_bench
from pvg.config.load import build_experiment
from pvg.config.operation import LocalCluster
from pvg.errors import ConfigurationError
from pvg.records import VersionSpan
from pvg.rollout.engine import GenerationRequest, Sampling
from pvg.servers.publishing import WeightUpdate

TINY = (
    "workload.steps=2",
    "workload.fill=1",
    "training.groups=4",
    "rollout.group_size=4",
    "rollout.concurrency=8",
    "rollout.engine.max_rows=8",
    "rollout.max_tokens=32",
    "models.threads=1",
)


def ran(*overrides: str) -> tuple[Any, dict[str, Any]]:
    settings = load_profile("benchmarks/pipeline.toml", [*TINY, *overrides])
    variant, work = asyncio.run(run_variant(lambda: pipeline.make(settings), warmup=0, repeats=1))
    assert variant.status == "ok", variant.reason
    return variant, work


@pytest.mark.drill
def test_ahead_and_in_turns_the_work_is_the_same_and_nothing_is_left_behind(scratch: Path) -> None:
    synchronous, work = ran("rollout.prefetch=none")
    ahead, same_work = ran("rollout.prefetch=fresh")
    cluster = ("cluster.kind=local", "cluster.workers=2", "cluster.trainers=1")
    divided, work_of_workers = ran("rollout.prefetch=fresh", *cluster)
    assert work_of_workers == same_work == work
    assert synchronous.derived["staleness_max"] == synchronous.derived["dropped_share"] == 0.0
    assert 0.0 <= ahead.derived["staleness"] <= ahead.derived["staleness_max"] <= 2.0
    for variant in (synchronous, ahead, divided):
        samples = {name: found.values[0] for name, found in variant.samples.items()}
        assert samples["trainer_idle"] < 1.0
        assert samples["steps_per_hour"] == pytest.approx(3600 / samples["step_s"])
        assert 2 * samples["step_s"] < samples["wall_s"]
        assert {"forward_backward", "sync", "credit"} <= variant.budget.exposed.keys()
        assert "reference" in variant.budget.busy  # computed while the trainer waits
        assert variant.derived["trained_step_s"] > 0.0
        # By definition: what the same steps take synchronously, over the time that these took.
        idle = 1.0 - samples["useful_step_s"] / samples["step_s"]
        assert samples["trainer_idle"] == pytest.approx(idle)
    assert "wait_for_rollouts" in ahead.budget.exposed
    assert list(scratch.glob("pvg-*")) == []  # torch may make a folder there
    assert psutil.Process().children() == []  # no worker


def test_the_profiles_variants_are_valid() -> None:
    plan = plan_bench("benchmarks/pipeline.toml", [])
    experiments = [choice.settings.experiment for choice in plan.choices]
    assert [experiment.rollout.prefetch.batches for experiment in experiments] == [0, 1, 2, 1, 1, 1]
    local = [experiment.cluster for experiment in experiments if isinstance(experiment.cluster, LocalCluster)]
    assert local == [LocalCluster(workers=2), LocalCluster(workers=2, trainers=1)]
    assert all(choice.settings.experiment.rollout.concurrency == 64 for choice in plan.choices)


def test_the_engine_answers_in_its_own_time_and_with_the_versions_of_its_moments() -> None:
    async def work() -> None:
        answers = DelayedAnswers()
        engine = StandInEngine(4, answers)
        answers.serve(rollouts(), batches=2)
        quick = await engine.generate(request("000/train_prover/00003/00000/00"))  # batch 3 is batch 1 again
        assert (quick.token_ids.tolist(), quick.finish_reason) == ([4, 5, 6], "stop")
        assert quick.logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3])
        assert quick.spans == (VersionSpan(0, 0),)
        answers.pace(0.3, 0.0, 8)
        slow = asyncio.create_task(engine.generate(request("000/train_prover/00001/00000/00")))
        await asyncio.sleep(0.2)
        await engine.load_weights(WeightUpdate(7, {}, "trace"))
        completion = await slow
        assert [span.version for span in completion.spans] == [0, 7]
        assert completion.spans[1].start in (1, 2)
        assert completion.timing.service_s >= 0.3
        assert engine.stats.tokens == 6

    asyncio.run(work())


def request(id_: str) -> GenerationRequest:
    return GenerationRequest(id_, np.array([5], np.int32), Sampling(9, ()), 1)


def rollouts() -> list[Any]:
    ids, logprobs = np.array([4, 5, 6], np.int32), np.array([-0.1, -0.2, -0.3], np.float32)
    return [
        SimpleNamespace(id=f"x/00001/00000/0{i}", completion_ids=ids, logprobs=logprobs, finish_reason="stop")
        for i in range(2)
    ]


def test_latencies_have_the_tail_that_was_asked_for_and_belong_to_the_request() -> None:
    drawn = np.array([drawn_time(f"00000/00000/{i}", 1.0, 32) for i in range(20_000)])
    assert 0.97 <= np.median(drawn) <= 1.03
    assert 2.6 <= np.quantile(drawn, 0.8413) <= 2.85  # one deviation above: e times the median
    assert 16.0 < drawn.max() <= 32.0
    assert drawn_time("a", 1.0, 32) == drawn_time("a", 1.0, 32) != drawn_time("b", 1.0, 32)
    assert drawn_time("a", 0.0, 32) == 1.0


def test_what_cannot_be_measured_is_refused() -> None:
    settings = load_profile("benchmarks/pipeline.toml")
    with pytest.raises(ConfigurationError, match="steps of one batch each"):
        pipeline.make(replace(settings, experiment=build_experiment({"training": {"minibatches": 2}})))
