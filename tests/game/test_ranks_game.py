"""A game whose prover trains on several ranks (`cluster.trainer_ranks`), stopped and continued with other numbers."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from kill_drill import small_experiment
from torch import Tensor

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.game.run import play
from pvg.store.checkpoints import read_checkpoint
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.events import PhaseInfo, Progress, SilentObserver


def with_ranks(ranks: int, workers: int = 0) -> Experiment:
    plain = small_experiment().plain()
    plain["game"] |= {"rounds": 1}
    plain["verifier"] |= {"steps": 3}
    plain["training"] |= {"minibatches": 2, "steps": 8, "learning_rate": 1e-5}
    plain["cluster"] = {"kind": "local", "workers": workers, "trainer_ranks": ranks} if ranks else {"kind": "none"}
    return build_experiment(plain)


class StopsAt(SilentObserver):
    """Sets `stop` at a step of the prover phase."""

    def __init__(self, step: int | None) -> None:
        self.stop = asyncio.Event()
        self._step = step
        self._phase = ""

    def phase_started(self, info: PhaseInfo) -> None:
        self._phase = info.phase

    def progressed(self, progress: Progress) -> None:
        if self._phase == "train_prover" and progress.done == self._step:
            self.stop.set()


def played(experiment: Experiment, root: Path, stop_at: int | None = None) -> str:
    resume = (root / "drill").exists()
    run = RunDirectory.open("drill", root) if resume else RunDirectory.create(root, "drill", experiment)
    observer = StopsAt(stop_at)
    with run.lock():
        outcome = asyncio.run(play(experiment, run, observer=observer, stop=observer.stop, resume=resume))
    return outcome.status


def prover(root: Path) -> dict[str, Tensor]:
    return read_checkpoint(RunDirectory.open("drill", root).weights, "round-000-prover")[0]


@pytest.mark.drill
def test_a_game_on_two_ranks_continues_on_three_on_one_process_and_beside_workers(tmp_path: Path) -> None:
    """With such a small learning rate, all runs sample the same rollouts, so their weights can be compared."""
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    assert played(with_ranks(0), alone) == "complete"
    expected = prover(alone)
    assert played(with_ranks(2), stopped, stop_at=4) == "interrupted"
    for number, continued in enumerate((with_ranks(3), with_ranks(0), with_ranks(2, workers=1))):
        root = tmp_path / f"continued-{number}"
        shutil.copytree(stopped, root)
        assert played(continued, root) == "complete"
        for name, tensor in prover(root).items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0)
