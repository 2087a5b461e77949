"""The state and the progress of a run that another process writes, and its live page."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest
from page_checks import Page
from run_samples import begin, commit, played, rollout, state, step, tell

from pvg.records import Role
from pvg.reporting.follow import progress_of, state_of
from pvg.reporting.live_page import LiveRun
from pvg.reporting.run_page import collect, run_page
from pvg.reporting.run_summary import read_run
from pvg.store.lease import this_boot, this_namespace
from pvg.store.run_directory import RunDirectory

# --- the state of the run ----------------------------------------------------------------------------------------


def lease(run: RunDirectory, *, age_s: float = 0.0, **fields: object) -> None:
    for other in run.path.glob("lease-*.json"):
        other.unlink()
    path = run.path / "lease-000001.json"
    driver = {"host": "here", "boot": this_boot(), "process": os.getpid(), "beats": 3, "ended": False}
    driver["namespace"] = this_namespace()
    path.write_bytes(orjson.dumps({**driver, **fields}))
    os.utime(path, (time.time() - age_s, time.time() - age_s))


def dead_process() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_the_state_of_a_run_follows_from_its_lease_and_its_records(tmp_path: Path) -> None:
    run = begin(tmp_path)
    assert state_of(run) == "waiting"
    lease(run)
    assert state_of(run) == "running"
    commit(run, state("train_prover"))
    tell(run, step("train_prover", 1, loss=1.0))
    assert state_of(run) == "running"
    lease(run, age_s=60.0)
    assert state_of(run) == "silent"
    dead = dead_process()
    lease(run, process=dead, age_s=60.0)
    assert state_of(run) == "died"
    lease(run, process=dead, namespace="another", age_s=1.0)  # a process of another container is not visible here
    assert state_of(run) == "running"
    lease(run, process=dead, namespace=this_namespace(), age_s=1.0)
    assert state_of(run) == "died"
    lease(run, start=1, namespace=this_namespace(), age_s=1.0)  # its number has another process now
    assert state_of(run) == "died"
    lease(run, start=1, namespace="another", age_s=8.0)  # its number has another process in this container
    assert state_of(run) == "running"
    lease(run, start=1, namespace="another", age_s=20.0)
    assert state_of(run) == "silent"
    lease(run, start=1, namespace="another", age_s=60.0)  # as on another host
    assert state_of(run) == "died"
    lease(run, boot="another", age_s=20.0)
    assert state_of(run) == "silent"
    lease(run, boot="another", age_s=60.0)
    assert state_of(run) == "died"
    lease(run, process=0, ended=True)
    assert state_of(run) == "failed"
    tell(run, {"kind": "run", "time": 1.0, "status": "interrupted", "seconds": 1.0, "budget": {}})
    assert state_of(run) == "stopped"
    commit(run, state("complete"))
    assert state_of(run) == "finished"
    lease(run)  # it gets more rounds
    assert state_of(run) == "running"
    lease(run, age_s=60.0)
    assert state_of(run) == "finished"
    shutil.rmtree(run.path)
    assert state_of(run) == "removed"


def test_time_left_is_that_of_the_last_steps(tmp_path: Path) -> None:
    """60 prover steps. Steps take 2 s, and every fifth one 12 s. The run paused for 1000 s."""
    run = begin(tmp_path)
    assert progress_of(read_run(run)) is None
    now = 1000.0
    for number in range(1, 31):
        seconds = 2.0 if number % 5 else 12.0
        now += seconds + (1000.0 if number == 20 else 0.0)
        tell(run, {**step("train_prover", number, round_=1), "time": now, "budget": {"train": seconds}})
    found = progress_of(read_run(run))
    assert found is not None
    assert (found.round, found.phase, found.step, found.of, found.share) == (1, "train_prover", 30, 60, 0.5)
    # The newest 19 of 20 steps: 12 to 30, of which 15, 20, 25 and 30 take longer.
    assert found.left_s == pytest.approx((60 - 30) * (15 * 2 + 4 * 12) / 19)


# --- the page ----------------------------------------------------------------------------------------------------


def test_the_live_page_fills_up_and_changes_at_once_with_the_state(tmp_path: Path) -> None:
    run = begin(tmp_path)
    live = LiveRun(run)
    first = live.page()
    assert "Nothing is recorded yet." in first
    assert live.page() is first
    tell(run, step("train_prover", 1, helpful_accuracy=0.5), step("train_prover", 2, helpful_accuracy=0.75))
    lease(run)
    second = live.page()  # another state, so the page does not wait
    assert "75.0 %" in second
    assert "step 2 of 60" in second
    assert "Both roles" in second


def test_the_live_page_has_the_sections_of_the_report_and_all_solutions(tmp_path: Path) -> None:
    run = played(tmp_path)
    live, report = LiveRun(run), run_page(collect(run, read_run(run), 2))
    anchors = [found["id"] for name, found in Page(report).tags if name == "section"]
    assert [found["id"] for name, found in Page(live.page()).tags if name == "section"] == anchors
    assert 'id="data"' in live.solutions()
    assert live.solutions() is live.solutions()


def test_the_live_page_of_a_removed_run_keeps_what_it_showed(tmp_path: Path) -> None:
    run = played(tmp_path)
    live = LiveRun(run)
    assert "87.5 %" in live.page()
    shutil.rmtree(run.path)
    assert "The folder of the run is gone." in live.page()
    assert "87.5 %" in live.page()


def test_following_locks_and_writes_nothing(tmp_path: Path) -> None:
    run = played(tmp_path)
    commit(run, state("train_prover"), {"mint-00000": [rollout("a", Role.SNEAKY, correct=False, score=1.0)]})
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.path.rglob("*")}
    with run.lock():  # another driver holds the lock, and reading needs none
        live = LiveRun(run)
        live.page()
        live.solutions()
    after = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.path.rglob("*")}
    ours = {run.lock_file, *run.path.glob("lease-*.json"), run.path}
    assert {p: v for p, v in before.items() if p not in ours} == {p: v for p, v in after.items() if p not in ours}
