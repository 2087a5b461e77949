"""The runner: what is sampled, what fails, and what surfaces."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from bench_runs import load_profile, run_variant
from tiny_workload import TinyWorkload, write_profile

from pvg.bench.runner import SampleTaken, VariantTrial, run_trials


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_profile(tmp_path)
    return tmp_path


def tiny(log: list[str], *overrides: str) -> TinyWorkload:
    return TinyWorkload(load_profile("tiny", overrides), log)


def test_a_variant_has_every_sample_but_the_warm_up_and_closes() -> None:
    log: list[str] = []
    taken: list[SampleTaken] = []
    variant, work = asyncio.run(
        run_variant(lambda: tiny(log), warmup=2, repeats=4, label="a", overrides={"k": 1}, on_sample=taken.append)
    )
    assert log == [
        "open quicksort/128",
        *(f"sample quicksort/128 {index}" for index in range(6)),
        "close quicksort/128",
    ]
    assert (variant.status, variant.label, variant.overrides) == ("ok", "a", {"k": 1})
    assert work == {"numbers": 2000, "seed": 0}
    assert set(variant.samples) == {"wall_s", "numbers_per_s", "sort_s"}
    assert {len(samples.values) for samples in variant.samples.values()} == {4}
    assert (variant.samples["sort_s"].unit, variant.samples["numbers_per_s"].better) == ("s", "higher")
    assert [(sample.number, sample.of, sample.warmup) for sample in taken] == [
        (1, 6, True), (2, 6, True), (3, 6, False), (4, 6, False), (5, 6, False), (6, 6, False),
    ]  # fmt: skip
    assert variant.samples["wall_s"].values == tuple(sample.wall_s for sample in taken[2:])
    budget = variant.budget  # that of the kept samples
    assert budget is not None
    assert budget.steps == 4
    assert budget.wall_s == pytest.approx(sum(variant.samples["wall_s"].values))
    assert sum(budget.exposed.values()) == pytest.approx(budget.wall_s)
    assert {"sort", "inner", "unaccounted"} <= budget.exposed.keys()
    *parts, _ = budget.exposed.values()  # what no part names is last, however much it is
    assert parts == sorted(parts, reverse=True)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("open", "There is nothing to open. Bring it."),
        ("close", "There is nothing to close. Bring it."),
        ("not_finite", "Measured a value that is not finite: numbers_per_s = nan."),
        ("derived", "Measured a value that is not finite: share = inf."),
    ],
)
def test_what_fails_has_a_reason_and_no_metrics(fault: str, reason: str) -> None:
    log: list[str] = []
    variant, work = asyncio.run(run_variant(lambda: tiny(log, f"workload.fault={fault}"), warmup=1, repeats=3))
    assert (variant.status, variant.reason) == ("failed", reason)
    assert (variant.samples, variant.budget, variant.derived, work) == ({}, None, {}, {})
    assert ("close quicksort/128" in log) == (fault != "open")


@pytest.mark.parametrize(("fault", "kind"), [("defect", KeyError), ("missing", ValueError)])
def test_a_defect_surfaces_and_everything_is_closed(fault: str, kind: type[Exception]) -> None:
    log: list[str] = []
    with pytest.raises(kind):
        asyncio.run(run_variant(lambda: tiny(log, f"workload.fault={fault}"), warmup=0, repeats=4))
    assert log[-1] == "close quicksort/128"


def test_samples_in_turn_go_forth_and_back_and_a_failed_variant_leaves_the_others_alone() -> None:
    log: list[str] = []
    trials = [
        VariantTrial(lambda: tiny(log), warmup=1, repeats=3, label="a"),
        VariantTrial(
            lambda: tiny(log, "workload.kind=stable", "workload.fault=sample"), warmup=1, repeats=3, label="b"
        ),
        VariantTrial(lambda: tiny(log, "rollout.engine.max_rows=8"), warmup=1, repeats=3, label="c"),
    ]
    asyncio.run(run_trials(trials))
    a, b, c = "quicksort/128", "stable/128", "quicksort/8"
    assert log == [
        *(f"open {name}" for name in (a, b, c)),
        *(f"sample {name} 0" for name in (a, b, c)),
        *(f"sample {name} 1" for name in (c, b, a)),
        *(f"sample {name} 2" for name in (a, b, c)),
        *(f"sample {name} 3" for name in (c, a)),
        *(f"close {name}" for name in (c, b, a)),
    ]
    results = [trial.result()[0] for trial in trials]
    assert [variant.status for variant in results] == ["ok", "failed", "ok"]
    # The time of the others' samples belongs to no variant: its wall time is its own steps' alone.
    for variant in (results[0], results[2]):
        assert variant.budget is not None
        assert variant.budget.wall_s == pytest.approx(sum(variant.samples["wall_s"].values))


def test_cancelled_work_is_closed_and_leaves_no_variant() -> None:
    log: list[str] = []

    async def cancelled() -> None:
        async with asyncio.timeout(0.1):
            await run_variant(lambda: tiny(log, "workload.fault=wait"), warmup=0, repeats=1)

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    assert log == ["open quicksort/128", "sample quicksort/128 0", "close quicksort/128"]
