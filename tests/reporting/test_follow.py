"""A run that another process writes, followed: only new bytes are read, and its state is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from page_checks import Page
from run_samples import begin, commit, played, rollout, state, step, telemetered, tell

from pvg.config.game import Game
from pvg.records import Role
from pvg.reporting import follow
from pvg.reporting.follow import FollowedRun, JournalTail, progress_of
from pvg.reporting.run_page import collect, run_page
from pvg.reporting.run_summary import read_run
from pvg.reporting.watch_server import LiveRun
from pvg.store.lease import this_boot, this_namespace
from pvg.store.run_directory import RunDirectory


def lines(*numbers: int) -> bytes:
    return b"".join(b'{"n":%d}\n' % number for number in numbers)


def test_a_tail_gives_each_line_once_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    tail = JournalTail(path)
    assert tail.read() == (False, [])
    path.write_bytes(lines(1, 2) + b'{"n":')
    assert tail.read() == (False, [b'{"n":1}', b'{"n":2}'])
    assert tail.read() == (False, [])
    with path.open("ab") as file:
        file.write(b"3}\n")
    assert tail.read() == (False, [b'{"n":3}'])


def test_a_tail_reads_only_what_was_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    path.write_bytes(lines(*range(10_000)))
    tail = JournalTail(path)
    tail.read()
    read: list[int] = []
    whole = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: read.append(at) or whole(file, size, at))
    with path.open("ab") as file:
        file.write(lines(1))
    assert tail.read() == (False, [b'{"n":1}'])
    assert min(read) >= path.stat().st_size - len(lines(1)) - follow.REMEMBERED


@pytest.mark.parametrize("after", [lines(1), lines(1, 7, 8, 9), lines(1, 9)])
def test_a_tail_notices_a_journal_that_was_cut_back(tmp_path: Path, after: bytes) -> None:
    """Shorter than before, longer, or of the same length: in each case by its content."""
    path = tmp_path / "journal"
    path.write_bytes(lines(1, 2))
    tail = JournalTail(path)
    tail.read()
    with path.open("r+b") as file:  # the same file, as a resume leaves it
        file.truncate(len(lines(1)))
        file.seek(0)
        file.write(after)
    assert tail.read() == (True, after.splitlines())


def test_a_tail_notices_a_journal_that_was_replaced_by_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(lines(1))
    tail = JournalTail(path)
    tail.read()
    shutil.copyfile(path, tmp_path / "copy")
    os.replace(tmp_path / "copy", path)
    assert tail.read() == (True, [b'{"n":1}'])


def test_lines_longer_than_a_block_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "BLOCK", 8)
    path = tmp_path / "journal"
    path.write_bytes(b"x" * 100 + b"\n" + b"y\n")
    tail = JournalTail(path)
    found = [tail.read()[1] for _ in range(3)]
    assert [line for some in found for line in some] == [b"x" * 100, b"y"]


@pytest.mark.parametrize("make", [played, telemetered])
def test_a_followed_run_is_what_the_report_reads(tmp_path: Path, make: object) -> None:
    whole = make(tmp_path)  # type: ignore[operator]
    expected = read_run(whole)
    content = whole.metrics.read_bytes().splitlines(keepends=True)
    whole.metrics.write_bytes(b"")
    followed = FollowedRun(whole)
    for line in content:
        with whole.metrics.open("ab") as file:
            file.write(line)
        followed.update()
    assert replace(followed.summary, notes=[]) == replace(expected, notes=[])


def test_a_damaged_line_is_counted_and_the_rest_shown(tmp_path: Path) -> None:
    run = begin(tmp_path)
    tell(run, step("train_prover", 1, loss=1.0))
    with run.metrics.open("ab") as file:
        file.write(b"\xff\xfe nonsense\n[1]\n")
    tell(run, step("train_prover", 2, loss=2.0))
    followed = FollowedRun(run)
    followed.update()
    assert followed.summary.series("loss") == [1.0, 2.0]
    assert any("2 lines of metrics.jsonl are damaged" in note for note in followed.summary.notes)


def test_a_long_run_keeps_the_newest_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "MOST_RECORDS", 10)
    run = begin(tmp_path)
    tell(run, *(step("train_prover", number, loss=float(number)) for number in range(25)))
    tell(run, *({"kind": "device", "time": float(n), "metrics": {"cpu": n / 100}} for n in range(25)))
    followed = FollowedRun(run)
    followed.update()
    assert followed.summary.series("loss") == [float(n) for n in range(15, 25)]
    assert [reading.time for reading in followed.summary.device] == [float(n) for n in range(15, 25)]
    assert any("Only the newest 10 steps are shown; 15 older" in note for note in followed.summary.notes)


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


def situation(run: RunDirectory) -> str:
    followed = FollowedRun(run)
    followed.update()
    return followed.situation.state


def test_the_state_of_a_run_follows_from_its_lease_and_its_records(tmp_path: Path) -> None:
    run = begin(tmp_path)
    assert situation(run) == "waiting"
    lease(run)
    assert situation(run) == "running"
    commit(run, state("train_prover"))
    tell(run, step("train_prover", 1, loss=1.0))
    assert situation(run) == "running"
    lease(run, age_s=60.0)
    assert situation(run) == "silent"
    dead = dead_process()
    lease(run, process=dead, age_s=60.0)
    assert situation(run) == "died"
    lease(run, process=dead, namespace="another", age_s=1.0)  # a process of another container is not visible here
    assert situation(run) == "running"
    lease(run, process=dead, namespace=this_namespace(), age_s=1.0)
    assert situation(run) == "died"
    lease(run, start=1, namespace=this_namespace(), age_s=1.0)  # its number has another process now
    assert situation(run) == "died"
    lease(run, start=1, namespace="another", age_s=8.0)  # its number has another process in this container
    assert situation(run) == "running"
    lease(run, start=1, namespace="another", age_s=20.0)
    assert situation(run) == "silent"
    lease(run, start=1, namespace="another", age_s=60.0)  # as on another host
    assert situation(run) == "died"
    lease(run, boot="another", age_s=20.0)
    assert situation(run) == "silent"
    lease(run, boot="another", age_s=60.0)
    assert situation(run) == "died"
    lease(run, process=0, ended=True)
    assert situation(run) == "failed"
    tell(run, {"kind": "run", "time": 1.0, "status": "interrupted", "seconds": 1.0, "budget": {}})
    assert situation(run) == "stopped"
    commit(run, state("complete"))
    assert situation(run) == "finished"
    lease(run)  # it gets more rounds
    assert situation(run) == "running"
    lease(run, age_s=60.0)
    assert situation(run) == "finished"
    followed = FollowedRun(run)
    shutil.rmtree(run.path)
    followed.update()
    assert followed.situation.state == "removed"


def test_time_left_is_that_of_the_last_steps_and_phases(tmp_path: Path) -> None:
    """3 rounds of 60 prover steps. Steps take 2 s. The run paused for 1000 s."""
    run = begin(tmp_path)
    at = {5: 1000.0, 6: 1002.0, 7: 1004.0, 8: 2004.0, 9: 2006.0}
    tell(
        run,
        {"kind": "phase", "round": 0, "phase": "mint", "seconds": 10.0, "metrics": {}},
        {"kind": "phase", "round": 0, "phase": "train_prover", "seconds": 120.0, "metrics": {}},
        {"kind": "phase", "round": 0, "phase": "checkpoint", "seconds": 5.0, "metrics": {}},
        {"kind": "round", "round": 0, "metrics": {}},
        {"kind": "phase", "round": 1, "phase": "mint", "seconds": 20.0, "metrics": {}},
        *(
            {**step("train_prover", number, round_=1), "time": moment, "budget": {"train": 2.0}}
            for number, moment in at.items()
        ),
    )
    summary = read_run(run)
    assert summary.rounds_planned == 3
    found = progress_of(summary, 2007.0, Game().effort)
    assert found is not None
    assert (found.round, found.phase, found.step, found.of) == (1, "train_prover", 9, 60)
    assert found.phase_left_s == pytest.approx(51 * 2 - 1)
    assert found.run_left_s == pytest.approx(51 * 2 - 1 + 5 + (20 + 120 + 5))
    growing = progress_of(summary, 2007.0, Game(growing=True).effort)
    assert growing is not None
    # the mint of round 1 took 20 s, so that of round 2 takes 30 s
    assert growing.run_left_s == pytest.approx(51 * 2 - 1 + 5 + (30 + 120 + 5))
    assert progress_of(read_run(begin(tmp_path, "new")), 0.0, Game().effort) is None


def test_time_left_in_a_phase_counts_the_steps_that_take_longer(tmp_path: Path) -> None:
    """Every fifth step of the prover ends in an update of the verifier: 2 s, and 12 s with an update."""
    run = begin(tmp_path)
    now = 1000.0
    for number in range(1, 31):
        seconds = 2.0 if number % 5 else 12.0
        now += seconds
        tell(run, {**step("train_prover", number), "time": now, "budget": {"train": seconds}})
    found = progress_of(read_run(run), now, Game().effort)
    assert found is not None
    # The newest 19 of 20 steps: 12 to 30, of which 15, 20, 25 and 30 have an update.
    assert found.phase_left_s == pytest.approx((60 - 30) * (15 * 2 + 4 * 12) / 19)


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
    assert 'id="columns"' in live.solutions()
    assert live.solutions() is live.solutions()


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
