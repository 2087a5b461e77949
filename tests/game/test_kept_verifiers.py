"""What a verifier keeps of earlier rounds: the weights with which it begins, and the mints from which it learns."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from kill_drill import differences, fingerprint
from small_games import changed, played, state_of

from pvg.config.game import SimultaneousSchedule
from pvg.game import verdict_phase, verifier_phase
from pvg.game.verifier_phase import member_weights_name
from pvg.models.heads import VerifierModel
from pvg.models.language_model import digest_weights
from pvg.store.checkpoints import read_checkpoint
from pvg.store.pairs import PairView, is_held_out
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards

pytestmark = pytest.mark.slow

GAME: dict[str, Any] = {
    "game.rounds": 2,
    "game.mint_problems": 8,
    "game.test.problems": 4,
    "verifier.steps": 3,
    "verifier.held_out": 0.2,
    "training.steps": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "one": {},
    "ensemble": {"verifier.ensemble": {"kind": "min", "size": 2}},
    "simultaneous": {"game.schedule": "simultaneous", "game.schedule.every": 2},
    "generative": {
        "models.verifier": {"source": "embedded:modchain-prover"},
        "verifier.head": {"kind": "generative", "votes": 2, "tokens": 3},
        "verifier.pairs": 2,
    },
}


def minted(run: RunDirectory, round_: int) -> set[str]:
    """The problems of a round's mint that are not held out."""
    shards = (run.path / "rollouts" / f"round-{round_:03d}").glob("mint-*.arrow")
    reader = RolloutShards(run.path)
    found = {row.problem_id for shard in shards for row in reader.read(str(shard.relative_to(run.path)))}
    return {name for name in found if not is_held_out(name, GAME["verifier.held_out"])}


def version_of(run: RunDirectory, name: str) -> str:
    """The version of the verifier whose weights have this name."""
    digest = hashlib.blake2b(digest_size=16)
    digest_weights(read_checkpoint(run.weights, name)[0], digest)
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("kind", "keeps"), [("one", "nothing"), ("one", "weights"), ("one", "mints"), *((kind, "both") for kind in KINDS)]
)
def test_a_verifier_begins_with_the_weights_and_the_mints_that_it_keeps(
    kind: str, keeps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    learned: list[set[str]] = []
    opened, view = verifier_phase.starting_verifier, PairView.__init__

    def begins(*args: Any) -> VerifierModel:
        verifier = opened(*args)
        begun.append(verifier.version())
        return verifier

    def views(self: PairView, *args: Any, **settings: Any) -> None:
        view(self, *args, **settings)
        learned.append({self.problem_ids[number] for number in set(self.problems_R.tolist())})

    for module in (verifier_phase, verdict_phase):
        monkeypatch.setattr(module, "starting_verifier", begins)
    monkeypatch.setattr(PairView, "__init__", views)
    monkeypatch.setattr(SimultaneousSchedule, "problems", 4)
    outcome, run = played(changed({**GAME, **KINDS[kind], "verifier.keeps": keeps}), tmp_path)
    assert outcome.status == "complete"

    last = {
        "ensemble": [member_weights_name(0, member) for member in (0, 1)],
        "simultaneous": ["round-000-verifier-final"],
    }.get(kind, ["round-000-verifier"])
    initial, kept = begun[: len(last)], begun[len(last) :]
    assert len(set(initial)) == 1
    assert kept == ([version_of(run, name) for name in last] if keeps in ("weights", "both") else initial)

    first, second = minted(run, 0), minted(run, 1)
    assert first in learned
    assert (first | second in learned) == (keeps in ("mints", "both"))
    # With updates, each adds its window to what the round's verifier keeps.
    assert (second in learned) == (keeps in ("nothing", "weights"))


@pytest.mark.parametrize("kind", ["one", "ensemble"])
def test_a_verifier_that_keeps_both_resumes_in_the_middle_of_its_training(kind: str, tmp_path: Path) -> None:
    experiment = changed({**GAME, **KINDS[kind], "verifier.keeps": "both", "store.commit_every": 1})
    _, whole = played(experiment, tmp_path / "whole")
    steps = experiment.verifier.ensemble.size * GAME["verifier.steps"]
    # The beginnings of both phases are events too; then two steps of the second one.
    outcome, stopped = played(experiment, tmp_path / "stopped", stop_at=("train_verifier", steps + 4))
    state = state_of(stopped)
    assert (outcome.status, state["round"], state["phase"], state["step"]) == ("interrupted", 1, "train_verifier", 2)
    outcome, stopped = played(experiment, tmp_path / "stopped", resume=True)
    assert outcome.status == "complete"
    assert not differences(fingerprint(whole.path.parent), fingerprint(stopped.path.parent))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"verifier.steps": 0, "verifier.keeps": "both"}, "verifier.keeps has no effect"),
        ({"verifier.steps": 0, "verifier.ensemble": {"kind": "min", "size": 2}}, "verifier.ensemble has no effect"),
        ({"rollout.max_tokens": 60}, "game.reward.floor = -40"),
    ],
)
def test_what_does_not_fit_a_score_without_reference_is_told(settings: dict[str, Any], named: str) -> None:
    plain = {"verifier.head.reference": 0.0, "game.reward.floor": -40.0}
    assert not any(named in line for line in changed(plain).warnings())
    assert any(named in line for line in changed({**plain, **settings}).warnings())
