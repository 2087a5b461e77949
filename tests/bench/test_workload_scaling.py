"""The scaling workload: steps of fixed lengths with models of a given size, and work that follows from the sizes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_runs import load_profile

from benchmarks.scaling import COMPUTED, PARTS, REST, PeakMemory, decode_reads, step_work
from pvg.bench.planning import plan_bench
from pvg.bench.runner import run_plan
from pvg.bench.workloads import make_workload
from pvg.bench.workloads.trainer import ModelSize
from pvg.config.load import build_experiment
from pvg.errors import ConfigurationError
from pvg.telemetry.spans import Tracer

SMALL = ["rollout.group_size=4", "models.threads=1", "workload.width=32", "workload.layers=1", "warmup=0", "repeats=1"]
PROFILES = [f"benchmarks/scaling-{axis}.toml" for axis in ("rollouts", "length", "model")]


def test_a_sample_is_a_step_of_known_work_and_leaves_nothing_behind(scratch: Path) -> None:
    overrides = [*SMALL, "training.groups=2", "rollout.max_tokens=5"]
    report = run_plan(plan_bench("benchmarks/scaling-rollouts.toml", overrides), command="test").report
    assert report.status == "ok", report.reason
    (variant,) = report.variants
    measured = {name: samples.values[0] for name, samples in variant.samples.items()}
    parts = [measured[f"{part}_s"] for part in (*PARTS, REST)]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(measured["step_s"])
    assert measured["peak_memory_mb"] > 50
    found = variant.derived
    assert (found["rollouts"], found["completion_tokens"], found["tokens"]) == (8, 5, 8 * (11 + 5))
    assert found["prover_parameters"] == 19 * 32 + 10 * 32**2 + 3 * 32  # embeddings, one layer, its and the last norm
    assert found["zero_signal"] == 0.0  # of random tokens too: rewards differ within every group
    assert found["truncated"] == 1.0
    assert found["flops"] == sum(found[f"work_{part}"] for part in COMPUTED)
    assert report.work["verifier"] == report.work["prover"] == "random-llama-32x1"
    assert list(scratch.iterdir()) == []


def test_every_sample_and_every_opening_is_the_same() -> None:
    async def tokens() -> list[Any]:
        settings = load_profile("benchmarks/scaling-length.toml", [*SMALL, "training.groups=2", "rollout.max_tokens=6"])
        found = []
        for _ in range(2):
            workload: Any = make_workload(settings)
            with Tracer().drive():
                await workload.open()
                for index in range(2):
                    await workload.sample(index)
                    found.append(workload._learner.fingerprint())
                await workload.close()
        return found

    weights = asyncio.run(tokens())
    assert len(set(weights)) == 1


def test_the_work_by_hand() -> None:
    """2 groups of 3 rollouts, prompts of 4 tokens, completions of 5, the verifier reads 10 tokens twice."""
    size = ModelSize(body=1000, head=10, attention=7)
    work = step_work(
        size, groups=2, rollouts=6, prompt=4.0, completion=5, judged=10, judgements=2, parameters=1010
    )  # fmt: skip
    assert work["prefill"] == 2000 * 2 * 3 + 28 * 2 * 3**2
    looked_at = sum(4 + before for before in range(5))  # the first step looks at 4 of the prompt, itself included
    assert work["decode"] == 6 * (2000 * 5 + 20 * 5 + 28 * looked_at)
    assert decode_reads(size, steps=5, rollouts=6, prompt=4.0, completion=5, parameters=1010) == (
        5 * 1010 + 6 * 2 * 7 * looked_at
    )
    trained = 2000 * (2 * 4 + 6 * 4) + 20 * 30 + 28 * (2 * 16 + 30 * 9)
    assert (work["reference"], work["forward_backward"]) == (trained, 3 * trained)
    assert work["score"] == 2 * (2000 * 60 + 20 * 30 + 28 * 6 * 100)
    assert (work["dispatch"], work["rest"]) == (30, 30)
    assert (work["optimizer"], work["sync"]) == (1010, 1010)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_makes_its_axis_larger_over_at_least_the_sixteenfold(profile: str) -> None:
    plan = plan_bench(profile)
    assert (plan.kind, plan.interleave) == ("sweep", False)
    assert len(plan.choices) == 5

    def size(settings: Any) -> float:
        rollout, training, own = settings.experiment.rollout, settings.experiment.training, settings.workload
        return {
            "rollouts": training.groups * rollout.group_size,
            "completion_tokens": rollout.max_tokens,
            "prover_parameters": own.get("layers", 3) * own.get("width", 128) ** 2,
        }[own["axis"]]

    sizes = [size(choice.settings) for choice in plan.choices]
    assert sizes == sorted(sizes)
    assert sizes[-1] / sizes[0] >= 16


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workload.width=48", "not a multiple of 32"),
        ("workload.axis=speed", "workload.axis"),
    ],
)
def test_what_cannot_be_measured_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_workload(load_profile("benchmarks/scaling-model.toml", [override]))


def test_a_task_of_another_alphabet_is_refused() -> None:
    settings = load_profile("benchmarks/scaling-model.toml")
    other = build_experiment({"task": {"kind": "gsm8k", "path": "elsewhere"}})
    with pytest.raises(ConfigurationError, match=r"not that of task\.kind"):
        make_workload(replace(settings, experiment=other))


def test_peak_memory_counts_what_is_gone_at_the_end() -> None:
    with PeakMemory() as before:
        pass
    with PeakMemory() as peak:
        held = np.ones(25_000_000)  # 200 MB
        held.sum()
        peak._look()  # whatever the thread had time for
        del held
    assert peak.megabytes - before.megabytes > 150
