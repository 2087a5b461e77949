"""A growing game: each round adds problems to the mint and steps to the verifier."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kill_drill import differences, drill, fingerprint
from small_games import changed, played, recorded, rows, state_of

from pvg.config.experiment import Experiment
from pvg.config.game import SimultaneousSchedule
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards
from pvg.verifier.data import PairSource

pytestmark = pytest.mark.slow

GROWING: dict[str, Any] = {
    "game.rounds": 3,
    "game.growing": True,
    "game.mint_problems": 8,
    "game.test.problems": 4,
    "verifier.steps": 3,
    "training.steps": 2,
}


def growing(**settings: Any) -> Experiment:
    return changed({**GROWING, **settings})


def minted(run: RunDirectory, round_: int) -> dict[str, str]:
    """The sources of a round's mint by problem."""
    shards = sorted((run.path / "rollouts" / f"round-{round_:03d}").glob("mint-*.arrow"))
    reader = RolloutShards(run.path)
    return {row.problem_id: row.source for shard in shards for row in reader.read(str(shard.relative_to(run.path)))}


def verifier_steps(run: RunDirectory) -> list[int]:
    """Steps of the verifier's phase in each round."""
    counts = [0, 0, 0]
    for row in rows(run, "step"):
        counts[row["round"]] += row["phase"] == "train_verifier"
    return counts


def test_each_round_adds_the_problems_and_steps_of_the_first(tmp_path: Path) -> None:
    outcome, run = played(growing(), tmp_path)
    assert outcome.status == "complete"
    assert verifier_steps(run) == [3, 6, 9]
    mints = [minted(run, round_) for round_ in range(3)]
    assert [len(mint) for mint in mints] == [8, 16, 24]
    # As many problems of each prover as the first mint has of the base prover, and no problem twice.
    assert [sorted(mint.values()) for mint in mints] == [
        ["base"] * 8,
        ["base"] * 8 + ["round-000"] * 8,
        ["base"] * 8 + ["round-000"] * 8 + ["round-001"] * 8,
    ]
    assert len(mints[0] | mints[1] | mints[2]) == 8 + 16 + 24


def test_the_first_round_is_that_of_a_game_that_does_not_grow(tmp_path: Path) -> None:
    _, grown = played(growing(**{"game.rounds": 1}), tmp_path / "growing")
    _, constant = played(growing(**{"game.rounds": 1, "game.growing": False}), tmp_path / "constant")
    assert not differences(fingerprint(grown.path.parent), fingerprint(constant.path.parent))


def test_the_base_mixture_has_solutions_of_the_base_prover_only(tmp_path: Path) -> None:
    _, run = played(growing(**{"game.mixture": "base"}), tmp_path)
    assert [sorted(minted(run, round_).values()) for round_ in range(3)] == [["base"] * 8, ["base"] * 16, ["base"] * 24]


def test_a_growing_game_resumes_in_the_middle_of_a_verifier(tmp_path: Path) -> None:
    """The drill below has the same without an ensemble."""
    first, step = 6, 9  # steps of round 0; a step of round 1, in the last member
    experiment = growing(**{"game.rounds": 2, "verifier.ensemble": {"kind": "mean", "size": 2}})
    _, whole = played(experiment, tmp_path / "whole")
    # The beginnings of both phases are events too.
    outcome, stopped = played(experiment, tmp_path / "stopped", stop_at=("train_verifier", 2 + first + step))
    state = state_of(stopped)
    assert outcome.status == "interrupted"
    assert (state["round"], state["phase"], state["step"]) == (1, "train_verifier", step)
    outcome, stopped = played(experiment, tmp_path / "stopped", resume=True)
    assert outcome.status == "complete"
    assert not differences(fingerprint(whole.path.parent), fingerprint(stopped.path.parent))


# --- with simultaneous play -------------------------------------------------------------------------------------------

TURNS: dict[str, Any] = {
    "game.rounds": 2,
    "game.schedule": "simultaneous",
    "game.schedule.every": 2,
    "training.steps": 5,
}


def test_with_simultaneous_play_the_turns_are_those_of_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier phase of 3 steps, then one of 6; in both rounds, an update of 2 steps after batches 2 and 4."""
    steps: list[int] = []
    drawn = PairSource._batch
    monkeypatch.setattr(PairSource, "_batch", lambda self, step: steps.append(step) or drawn(self, step))
    monkeypatch.setattr(SimultaneousSchedule, "problems", 6)
    experiment = growing(**TURNS)
    outcome, run = played(experiment, tmp_path)
    assert outcome.status == "complete"
    assert verifier_steps(run)[:2] == [3, 6]
    assert [len(minted(run, round_)) for round_ in range(2)] == [8, 16]
    updates = [(row["round"], row["step"]) for row in rows(run, "step") if "verifier_loss" in row["metrics"]]
    assert updates == [(0, 2), (0, 4), (1, 2), (1, 4)]
    # Each round's verifier starts again, and its updates continue the steps of its phase.
    assert steps == [*range(3 + 4), *range(6 + 4)]
    assert experiment.arithmetic().optimizer_steps == len(steps) + 2 * 5
    # 6 problems with 4 solutions each, after both turns of both rounds
    fresh = [rollout.id.partition("/")[0] for rollout in recorded(run) if "/fresh/" in rollout.id]
    assert Counter(fresh) == {"000": 2 * 6 * 4, "001": 2 * 6 * 4}


@pytest.mark.drill
@pytest.mark.timeout(900)  # of a busy machine
def test_killed_in_both_rounds_and_resumed_it_ends_like_the_uninterrupted_run() -> None:
    """Two kills in each phase, one after the other. A kill in the verifier's phase that follows one in the prover's
    comes in the second round."""
    experiment = growing(**TURNS, **{"store.commit_every": 1})
    result = drill(experiment, 4, 5, lambda line: None, phases=("train_verifier", "train_prover"))
    assert result["problems"] == []
    assert sum(result["kills"].values()) == 4
