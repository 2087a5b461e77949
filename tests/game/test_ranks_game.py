"""A game whose prover trains on several ranks (`cluster.trainer_ranks`), stopped and continued with other numbers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from kill_drill import small_experiment
from small_games import completed, played
from torch import Tensor

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.store.checkpoints import read_checkpoint
from pvg.store.run_directory import RunDirectory


def with_ranks(ranks: int, workers: int = 0) -> Experiment:
    plain = small_experiment().plain()
    plain["game"] |= {"rounds": 1}
    plain["verifier"] |= {"steps": 3}
    plain["training"] |= {"minibatches": 2, "steps": 8, "learning_rate": 1e-5}
    plain["cluster"] = {"kind": "local", "workers": workers, "trainer_ranks": ranks} if ranks else {"kind": "none"}
    return build_experiment(plain)


def prover(root: Path) -> dict[str, Tensor]:
    return read_checkpoint(RunDirectory.open("drill", root).weights, "round-000-prover")[0]


@pytest.mark.drill
def test_a_game_on_two_ranks_continues_on_three_on_one_process_and_beside_workers(tmp_path: Path) -> None:
    """With such a small learning rate, all runs sample the same rollouts, so their weights can be compared."""
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    completed(with_ranks(0), alone)
    expected = prover(alone)
    outcome, _ = played(with_ranks(2), stopped, stop_at=("train_prover", 5))
    assert outcome.status == "interrupted"
    for number, continued in enumerate((with_ranks(3), with_ranks(0), with_ranks(2, workers=1))):
        root = tmp_path / f"continued-{number}"
        shutil.copytree(stopped, root)
        outcome, _ = played(continued, root, resume=True)
        assert outcome.status == "complete"
        for name, tensor in prover(root).items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0)
