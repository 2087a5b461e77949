"""Small games that tests play, and what these leave in their run directories."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from kill_drill import small_experiment

from pvg.config.experiment import Experiment
from pvg.config.load import assign, build_experiment
from pvg.game.run import GameOutcome, play
from pvg.records import Rollout
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.store.state import FileStateStore, JsonLinesReader
from pvg.telemetry.events import PhaseInfo, Progress, SilentObserver


def changed(settings: dict[str, Any]) -> Experiment:
    """The drill's experiment, one round of it, with `settings` by dotted key."""
    plain = small_experiment().plain()
    for key, value in {"game.rounds": 1, **settings}.items():
        assign(plain, key, value)
    return build_experiment(plain)


class StopAt(SilentObserver):
    """Sets `stop` at event number `count` of a phase: its beginning, and each of its steps."""

    def __init__(self, stop: asyncio.Event, phase: str, count: int) -> None:
        self._stop, self._phase, self._count, self._now = stop, phase, count, ""
        self.notices: list[str] = []

    def noticed(self, message: str) -> None:
        self.notices.append(message)

    def phase_started(self, info: PhaseInfo) -> None:
        self._now = info.phase
        self.progressed(Progress(info.done))

    def progressed(self, progress: Progress) -> None:
        if self._now == self._phase:
            self._count -= 1
            if self._count == 0:
                self._stop.set()


def told(
    experiment: Experiment, root: Path, *, stop_at: tuple[str, int] = ("", 0), resume: bool = False
) -> tuple[GameOutcome, RunDirectory, list[str]]:
    """Play run `drill` in `root`. The last item: its notices."""

    async def work() -> tuple[GameOutcome, RunDirectory, list[str]]:
        observer = StopAt(stop := asyncio.Event(), *stop_at)
        return await play(experiment, run, observer=observer, stop=stop, resume=resume), run, observer.notices

    run = RunDirectory.open("drill", root) if resume else RunDirectory.create(root, "drill", experiment)
    with run.lock():
        return asyncio.run(work())


def played(
    experiment: Experiment, root: Path, *, stop_at: tuple[str, int] = ("", 0), resume: bool = False
) -> tuple[GameOutcome, RunDirectory]:
    return told(experiment, root, stop_at=stop_at, resume=resume)[:2]


def completed(experiment: Experiment, root: Path) -> RunDirectory:
    """The run of a whole game."""
    outcome, run = played(experiment, root)
    assert outcome.status == "complete"
    return run


def rows(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    return [row for row in JsonLinesReader(run.metrics) if row["kind"] == kind]


def prover_rows(run: RunDirectory) -> list[dict[str, Any]]:
    """The rows of the prover's steps."""
    return [row for row in rows(run, "step") if row["phase"] == "train_prover"]


def prover_steps(run: RunDirectory) -> list[dict[str, Any]]:
    """The metrics of the prover's steps."""
    return [row["metrics"] for row in prover_rows(run)]


def first_kl(run: RunDirectory) -> list[float]:
    """The KL to the base prover at the first prover step of each round."""
    return [row["metrics"]["kl"] for row in prover_rows(run) if row["step"] == 1]


def state_of(run: RunDirectory) -> dict[str, Any]:
    state = FileStateStore(run.state).load().state
    assert state is not None
    return dict(state)


def recorded(run: RunDirectory) -> list[Rollout]:
    shards = RolloutShards(run.path)
    return [rollout for plain in state_of(run)["shards"] for rollout in shards.read(ShardInfo.from_plain(plain))]


def trained_on(run: RunDirectory) -> list[Rollout]:
    """The rollouts of the prover's training."""
    return [rollout for rollout in recorded(run) if "/train_prover/" in rollout.id]
