"""A large mint is read from the columns of its shards, never as rollouts: its memory does not grow with the pairs."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_configurations import changed, played, rows

from pvg.game import verifier_phase
from pvg.store.shards import RolloutShards, ShardInfo

GAMES = {
    "a frozen verifier": {"game.rounds": 2},
    "a verifier that learns on": {
        "game.schedule": "simultaneous",
        "game.schedule.every": 2,
        "game.schedule.problems": 6,
        "game.schedule.window": 2,
    },
    "an ensemble": {"verifier.ensemble": 2},
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
    found = []
    for at_once in (4096, 5):
        monkeypatch.setattr(verifier_phase, "SCORED_AT_ONCE", at_once)
        outcome, run = played(changed({**settings, "training.steps": 4}), tmp_path / str(at_once))
        assert outcome.status == "complete"
        phases = [row["metrics"] for row in rows(run, "phase") if row["phase"] == "train_verifier"]
        found.append([{k: m[k] for k in ("threshold", "verifier_auc", "held_out")} for m in phases])
    assert found[0] == found[1]  # however many solutions are scored at once
