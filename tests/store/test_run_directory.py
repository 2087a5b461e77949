"""The run directory: creating, finding and driving it alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pvg.errors import UsageError
from pvg.experiment import Experiment
from pvg.store import RunDirectory, runs_in

EXPERIMENT = Experiment(name="tiny", seed=3)


def test_create_writes_the_experiment_it_reads_back(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs", "first", EXPERIMENT)
    assert run.name == "first"
    assert run.experiment() == EXPERIMENT
    for folder in (run.manifest, run.rollouts, run.checkpoints, run.weights):
        assert folder.is_dir()
        assert folder.parent == run.path
    assert run.state == run.path / "state.json"
    assert (run.metrics.name, run.spans.name, run.events.name) == ("metrics.jsonl", "spans.jsonl", "events.log")


def test_an_existing_run_is_refused_with_two_ways_on(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first", EXPERIMENT)
    before = run.experiment_file.read_bytes()
    with pytest.raises(UsageError, match="already exists") as caught:
        RunDirectory.create(tmp_path, "first", Experiment(seed=9))
    assert "--resume" in caught.value.remedy
    assert "another name" in caught.value.remedy
    assert run.experiment_file.read_bytes() == before


def test_a_folder_left_by_a_kill_during_creation_is_completed(tmp_path: Path) -> None:
    (tmp_path / "first" / "manifest").mkdir(parents=True)
    (tmp_path / "first" / "lock").touch()
    (tmp_path / "first" / ".tmp-experiment.toml-0a1b2c3d").write_bytes(b"half")
    assert RunDirectory.create(tmp_path, "first", EXPERIMENT).experiment() == EXPERIMENT


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"is not a run: it holds thesis\.tex"):
        RunDirectory.create(tmp_path, "first", EXPERIMENT)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        RunDirectory.create(tmp_path, "file", EXPERIMENT)


@pytest.mark.parametrize("name", ["", "..", "a/b", ".tmp-x", "-x", "a b"])
def test_names_that_are_no_folder_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a run"):
        RunDirectory.create(tmp_path, name, EXPERIMENT)
    assert list(tmp_path.iterdir()) == []


def test_open_by_name_and_by_path(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first", EXPERIMENT)
    for given in ("first", run.path, str(run.path)):
        assert RunDirectory.open(given, tmp_path).path.samefile(run.path)
    assert RunDirectory.open(run.path, tmp_path / "elsewhere").path.samefile(run.path)


def test_a_missing_run_is_answered_with_the_nearest_one(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, "modchain-7", EXPERIMENT)
    RunDirectory.create(tmp_path, "gsm8k", EXPERIMENT)
    (tmp_path / "no-run").mkdir()
    assert runs_in(tmp_path) == ["gsm8k", "modchain-7"]
    with pytest.raises(UsageError, match="Did you mean 'modchain-7'"):
        RunDirectory.open("modchan-7", tmp_path)
    with pytest.raises(UsageError, match="There is no run 'no-run'") as caught:
        RunDirectory.open("no-run", tmp_path)
    assert "gsm8k, modchain-7" in caught.value.remedy
    with pytest.raises(UsageError, match="pvg train"):
        RunDirectory.open("first", tmp_path / "absent")


HOLDER = """
import sys, time
from pathlib import Path
from pvg.store.run_directory import RunDirectory
with RunDirectory.open("first", Path(sys.argv[1])).lock():
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first", EXPERIMENT)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(UsageError, match=f"being driven by process {holder.pid}"), run.lock():
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with run.lock() as mine:
            assert mine is run
            assert run.lock_file.read_text() == str(os.getpid())
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()


def test_the_lock_is_free_after_an_error(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first", EXPERIMENT)
    with pytest.raises(KeyError), run.lock():
        raise KeyError
    with run.lock(), pytest.raises(UsageError, match=f"process {os.getpid()}"), run.lock():
        pass
