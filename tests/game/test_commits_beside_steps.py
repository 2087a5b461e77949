"""A commit is written beside the next steps: these do not wait for the disk, and do not reach what it writes."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from small_games import changed, completed, rows, state_of
from test_kill_and_resume import drilled
from test_ledger_off_the_loop import LIMIT_S, rollout

from pvg.config.experiment import Experiment
from pvg.errors import MissingRequirementError
from pvg.game.ledger import Ledger
from pvg.game.run import play
from pvg.game.states import Phase
from pvg.store.checkpoints import TENSORS_FILE, write_checkpoint
from pvg.store.run_directory import RunDirectory
from pvg.store.state import FileStateStore, State
from pvg.telemetry.events import PhaseInfo, Progress, SilentObserver


class Watched(SilentObserver):
    """Notes the steps of a game, and its checkpoints as they are written. `before` is called in the disk's thread just
    before each checkpoint, with its phase and step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[str, int], None]) -> None:
        self.steps = Counter[str]()  # by phase
        self.changed = threading.Condition()
        self.written: dict[str, str] = {}  # digests of tensors
        self.states: list[tuple[str, int, bytes]] = []
        save = FileStateStore.save

        def saved(store: FileStateStore, state: State) -> None:
            progress = {key: value for key, value in state["progress"].items() if key != "metrics"}  # also of times
            self.states.append((state["phase"], state["step"], orjson.dumps(progress)))
            save(store, state)

        def wrote(directory: Path, name: str, *rest: Any, **more: Any) -> Path:
            phase, _, step = name.removeprefix("round-000-").partition("-")
            if step.isdigit():
                before(phase, int(step))
            path = write_checkpoint(directory, name, *rest, **more)
            self.written[name] = hashlib.sha256((path / TENSORS_FILE).read_bytes()).hexdigest()
            return path

        monkeypatch.setattr("pvg.game.ledger.write_checkpoint", wrote)
        monkeypatch.setattr(FileStateStore, "save", saved)

    def phase_started(self, info: PhaseInfo) -> None:
        self._phase = info.phase

    def progressed(self, progress: Progress) -> None:
        with self.changed:
            self.steps[self._phase] += 1
            self.changed.notify_all()

    def await_step(self, phase: str, step: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.steps[phase] >= step, LIMIT_S), "the step waits for the disk"


def watched(experiment: Experiment, run: RunDirectory, observer: SilentObserver, *, resume: bool = False) -> None:
    with run.lock():
        asyncio.run(play(experiment, run, observer=observer, stop=asyncio.Event(), resume=resume))


@pytest.mark.slow
def test_a_commit_of_a_slow_disk_holds_the_step_at_which_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write begins only when the game has made its next step, with other weights, averages and scores."""
    experiment = changed({})  # commits after steps 3, 6 and 7 of both phases
    found: list[Watched] = []
    for slow in (False, True):

        def before(phase: str, step: int, slow: bool = slow) -> None:
            if slow and step < 7:
                found[-1].await_step(phase, step + 1)

        with monkeypatch.context() as patched:
            found.append(Watched(patched, before))
            watched(experiment, RunDirectory.create(tmp_path, f"slow-{slow}", experiment), found[-1])
    assert [step for phase, step, _ in found[0].states if phase == "train_prover"] == [0, 3, 6, 7]
    assert found[1].states == found[0].states
    assert found[1].written == found[0].written


@pytest.mark.slow
def test_a_trainer_too_large_for_a_copy_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = changed({})
    found: list[Watched] = []
    for most in (1 << 28, 0):

        def before(phase: str, step: int, most: int = most) -> None:
            if not most:
                time.sleep(0.1)  # a step that did not wait would be taken now
                assert found[-1].steps[phase] == step

        with monkeypatch.context() as patched:
            patched.setattr("pvg.training.trainer.KEPT_BYTES", most)
            found.append(Watched(patched, before))
            watched(experiment, RunDirectory.create(tmp_path, f"at-most-{most}", experiment), found[-1])
    assert found[1].states == found[0].states
    assert found[1].written == found[0].written


@pytest.mark.slow
@pytest.mark.parametrize(("failing", "last"), [(3, 6), pytest.param(7, 7, marks=pytest.mark.drill)])
def test_a_commit_that_cannot_be_written_ends_the_game_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, last: int
) -> None:
    """At the next commit, or at the end of the phase. Then the run goes on from the commit before."""
    experiment = changed({})
    run = RunDirectory.create(tmp_path, "full", experiment)
    fsync, full = os.fsync, threading.Event()

    def before(phase: str, step: int) -> None:
        if (phase, step) == ("train_prover", failing):
            observer.await_step(phase, min(step + 1, 7))
            full.set()

    def sync(descriptor: int) -> None:
        if full.is_set() and threading.current_thread().name.startswith("pvg-disk"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patched:
        observer = Watched(patched, before)
        patched.setattr(os, "fsync", sync)
        with pytest.raises(MissingRequirementError, match="The disk is full while writing"):
            watched(experiment, run, observer)
    assert observer.steps["train_prover"] == last
    assert (state_of(run)["phase"], state_of(run)["step"]) == ("train_prover", failing // 6 * 6)
    watched(experiment, run, SilentObserver(), resume=True)
    whole = completed(experiment, tmp_path / "whole")
    of = [{row["step"]: row["metrics"]["loss"] for row in rows(each, "step") if "loss" in row["metrics"]}
          for each in (run, whole)]  # fmt: skip
    assert of[0] == of[1]


@pytest.mark.drill
@pytest.mark.timeout(1800)
def test_a_run_killed_while_commits_are_written_ends_like_the_uninterrupted_run() -> None:
    result = drilled("--kills", "10", "--slow-disk")
    assert result["problems"] == []
    assert result["in_flight"] >= 3


def test_an_error_that_no_commit_awaits_is_raised_by_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(RunDirectory.create(tmp_path, "a-run", Experiment()), Experiment(), "test")

    async def play_on() -> None:
        await ledger.commit(ledger.state.enter(Phase.MINT))
        ledger.keep([rollout(0)])
        monkeypatch.setattr(ledger.rollout_shards, "write", lambda *_: os.fsync(99_999))
        ledger.begin_commit(ledger.state)

    asyncio.run(play_on())
    with pytest.raises(OSError, match="Bad file descriptor"):
        ledger.close()
    assert ledger.state.shards == ()
