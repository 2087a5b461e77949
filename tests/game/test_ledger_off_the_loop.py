"""A commit's long work happens off the event loop, and a commit that fails loses nothing."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_groups import made_group

from pvg.config.experiment import Experiment
from pvg.errors import MissingRequirementError
from pvg.game.ledger import Ledger
from pvg.game.states import Phase
from pvg.records import Rollout
from pvg.store.run_directory import RunDirectory

LIMIT_S = 60.0


def rollout(number: int) -> Rollout:
    return replace(made_group("p", [[0]], tokens=3).rollouts[0], id=f"r{number}")


@pytest.fixture
def ledger(tmp_path: Path) -> Any:
    experiment = Experiment()
    with_ledger = Ledger(RunDirectory.create(tmp_path, "a-run", experiment), experiment, "test")
    yield with_ledger
    with_ledger.close()


def test_the_loop_goes_on_while_rollouts_are_written(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer waits for what only the loop can do: on the loop, it would wait for ever."""
    seen = threading.Event()
    write = ledger.rollout_shards.write

    def waiting(*arguments: Any, **options: Any) -> Any:
        assert seen.wait(LIMIT_S), "the loop stood still"
        return write(*arguments, **options)

    monkeypatch.setattr(ledger.rollout_shards, "write", waiting)

    async def play() -> None:
        await ledger.commit(ledger.state.enter(Phase.MINT))
        ledger.keep([rollout(0)])
        commit = asyncio.create_task(ledger.commit(ledger.state))
        await asyncio.sleep(0.01)
        ledger.keep([rollout(1)])  # belongs to the next commit
        ledger.record("told", number=1)
        seen.set()
        await commit
        assert [r.id for r in await ledger.read_rollouts(0, "mint")] == ["r0"]
        await ledger.commit(ledger.state)
        assert [r.id for r in await ledger.read_rollouts(0, "mint")] == ["r0", "r1"]

    asyncio.run(play())
    assert ledger.state.offsets["metrics"] == ledger.directory.metrics.stat().st_size


def test_what_could_not_be_written_is_in_the_next_commit(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise MissingRequirementError("The disk is full.", "Make room.")

    async def play() -> None:
        await ledger.commit(ledger.state.enter(Phase.MINT))
        ledger.keep([rollout(0)])
        before = ledger.state
        with monkeypatch.context() as broken:
            broken.setattr(ledger.rollout_shards, "write", full)
            with pytest.raises(MissingRequirementError, match="disk is full"):
                await ledger.commit(ledger.state)
        assert ledger.state == before
        await ledger.commit(ledger.state)
        assert [r.id for r in await ledger.read_rollouts(0, "mint")] == ["r0"]

    asyncio.run(play())


def test_no_fsync_of_a_commit_runs_on_the_loop(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commits of a state alone, of rollouts, and of a finished phase with its manifest."""
    synced_by: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced_by.append(threading.current_thread().name)
        fsync(descriptor)

    async def play() -> None:
        await ledger.commit(ledger.state.enter(Phase.MINT))
        ledger.keep([rollout(0)])
        await ledger.commit(ledger.state)
        await ledger.commit(ledger.state.enter(Phase.TRAIN_VERIFIER), finished={"correct": 1.0})

    monkeypatch.setattr(os, "fsync", noted)
    asyncio.run(play())
    assert len(synced_by) > 6
    assert all(name.startswith("pvg-disk") for name in synced_by)


def test_what_is_appended_while_a_commit_syncs_belongs_to_the_next_one(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state names only what the sync before it made durable."""
    syncing, appended = threading.Event(), threading.Event()
    sync = ledger._metrics.sync

    def waiting() -> None:
        syncing.set()
        assert appended.wait(LIMIT_S), "the loop stood still"
        sync()

    async def play() -> None:
        ledger.record("told", number=0)
        before = ledger._metrics.mark.bytes
        monkeypatch.setattr(ledger._metrics, "sync", waiting)
        commit = asyncio.create_task(ledger.commit(ledger.state.enter(Phase.MINT)))
        assert await asyncio.to_thread(syncing.wait, LIMIT_S)
        ledger.record("told", number=1)
        appended.set()
        await commit
        assert ledger.state.offsets["metrics"] == before
        await ledger.commit(ledger.state)
        assert ledger.state.offsets["metrics"] == ledger.directory.metrics.stat().st_size > before

    asyncio.run(play())


def test_a_cancelled_commit_is_finished_before_the_cancellation_surfaces(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the state in memory would be older than the one on the disk, and the next commit would fail."""
    writing, go_on = threading.Event(), threading.Event()
    write = ledger.rollout_shards.write

    def waiting(*arguments: Any, **options: Any) -> Any:
        writing.set()
        assert go_on.wait(LIMIT_S)
        return write(*arguments, **options)

    async def play() -> None:
        await ledger.commit(ledger.state.enter(Phase.MINT))
        ledger.keep([rollout(0)])
        monkeypatch.setattr(ledger.rollout_shards, "write", waiting)
        commit = asyncio.create_task(ledger.commit(ledger.state))
        assert await asyncio.to_thread(writing.wait, LIMIT_S)
        commit.cancel()
        await asyncio.sleep(0.01)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await commit
        assert [r.id for r in await ledger.read_rollouts(0, "mint")] == ["r0"]
        ledger.keep([rollout(1)])
        await ledger.commit(ledger.state)
        assert [r.id for r in await ledger.read_rollouts(0, "mint")] == ["r0", "r1"]

    asyncio.run(play())
