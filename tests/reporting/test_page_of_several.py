"""Several runs beside each other: overlaid curves, differing settings, final metrics with their differences."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_checks import check
from run_samples import begin, commit, played, state, step, tell

from pvg.config.training import Training
from pvg.reporting.run_page import (
    compared_runs,
    distinct_names,
    final_metrics,
    final_names,
    setting_differences,
    several_page,
)
from pvg.reporting.run_summary import read_run
from pvg.store.run_directory import RunDirectory

ENDS = {"helpful_accuracy_low": 0.41, "helpful_accuracy_high": 0.77}


def other(root: Path, name: str = "other") -> RunDirectory:
    """Two rounds, other settings."""
    run = begin(root, name, seed=7, training=Training(learning_rate=0.5))
    for round_ in range(2):
        tell(
            run,
            *(
                step("train_prover", n, round_=round_, helpful_accuracy=0.1 * n, tokens_per_s=10.0 * n)
                for n in (1, 2, 3)
            ),
            {"kind": "round", "round": round_, "metrics": {"helpful_accuracy": 0.5 + round_ / 10, **ENDS}},
        )
    commit(run, state("complete"))
    return run


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    runs = [played(tmp_path), other(tmp_path)]
    page = check(several_page(compared_runs(runs)))
    assert {"rounds", "learning", "final", "settings"} <= page.anchors()
    assert "2 runs" in page.text
    assert "helpful accuracy 87.5 % 60.0 % -27.5 pp 41.0 to 77.0 %" in page.text
    assert "training.learning_rate 0.0001 0.5" in page.text
    assert "(first: 0, other: 1)" in page.text
    assert {line["name"] for chart in page.charts for line in chart["series"]} == {"first", "other"}


def test_a_step_stands_at_the_same_place_in_every_run(tmp_path: Path) -> None:
    """Round 1 begins for all runs behind the longest round 0."""
    runs = [other(tmp_path, "a"), begin(tmp_path, "b")]
    tell(
        runs[1], step("train_prover", 5, helpful_accuracy=0.9), step("train_prover", 1, round_=1, helpful_accuracy=0.9)
    )
    page = check(several_page(compared_runs(runs)))
    (chart,) = [one for one in page.charts if one["x"]["bands"] and one["series"][0]["y"][0] == 0.1]
    places = {line["name"]: [x for x, y in zip(line["x"], line["y"], strict=True) if y] for line in chart["series"]}
    assert places == {"a": [1, 2, 3, 6, 7, 8], "b": [5, 6]}


def test_only_settings_in_which_two_runs_differ() -> None:
    plains: list[dict[str, object]] = [
        {"a": {"x": 1, "y": 2}, "b": "s"},
        {"a": {"x": 1, "y": 3}},
        {"a": {"x": 1, "y": 2}},
    ]
    assert setting_differences(plains) == {"a.y": ["2", "3", "2"], "b": ['"s"', "unset", "unset"]}


def test_final_metrics_are_those_of_the_last_round_and_medians_of_rates(tmp_path: Path) -> None:
    final = final_metrics(read_run(other(tmp_path)))
    assert final["helpful_accuracy"] == pytest.approx(0.6)
    assert final["tokens_per_s"] == pytest.approx(20.0)
    assert final["prover_step_s"] == pytest.approx(1.0)
    assert final_names(
        [{"zebra": 1.0, "tokens_per_s": 1.0}, {"helpful_accuracy": 1.0, "base_helpful_accuracy": 1.0, **ENDS}]
    ) == ["helpful_accuracy", "tokens_per_s", "zebra"]


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    runs = [begin(tmp_path / "x", "same"), begin(tmp_path / "y", "same"), begin(tmp_path, "own")]
    assert distinct_names(runs) == [str(runs[0].path), str(runs[1].path), "own"]


def test_runs_that_have_not_begun(tmp_path: Path) -> None:
    runs = [begin(tmp_path, "a"), begin(tmp_path, "b")]
    page = check(several_page(compared_runs(runs)))
    assert "All settings are the same." in page.text
