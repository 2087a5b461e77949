"""`pvg runs`: list and remove, on real run folders and with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from calling import ENTRY, pvg
from in_terminal import in_terminal
from run_samples import begin, commit, played, state, tell

from pvg.store.run_directory import runs_in

pytestmark = pytest.mark.slow

RUNS = Path("runs")
HOLD = """
import sys
from pathlib import Path
from pvg.store.run_directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).lock():
    print("locked", flush=True)
    sys.stdin.read()
"""
DIE_HALF_WAY = """
import os, signal, shutil, sys
from pathlib import Path
from pvg.store import run_directory as run_folders
from pvg.store.run_directory import RunDirectory
def die(folder):
    os.unlink(folder / "state.json")
    os.kill(os.getpid(), signal.SIGKILL)
shutil.rmtree = die
run_folders.remove_run(RunDirectory(Path(sys.argv[1])), print)
"""


def test_the_list_has_rounds_and_state_newest_first() -> None:
    played(RUNS, "old")
    os.utime(RUNS / "old/state.json", (1000, 1000))
    for name in ("experiment.toml", "metrics.jsonl"):
        os.utime(RUNS / "old" / name, (1000, 1000))
    half = begin(RUNS, "half")
    commit(half, state("train_prover", rounds=[{}], round=1))
    tell(half, {"kind": "run", "status": "interrupted", "seconds": 2.0})
    listed = pvg("runs", "list", "--json").document["runs"]
    assert [(run["name"], run["state"], run["rounds_finished"]) for run in listed] == [
        ("half", "stopped", 1),
        ("old", "finished", 1),
    ]
    assert "stopped" in pvg("runs").out


def test_damaged_runs_are_listed_and_can_be_removed() -> None:
    played(RUNS)
    (RUNS / "first/experiment.toml").write_text("[broken")
    called = pvg("runs")
    assert "damaged" in called.out
    (listed,) = pvg("runs", "--json").document["runs"]
    assert len(listed["notes"]) == 1
    assert pvg("runs", "remove", "first", "--yes").code == 0
    assert list(RUNS.iterdir()) == []


def test_a_run_that_a_process_plays_is_not_removed_and_has_died_when_that_was_killed() -> None:
    run = played(RUNS)
    commit(run, state("train_prover", rounds=[]))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        listed = pvg("runs", "--json").document["runs"]
        assert [(run["state"], run["process"]) for run in listed] == [("running", holder.pid)]
        called = pvg("runs", "remove", "first", "--yes")
        assert called.code == 2
        assert f"is being driven by process {holder.pid}" in called.err
        assert runs_in(RUNS) == ["first"]
    finally:
        holder.kill()
        # Not reaped, so it keeps its number. Waits until the kernel has ended it.
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
        assert pvg("runs", "--json").document["runs"][0]["state"] == "died"
        holder.communicate()
    assert pvg("runs", "remove", "first", "--yes", "--json").document["removed"] == ["runs/first"]
    assert list(RUNS.iterdir()) == []


def test_a_folder_with_an_experiment_of_the_user_is_no_run() -> None:
    pvg("init", "mine")
    for command in (("runs", "remove", "mine", "--yes"), ("report", "mine")):
        called = pvg(*command)
        assert called.code == 2
        assert "mine is not a run." in called.err
        assert "pvg train mine/experiment.toml" in called.err
    assert pvg("runs", "--runs", ".", "--json").document["runs"] == []
    assert len(list(Path("mine").iterdir())) == 4


def test_a_kill_half_way_leaves_no_folder_that_looks_like_a_run() -> None:
    run = played(RUNS)
    done = subprocess.run([sys.executable, "-c", DIE_HALF_WAY, str(run.path)], check=False)
    assert done.returncode == -9
    assert len(list(RUNS.iterdir())) == 1
    assert not list(RUNS.glob("*/experiment.toml"))
    assert pvg("runs", "--json").document["runs"] == []
    assert f"pvg runs remove {run.name}" in pvg("runs").err
    assert pvg("runs", "remove", run.name).code == 2  # it asks again
    called = pvg("runs", "remove", run.name, "--yes", "--json")
    assert called.document["removed"] == [str(run.path)]
    assert list(RUNS.iterdir()) == []
    assert "is half removed" not in pvg("runs").err
    assert pvg("runs", "remove", run.name, "--yes").code == 2


@pytest.mark.parametrize(("answer", "left"), [("n", ["first"]), ("y", [])])
def test_it_asks_on_a_terminal_only(answer: str, left: list[str]) -> None:
    played(RUNS)
    refused = pvg("runs", "remove", "first")  # without a terminal
    assert (refused.code, "--yes" in refused.err, runs_in(RUNS)) == (2, True, ["first"])
    code, shown = in_terminal([*ENTRY, "runs", "remove", "first"], answer=answer)
    assert "Delete 1 run with all files?" in shown
    assert code == (1 if left else 0)
    assert runs_in(RUNS) == left


def test_a_run_that_another_run_starts_from_is_kept_unless_forced() -> None:
    played(RUNS)
    for name, models in (
        ("second", {"prover": {"source": "run:first/round-0"}}),
        ("third", {"verifier": {"source": f"run:{(RUNS / 'first').absolute()}/round-0/verifier@0123456789abcdef"}}),
    ):
        begin(RUNS, name, models=models)
    called = pvg("runs", "remove", "first", "--yes")
    assert called.code == 2
    assert "second, third start from the run 'first'." in called.err
    assert "pvg runs remove first second third, or add --force" in called.err
    assert pvg("runs", "remove", "third", "--yes").code == 0
    assert "second starts from the run 'first'" in pvg("runs", "remove", "first", "--yes", "--json").err
    assert pvg("runs", "remove", "first", "second", "--yes").code == 0
    played(RUNS)
    begin(RUNS, "second", models={"prover": {"source": "run:first"}})
    assert pvg("runs", "remove", "first", "--yes", "--force").code == 0
    assert runs_in(RUNS) == ["second"]
