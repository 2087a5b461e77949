"""A large mint is read from the columns of its shards, never as rollouts: its memory does not grow with the pairs."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_games import changed, played, rows

from pvg.config.game import SimultaneousSchedule
from pvg.game import verifier_phase
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards, ShardInfo

pytestmark = pytest.mark.slow

GAMES = {
    "a verifier that learns on": {"game.schedule": "simultaneous", "game.schedule.every": 2},
    "a frozen ensemble": {"game.rounds": 2, "verifier.ensemble": {"kind": "mean", "size": 2}},
}


@pytest.mark.parametrize("settings", GAMES.values(), ids=GAMES.keys())
def test_no_phase_reads_the_mint_as_rollouts(
    settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = RolloutShards.read

    def refused(self: RolloutShards, shard: ShardInfo | Path) -> object:
        assert isinstance(shard, ShardInfo)
        assert not shard.label.startswith("mint"), "a phase reads all rollouts of the mint"
        return read(self, shard)

    monkeypatch.setattr(RolloutShards, "read", refused)
    monkeypatch.setattr(SimultaneousSchedule, "problems", 6)
    experiment = changed({**settings, "training.steps": 2})
    outcome, run = played(experiment, tmp_path / "whole")
    assert outcome.status == "complete"
    # However many solutions are scored at once. The game ends after its first verifier phase.
    monkeypatch.setattr(verifier_phase, "SCORED_AT_ONCE", 5)
    _, few = played(experiment, tmp_path / "few", stop_at=("train_prover", 1))
    assert calibrations(few) == calibrations(run)[:1]


def calibrations(run: RunDirectory) -> list[dict[str, object]]:
    phases = [row["metrics"] for row in rows(run, "phase") if row["phase"] == "train_verifier"]
    return [{name: metrics[name] for name in ("threshold", "verifier_auc", "held_out")} for metrics in phases]
