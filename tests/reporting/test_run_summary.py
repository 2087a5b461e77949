"""A run directory read back: finished, unfinished, torn, damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from run_samples import STEP_BUDGET, begin, commit, played, state, step, tell

from pvg.errors import ConfigurationError
from pvg.reporting.run_summary import read_run, unfinished_runs


def test_a_finished_run(tmp_path: Path) -> None:
    summary = read_run(played(tmp_path))
    assert (summary.name, summary.experiment, summary.status) == ("first", "modchain", "complete")
    assert summary.rounds == {0: {"helpful_accuracy": 0.875, "verifier_auc": 0.9}}
    assert [(p.phase, p.steps, p.finished) for p in summary.phases] == [("mint", 1, True), ("train_prover", 2, True)]
    assert summary.series("helpful_accuracy", "train_prover") == [0.5, 0.75]
    assert summary.series("fooled_rate") == [0.25]
    assert [alert.name for alert in summary.alerts] == ["collapse"]
    assert summary.notes == []


def test_time_is_what_the_phases_took_and_the_budget_closes(tmp_path: Path) -> None:
    summary = read_run(played(tmp_path))
    # The mint: 3 s by its own clock, 1 s of steps. The prover: 1.5 s by the clock of its last process, 2 s of steps.
    assert [phase.seconds for phase in summary.phases] == [3.0, pytest.approx(2.0)]
    assert summary.seconds == pytest.approx(5.0)
    assert summary.budget == pytest.approx({part: 3 * seconds for part, seconds in STEP_BUDGET.items()})
    assert list(summary.budget)[-1] == "unaccounted"


@pytest.mark.parametrize(
    ("between", "read", "note"),
    [
        (b"", [1.0], "The last line of metrics.jsonl is incomplete"),
        (b"{nonsense\n", [1.0], "line 2"),
        (b'{"hello": 1}\n{"kind": "step"}\n', [1.0, 2.0], "2 of the lines"),
    ],
)
def test_lines_that_cannot_be_read_are_left_out_and_noted(
    between: bytes, read: list[float], note: str, tmp_path: Path
) -> None:
    run = begin(tmp_path)
    tell(run, step("train_prover", 1, loss=1.0), step("train_prover", 2, loss=2.0))
    first, last = run.metrics.read_bytes().splitlines(keepends=True)
    written = first + between + (last if between else last[:-7])
    run.metrics.write_bytes(written)
    summary = read_run(run)
    assert summary.series("loss") == read
    assert any(note in found for found in summary.notes)
    assert run.metrics.read_bytes() == written


def test_a_step_told_twice_counts_once_with_its_last_values(tmp_path: Path) -> None:
    run = begin(tmp_path)
    tell(run, *(step("train_prover", number, loss=float(10 + number)) for number in (1, 2, 3)))
    tell(run, *(step("train_prover", number, loss=float(number)) for number in (2, 3, 4)))
    summary = read_run(run)
    assert summary.series("loss") == [11.0, 2.0, 3.0, 4.0]
    assert summary.phases[0].steps == 4


def test_a_phase_without_its_end_is_unfinished(tmp_path: Path) -> None:
    run = begin(tmp_path)
    tell(run, step("train_prover", 1, loss=1.0))
    commit(run, state("train_prover", step=1))
    summary = read_run(run)
    assert summary.status == "unfinished"
    assert [(p.finished, p.seconds) for p in summary.phases] == [(False, pytest.approx(1.0))]


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    summary = read_run(begin(tmp_path))
    assert (summary.status, summary.rounds, summary.steps, summary.seconds) == ("empty", {}, [], 0)


def test_a_damaged_state_is_noted_and_the_metrics_still_shown(tmp_path: Path) -> None:
    run = played(tmp_path)
    run.state.write_bytes(b"{half")
    summary = read_run(run)
    assert summary.rounds[0]["helpful_accuracy"] == 0.875
    assert any("state.json" in note for note in summary.notes)


def test_a_damaged_experiment_is_an_error(tmp_path: Path) -> None:
    run = played(tmp_path)
    run.experiment_file.write_text("seed = ")
    with pytest.raises(ConfigurationError, match="valid TOML"):
        read_run(run)


def test_unfinished_runs_come_newest_first_and_of_their_experiment(tmp_path: Path) -> None:
    played(tmp_path, "done")
    for age, (name, experiment, phase) in enumerate(
        [("newest", "modchain", "mint"), ("other", "gsm", "mint"), ("older", "modchain", "checkpoint")]
    ):
        run = begin(tmp_path, name, name=experiment)
        commit(run, state(phase))
        os.utime(run.state, (1e9 - age, 1e9 - age))
    samples = begin(tmp_path, "samples")
    commit(samples, state("init", shards=[{"path": "x", "rows": 1, "bytes": 1, "checksum": ""}]))
    assert [run.name for run in unfinished_runs(tmp_path, "modchain")] == ["newest", "older"]
    assert [run.name for run in unfinished_runs(tmp_path)] == ["newest", "other", "older"]
    assert unfinished_runs(tmp_path / "nowhere") == []


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        commit(begin(tmp_path, name), state("mint"))
    (tmp_path / "bad" / "state.json").write_bytes(b"")
    (tmp_path / "bad" / "state.previous.json").unlink(missing_ok=True)
    assert [run.name for run in unfinished_runs(tmp_path)] == ["good"]
