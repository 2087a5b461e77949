"""The run directory: creating, finding and driving it alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pvg.config.experiment import Experiment
from pvg.errors import ConfigurationError, StateError, UsageError
from pvg.store.run_directory import RunDirectory, runs_in
from pvg.store.state import FileStateStore, JsonLines
from pvg.telemetry.events import EventLog

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


@pytest.mark.parametrize("name", ["lock", "events.log", "metrics.jsonl", "spans.jsonl"])
@pytest.mark.parametrize("exists", [True, False])
def test_pvg_writes_through_no_link_in_a_run(tmp_path: Path, name: str, exists: bool) -> None:
    run = RunDirectory.create(tmp_path, "first", EXPERIMENT)
    other, link = tmp_path / "other", run.path / name
    if exists:
        other.write_bytes(b"not of pvg\n")
    link.unlink(missing_ok=True)
    link.symlink_to(other)

    def drive() -> None:
        with run.lock():
            EventLog(run.events)
            JsonLines(run.metrics)
            JsonLines(run.spans)

    with pytest.raises(StateError, match=f"{name} is a link"):
        drive()
    assert other.exists() is exists
    assert not exists or other.read_bytes() == b"not of pvg\n"


def test_a_link_to_a_run_has_the_name_that_commands_take(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "elsewhere", "exp", EXPERIMENT)
    for name in ("seed0", "seed1"):
        (tmp_path / name).symlink_to("elsewhere/exp")
    assert runs_in(tmp_path) == ["seed0", "seed1"]
    assert [RunDirectory.open(name, tmp_path).name for name in runs_in(tmp_path)] == ["seed0", "seed1"]
    assert RunDirectory(tmp_path / "seed0/../seed1/.").name == "seed1"


def test_an_unknown_name_among_many_runs_names_a_few(tmp_path: Path) -> None:
    for number in range(50):
        RunDirectory(tmp_path / f"r{number}").path.mkdir()
        (tmp_path / f"r{number}/experiment.toml").touch()
        (tmp_path / f"r{number}/lock").touch()
    with pytest.raises(UsageError) as caught:
        RunDirectory.open("nope", tmp_path)
    assert caught.value.remedy.endswith(" and 30 more.")


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
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "experiment.toml").write_text('name = "mine"')
    with pytest.raises(UsageError, match="has files, but is not a run"):
        RunDirectory.create(tmp_path, "mine", EXPERIMENT)
    assert (tmp_path / "mine" / "experiment.toml").read_text() == 'name = "mine"'
    (tmp_path / "mine" / "checkpoints").mkdir()  # a copy of a run that lacks its logs
    assert RunDirectory.open("mine", tmp_path).is_run


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


def test_a_run_without_its_experiment_file_is_not_called_missing(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first", EXPERIMENT)
    FileStateStore(run.state).save({"phase": "init"})
    run.experiment_file.unlink()
    with pytest.raises(StateError, match=r"first.experiment\.toml is missing") as caught:
        RunDirectory.open("first", tmp_path)
    assert "copy" in caught.value.remedy
    run.experiment_file.mkdir()
    with pytest.raises(StateError, match=r"first.experiment\.toml is not a file"):
        RunDirectory.open(run.path, tmp_path)


def test_an_experiment_file_that_ends_early_is_damaged(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first", EXPERIMENT)
    whole = run.experiment_file.read_text()
    sections = [place for place in range(len(whole)) if whole.startswith("\n[", place)]
    for end in (0, *sections):
        run.experiment_file.write_text(whole[:end])
        with pytest.raises(ConfigurationError, match=r"experiment\.toml is damaged"):
            run.experiment()


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
        moved = RunDirectory(run.path.rename(tmp_path / "moved"))
        with pytest.raises(UsageError, match=f"being driven by process {holder.pid}"), moved.lock():
            pass
        moved.path.rename(run.path)
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


def move(run: RunDirectory) -> None:
    run.path.rename(run.path.with_name("away"))


def move_parent(run: RunDirectory) -> None:
    run.path.parent.rename(run.path.parent.with_name("away"))


def replace(run: RunDirectory) -> None:
    move(run)
    RunDirectory.create(run.path.parent, run.name, EXPERIMENT)


def delete(run: RunDirectory) -> None:
    shutil.rmtree(run.path)


@pytest.mark.parametrize("change", [move, move_parent, replace, delete])
def test_a_process_finds_out_that_its_folder_is_another_one(tmp_path: Path, change: Callable[..., None]) -> None:
    run = RunDirectory.create(tmp_path / "runs", "first", EXPERIMENT)

    def play() -> None:
        with run.lock():
            store = FileStateStore(run.state, run.unchanged())
            store.save({"step": 1})
            change(run)
            store.save({"step": 2})

    with pytest.raises(StateError, match=r"first or its file lock was moved, deleted or replaced"):
        play()
    found = sorted(path.name for path in tmp_path.rglob("*state*"))
    assert found == ([] if change is delete else ["state.json"])


def test_an_error_in_a_folder_that_is_gone_says_so(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first", EXPERIMENT)

    def play() -> None:
        with run.lock():
            move(run)
            run.metrics.read_bytes()

    with pytest.raises(StateError, match="was moved, deleted or replaced") as caught:
        play()
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_what_is_not_ours_any_more_is_not_discarded(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first", EXPERIMENT)

    def play() -> None:
        with run.lock(discard=lambda: True):
            replace(run)
            raise UsageError("something else")

    with pytest.raises(StateError, match="replaced"):
        play()
    assert run.experiment_file.is_file()
    with pytest.raises(UsageError, match="something else"), run.lock(discard=lambda: True):
        raise UsageError("something else")
    assert not run.path.exists()


def test_a_run_that_lost_its_newest_state_is_not_discarded(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first", EXPERIMENT)
    assert not run.has_state
    FileStateStore(run.state).save({"step": 1})
    FileStateStore(run.state).save({"step": 2})
    run.state.unlink()
    with pytest.raises(UsageError), run.lock(discard=lambda: not run.has_state):
        raise UsageError("something else")
    assert run.load_state().state == {"step": 1}


def test_a_deleted_lock_file_stops_the_first_process_before_its_next_commit(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first", EXPERIMENT)
    with run.lock():
        store = FileStateStore(run.state, run.unchanged())
        store.save({"step": 1})
        with pytest.raises(UsageError, match="being driven by process"), run.lock():
            pass
        run.lock_file.unlink()
        with pytest.raises(StateError, match="deleted or replaced"):
            store.save({"step": 2})
        with run.lock():  # nothing keeps the second process out
            FileStateStore(run.state, run.unchanged()).save({"step": 3})
        with pytest.raises(StateError, match="deleted or replaced"):
            store.save({"step": 4})
    assert FileStateStore(run.state).load().state == {"step": 3}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("manifest/round-000-mint.json", b"{}"),
        ("rollouts/round-000/mint-00000.arrow", b"rows"),
        ("checkpoints/round-000-mint-00001/meta.json", b"{}"),
        ("weights/round-000-prover/meta.json", b"{}"),
        ("spans.jsonl", b"{}\n"),
        ("metrics.jsonl", b'{"kind":"device"}\n{"kind":"step"}\n'),
        ("metrics.jsonl", b"damaged\n"),
    ],
)
def test_a_run_without_a_state_that_shows_commits_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    run = RunDirectory.create(tmp_path, "first", EXPERIMENT)
    path = run.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(StateError, match=r"no state\.json and no state\.previous\.json, but it has commits") as caught:
        run.load_state()
    assert name.split("/", maxsplit=1)[0] in caught.value.message
    FileStateStore(run.state).save({"step": 1})
    assert run.load_state().state == {"step": 1}


def test_what_comes_before_the_first_commit_is_no_sign_of_one(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first", EXPERIMENT)
    kinds = (b"start", b"scaling", b"device", b"loop", b"alert")
    run.metrics.write_bytes(b"".join(b'{"kind":"%s"}\n' % kind for kind in kinds) + b'{"kind":"st')
    run.events.write_bytes(b"[run] event=start\n")
    run.spans.touch()
    run.code.mkdir()
    assert run.load_state().state is None


def test_only_temporaries_of_dead_writers_are_removed(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first", EXPERIMENT)
    run.code.mkdir()
    dead = [
        run.path / ".tmp-state.json-0123abcd",
        run.path / ".tmp-state.previous.json-0123abcd",
        run.path / ".tmp-experiment.toml-0123abcd",
        run.path / ".tmp-report.html-0123abcd",
        run.path / ".tmp-rollouts.html-0123abcd",
        run.manifest / ".tmp-round-000-mint.json-0123abcd",
        run.code / ".tmp-mine.py-0123abcd",
    ]
    others = [run.path / ".tmp-mine", run.path / ".tmp-notes.txt-0123abcd", run.manifest / ".tmp-x-0123abcdef"]
    living = run.path / ".tmp-report.html-fedc9876"
    for path in (*dead, *others, living):
        path.write_bytes(b"half")
    for report in dead[3:5]:
        os.utime(report, (0, 0))
    assert sorted(run.remove_temporaries()) == sorted(dead)
    assert all(path.exists() for path in (*others, living))
