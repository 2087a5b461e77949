"""`--tune`: what is measured, what is chosen, and the file that it is written to."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from made_reports import higher, lower, made_report, variant
from tiny_workload import PROFILE, TinyWorkload, write_profile

from pvg.bench.profile import TuningRange
from pvg.bench.report import BenchReport, Samples
from pvg.bench.tuning import choose, tune
from pvg.config.load import find_experiment, load_experiment
from pvg.errors import PvgError, UsageError

ENTRY = TuningRange(key="rollout.engine.max_rows", values=(8, 16, 32))
TUNED = f"""{PROFILE}
[[tune]]
key = "rollout.engine.max_rows"
values = [8, 16]

[[tune]]
key = "training.groups"
values = [2, 4]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_profile(tmp_path, TUNED)
    write_profile(tmp_path, PROFILE.replace('name = "tiny"', 'name = "bare"'), "bare")
    return tmp_path


def swept(measured: dict[int, Samples], name: str = "tokens_per_s") -> BenchReport:
    """A sweep of rollout.engine.max_rows that measured this."""
    variants = [
        variant({name: samples}, f"rollout.engine.max_rows={rows}").model_copy(
            update={"overrides": {"rollout.engine.max_rows": rows}}
        )
        for rows, samples in measured.items()
    ]
    config = {"profile": {"headline": name}, "experiment": {}}
    return made_report(*variants, config=config)


@pytest.mark.parametrize(
    ("values", "chosen"),
    [
        ([100.0, 200.0, 150.0], 16),
        ([199.0, 200.0, 150.0], 8),  # within 2 % of the best: the smaller one costs less memory
        ([195.0, 200.0, 203.0], 16),
        ([100.0, 150.0, 200.0], 32),
    ],
)
def test_the_smallest_value_that_is_as_good_as_the_best_is_chosen(values: Sequence[float], chosen: int) -> None:
    rates = dict(zip(ENTRY.values, ([value] * 3 for value in values), strict=True))
    assert choose(swept({rows: higher(found) for rows, found in rates.items()}), ENTRY) == chosen
    seconds = {rows: lower([1.0 / value for value in found]) for rows, found in rates.items()}
    assert choose(swept(seconds, "wall_s"), ENTRY) == chosen


def test_values_that_failed_are_passed_over_and_nothing_left_is_an_error() -> None:
    report = swept({8: higher([100.0] * 3), 16: higher([200.0] * 3)})
    gone = [
        v.model_copy(update={"status": "failed", "reason": "out of memory", "samples": {}}) for v in report.variants
    ]
    one = report.model_copy(update={"variants": (report.variants[0], gone[1])})
    assert choose(one, ENTRY) == 8
    with pytest.raises(PvgError, match=r"No value of rollout\.engine\.max_rows could be measured: out of memory"):
        choose(report.model_copy(update={"variants": tuple(gone)}), ENTRY)


def test_each_setting_is_measured_beside_those_chosen_before_it_and_the_file_sets_them(folder: Path) -> None:
    table = {"tiny": TinyWorkload}
    tuned = tune("tiny", ["repeats=2"], command="pvg bench --profile tiny --tune", table=table)
    (first, rows), (second, groups) = tuned.choices
    assert (first, second) == ("rollout.engine.max_rows", "training.groups")
    assert rows in (8, 16)
    assert groups in (2, 4)
    assert [v.overrides for v in tuned.reports[0].variants] == [{"rollout.engine.max_rows": n} for n in (8, 16)]
    assert tuned.reports[1].config["experiment"]["rollout"]["engine"]["max_rows"] == rows
    text = tuned.to_toml()
    assert tomllib.loads(text) == {"rollout": {"engine": {"max_rows": rows}}, "training": {"groups": groups}}
    assert "# Made by pvg bench --profile tiny --tune" in text
    assert text.count("numbers/s (") == 4
    (folder / "tuned.toml").write_text(text)
    experiment = load_experiment(find_experiment("modchain"), ["training.groups=7", "@tuned.toml"])
    assert (experiment.rollout.engine.max_rows, experiment.training.groups) == (rows, groups)


def test_a_setting_that_is_given_is_not_tuned() -> None:
    table = {"tiny": TinyWorkload}
    tuned = tune("tiny", ["repeats=2", "training.groups=4"], command="x", table=table)
    assert [key for key, _ in tuned.choices] == ["rollout.engine.max_rows"]


@pytest.mark.parametrize("name", ["tiny", "bare"])
def test_nothing_to_tune_is_said(name: str) -> None:
    with pytest.raises(UsageError, match="has no settings to tune") as caught:
        tune(name, ["training.groups=4", "rollout.engine.max_rows=8"], command="x")
    assert "--sweep" in caught.value.remedy
