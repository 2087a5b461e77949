"""Two drivers on two hosts: real processes, which share the run's folder and cannot see each other's locks."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from committing_writer import recover

from pvg.config.experiment import Experiment
from pvg.errors import StateError, UsageError
from pvg.game.ledger import Ledger
from pvg.store import lease
from pvg.store.checkpoints import write_checkpoint
from pvg.store.lease import newest_lease, read_driver
from pvg.store.run_directory import RunDirectory
from pvg.store.state import FileStateStore, State

DRIVER = Path(__file__).with_name("driver_on_a_host.py")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "shared", Experiment())


@contextmanager
def driving(run: RunDirectory, host: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(DRIVER), str(run.path), host],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def commits(process: subprocess.Popen[str], count: int) -> list[int]:
    """The numbers of the next `count` steps that it commits."""
    assert process.stdout is not None
    steps: list[int] = []
    while len(steps) < count and (line := process.stdout.readline()):
        word, number = line.split()
        steps += [int(number)] * (word == "step")
    assert len(steps) == count, process.communicate()[1]
    return steps


def taken_over(run: RunDirectory) -> None:
    """What a driver on another host does before its first commit."""
    newest = newest_lease(run.path)
    assert newest is not None
    newest.with_name("lease-000099.json").write_text('{"host": "other", "boot": "other", "process": 7, "ended": false}')
    newest.unlink()


@pytest.mark.slow
def test_a_driver_on_another_host_is_refused_until_the_first_one_is_silent(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, and goes on later. One that was killed is as silent, and leaves less to go wrong."""
    with driving(run, "first") as first:
        commits(first, 1)
        with monkeypatch.context() as here:
            here.setattr(fcntl, "flock", lambda *_: None)
            here.setattr(lease, "this_boot", lambda: "boot of a third")
            named = f"is being driven by process {first.pid} on first"
            with pytest.raises(UsageError, match=named), run.lock():
                pass
        last = commits(first, 2)[-1]
        first.send_signal(signal.SIGSTOP)
        with driving(run, "second") as second:
            begun = commits(second, 3)[0]
            assert begun > last
            first.send_signal(signal.SIGCONT)
            _, message = first.communicate(timeout=60)
            assert first.returncode == 2
            assert "StateError Another driver (process" in message
            assert "on second) has taken over the run" in message
            commits(second, 3)
    state, _ = recover(run)
    assert state["step"] >= begun + 5


def test_a_released_run_is_taken_at_once(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    for host in ("first", "second", "first"):
        monkeypatch.setattr(lease, "this_boot", lambda host=host: f"boot of {host}")
        with run.lock(waiting=waits.append):
            assert read_driver(newest_lease(run.path))["boot"] == f"boot of {host}"
    assert waits == []
    assert [path.name for path in run.path.glob("lease-*.json")] == ["lease-000004.json"]


def test_a_driver_that_died_on_this_host_is_followed_at_once(run: RunDirectory) -> None:
    name = run.path / "lease-000007.json"
    name.write_text(f'{{"host": "here", "boot": "{lease.this_boot()}", "process": 1, "beats": 3, "ended": false}}')
    waits: list[str] = []
    with run.lock(waiting=waits.append):
        assert [path.name for path in run.path.glob("lease-*.json")] == [name.name]
        assert read_driver(name)["process"] == os.getpid()
    assert waits == []


def test_two_hosts_that_take_over_at_once_do_not_both_get_the_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "WATCH_S", 0.01)
    monkeypatch.setattr(lease, "BEAT_S", 0.01)

    def taken_meanwhile(line: str) -> None:
        assert "Waiting" in line
        (run.path / "lease-000009.json").write_text("{}")

    (run.path / "lease-000008.json").write_text("{}")  # its driver died while it wrote it
    with pytest.raises(UsageError, match="has just taken over"), run.lock(waiting=taken_meanwhile):
        pass


def test_a_commit_that_passed_its_check_before_the_run_was_taken_over_is_lost(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run.lock():
        unchanged = run.unchanged()

        def stopped_after_the_check() -> None:
            unchanged()
            taken_over(run)
            run.remove_temporaries()

        store = FileStateStore(run.state, stopped_after_the_check)
        with pytest.raises(FileNotFoundError):
            store.save({"step": 1})
        with pytest.raises(StateError, match="has taken over"):
            unchanged()
    assert not run.state.exists()


def test_a_driver_that_is_taken_over_before_it_opens_its_ledger_commits_nothing(run: RunDirectory) -> None:
    with run.lock():
        taken_over(run)
        with pytest.raises(StateError, match="process 7 on other"):
            run.unchanged()()
        with pytest.raises(StateError, match="process 7 on other"):
            Ledger(run, Experiment(), "test")


def test_a_driver_that_starts_while_another_host_takes_its_lease_keeps_the_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = lease._opened

    def opened_after_the_other(path: Path, content: bytes, new: bool) -> int:
        before = newest_lease(run.path)
        assert before is not None
        before.write_text('{"host": "first", "boot": "first", "process": 7, "beats": 0, "ended": false}')
        return opened(path, content, new)

    monkeypatch.setattr(lease, "_opened", opened_after_the_other)
    monkeypatch.setattr(lease, "this_boot", lambda: "second")
    before = newest_lease(run.path)
    with pytest.raises(UsageError, match="process 7 on first"), run.lock():
        pass
    assert newest_lease(run.path) == before


def test_a_beat_reaches_the_disk(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system shows other hosts only what was synced."""
    beaten, synced = threading.Event(), os.fsync

    def seen(file: int) -> None:
        synced(file)
        if threading.current_thread().name == "pvg-lease":
            beaten.set()

    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    monkeypatch.setattr(os, "fsync", seen)
    with run.lock():
        assert beaten.wait(20)


def test_a_driver_that_is_taken_over_after_its_commit_removes_no_checkpoint(run: RunDirectory) -> None:
    with run.lock():
        ledger = Ledger(run, Experiment(), "test")
        save = ledger._store.save

        def saved_then_taken(state: State) -> None:
            save(state)
            taken_over(run)
            write_checkpoint(run.checkpoints, "of-the-other", {"w": torch.zeros(3)}, {})

        ledger._store.save = saved_then_taken  # type: ignore[method-assign]
        with pytest.raises(StateError, match="process 7 on other"):
            asyncio.run(ledger.commit(ledger.state))
        ledger.close()
    assert (run.checkpoints / "of-the-other").is_dir()


@pytest.mark.drill
def test_drivers_that_are_stopped_at_any_moment_and_go_on_later_harm_nothing(run: RunDirectory) -> None:
    chance, last = random.Random(3), 0
    with ExitStack() as stack:
        current = stack.enter_context(driving(run, "host-0"))
        for number in range(1, 7):
            begun = time.monotonic()
            last = commits(current, 1)[0]
            time.sleep(chance.uniform(0.0, 1.5) * (time.monotonic() - begun))
            current.send_signal(signal.SIGSTOP)
            successor = stack.enter_context(driving(run, f"host-{number}"))
            assert commits(successor, 1)[0] > last
            current.send_signal(signal.SIGCONT)
            _, message = current.communicate(timeout=60)
            assert current.returncode == 2, message
            assert "has taken over the run" in message
            current = successor
        last = commits(current, 2)[-1]
    state, _ = recover(run)
    assert state["step"] >= last
