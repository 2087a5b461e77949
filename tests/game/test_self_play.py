"""Runs of `task.kind = "play"`: what they store, who plays, and what is refused. Kills: test_kill_and_resume.py."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kill_drill import play_experiment, small_experiment
from small_games import completed, played, recorded, rows, state_of
from tiny_programmer import tokenizer, untrained
from transformers import LlamaForCausalLM

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.errors import ConfigurationError, UsageError
from pvg.evaluation.report import check_protocol
from pvg.games import GAMES, open_game
from pvg.games.negotiation import Negotiation
from pvg.records import Split
from pvg.reporting.boards import games_section, newest_games
from pvg.store.checkpoints import read_checkpoint
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.catalogue import metric
from pvg.training.credit import RoleBaseline

pytestmark = pytest.mark.slow


def changed(**task: Any) -> Experiment:
    plain = play_experiment().plain()
    plain["game"]["rounds"] = 1
    plain["training"]["steps"] = 3
    plain["task"] = {"kind": "play", **task}
    return build_experiment(plain)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return completed(play_experiment(), tmp_path_factory.mktemp("play"))


def test_each_round_has_a_prover_and_a_rating_but_no_verifier(finished: RunDirectory) -> None:
    state = state_of(finished)
    assert state["phase"] == "complete"
    assert sorted(state["weights"]) == ["round-000-prover", "round-001-prover"]
    first, second = state["rounds"]
    for row in (first, second):
        for reference in ("random", "greedy", "base"):
            assert row[f"points_low_{reference}"] <= row[f"points_{reference}"] <= row[f"points_high_{reference}"]
    assert "base_points_random" in first
    assert "base_points_random" not in second


def test_decisions_are_rollouts_with_versions_and_rewards(finished: RunDirectory) -> None:
    trained = [rollout for rollout in recorded(finished) if "/train_prover/" in rollout.id]
    assert len({rollout.id for rollout in trained}) == len(trained)
    versions = [rollout.version for rollout in trained]
    assert versions == sorted(versions)
    assert len(set(versions)) == 2 * play_experiment().training.steps
    rewards = [rollout.reward for rollout in trained if rollout.reward is not None]
    assert rewards
    assert any(rollout.reward is None for rollout in trained)  # those of the warmups
    assert {rollout.score for rollout in trained} == {None}


def test_every_metric_is_in_the_catalogue(finished: RunDirectory) -> None:
    for kind, place in (("step", "phase"), ("round", None)):
        found = rows(finished, kind)
        assert found
        for row in found:
            where = row[place] if place else "round"
            assert [name for name in row["metrics"] if metric(f"{where}/{name}") is None] == []


def test_each_batch_has_statistics_per_phase(finished: RunDirectory) -> None:
    found = rows(finished, "play_phases")
    assert len(found) == 2 * play_experiment().training.steps
    for row in found:
        assert {phase["phase"] for phase in row["phases"]} <= {f"offer-{number}" for number in range(1, 5)}
        assert all(phase["decisions"] > 0 and phase["prompt_tokens"] >= 5 for phase in row["phases"])


def test_each_rating_records_a_game_that_the_report_shows(finished: RunDirectory) -> None:
    games = newest_games(finished)
    last = max(record["round"] for record in rows(finished, "game"))
    assert {game.round for game in games} == {last}
    for game in games:
        assert sorted(game.players.values()).count("policy") == 1
        assert all(phase.decisions for phase in game.phases[:-1])
    shown = games_section(finished, 2)
    assert shown.anchor == "games"
    assert any(shown.body)


@pytest.mark.parametrize("opponent", ["greedy", "base"])
def test_against_an_opponent_only_the_policys_seat_is_trained_and_stored(opponent: str, tmp_path: Path) -> None:
    run = completed(changed(opponent=opponent, references=[], warmup=0, groups="phase", reward="dense"), tmp_path)
    seats: dict[str, set[str]] = {}
    for rollout in recorded(run):
        game, seat = rollout.id.rsplit("/", 2)[0], rollout.id.rpartition("-")[2]
        seats.setdefault(game, set()).add(seat)
    assert all(len(found) == 1 for found in seats.values())
    assert {seat for found in seats.values() for seat in found} == {"buyer", "seller"}


def test_every_start_trains_the_policys_seat_also_if_the_opponent_begins(tmp_path: Path) -> None:
    """Groups of the decisions at the fork, one start per batch: about half of them begin with the opponent."""
    plain = changed(opponent="random", references=[], warmup=0).plain()
    plain["training"] |= {"groups": 1, "steps": 6}
    run = completed(build_experiment(plain), tmp_path)
    trained = [rollout for rollout in recorded(run) if rollout.reward is not None]
    assert len(trained) == 6 * plain["rollout"]["group_size"]
    phases = {rollout.id.rsplit("/", 1)[1].partition("-")[0] for rollout in trained}
    assert phases == {"000", "001"}


def test_rae_has_a_baseline_of_each_seat_which_a_resumed_run_goes_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = changed(references=[]).plain()
    plain["training"] |= {"loss": "rae", "steps": 4}
    plain["store"] |= {"commit_every": 1}
    experiment = build_experiment(plain)
    observed: list[tuple[list[str], Any, Any]] = []
    observe = RoleBaseline.observe

    def watched(self: RoleBaseline, roles: Any, rewards_N: Any) -> Any:
        observed.append((list(roles), rewards_N, values_N := observe(self, roles, rewards_N)))
        return values_N

    with monkeypatch.context() as patched:
        patched.setattr(RoleBaseline, "observe", watched)
        whole = completed(experiment, tmp_path / "whole")
    (first, paid_N, _), (second, _, values_N) = observed[:2]
    assert set(first) == set(second) == {"buyer", "seller"}
    for seat in ("buyer", "seller"):  # after one batch, the average is that batch's mean
        mean = paid_N[np.array(first) == seat].astype(np.float64).mean()
        np.testing.assert_allclose(values_N[np.array(second) == seat], mean)
    assert played(experiment, tmp_path / "again", stop_at=("train_prover", 3))[0].status == "interrupted"
    again = played(experiment, tmp_path / "again", resume=True)[1]
    found, expected = (read_checkpoint(run.weights, "round-000-prover")[0] for run in (again, whole))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class Still:
    """A game that is over at its start."""

    def __getattr__(self, name: str) -> Any:
        return getattr(Negotiation(), name)

    def seats(self, state: Any) -> tuple[str, ...]:
        return ()


def test_starts_without_a_decision_are_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "still_game", SimpleNamespace(Still=Still))
    monkeypatch.setitem(GAMES, "still", "still_game:Still")
    with pytest.raises(ConfigurationError, match="decides nothing after the forks of batch 0"):
        completed(changed(game="still", references=[], warmup=0), tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("rollout", {"prefetch": "fresh"}, "rollout.prefetch"),
        ("training", {"dynamic_sampling": 2}, "training.dynamic_sampling"),
        ("training", {"loss": "spo"}, "compares with earlier solutions"),
        ("game", {"stop": "judge_decay"}, "game.stop"),
        ("task", {"game": "chess"}, "Known games"),
    ],
)
def test_what_self_play_cannot_do_is_refused(key: str, value: dict[str, Any], says: str, tmp_path: Path) -> None:
    plain = changed().plain()
    plain[key] |= value
    with pytest.raises(ConfigurationError, match=says):
        completed(build_experiment(plain), tmp_path)


def diplomacy(folder: Path, positions: int, prompts: str) -> Experiment:
    """One step of Diplomacy with an untrained character model."""
    config = untrained().config
    config.max_position_embeddings = positions
    fast = tokenizer()
    fast.model_max_length = positions
    fast.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    plain = changed(game="diplomacy", problems=8, test_problems=2, warmup=1, horizon=2, references=["greedy"]).plain()
    plain["models"]["prover"] = {"source": str(folder)}
    plain["rollout"] |= {"group_size": 2, "max_tokens": 12}
    plain["prompts"] = {"kind": prompts}
    plain["training"] |= {"groups": 2, "steps": 1}
    plain["game"]["test"] = {"problems": 1, "samples": 1}
    return build_experiment(plain)


@pytest.mark.drill
def test_diplomacy_trains_all_seats_that_decide_together(tmp_path: Path) -> None:
    """With a random policy all orders are unreadable, so units hold; the scripts do not, and matches have results."""
    run = completed(diplomacy(tmp_path / "model", 4096, "chat"), tmp_path)
    trained = [rollout for rollout in recorded(run) if rollout.reward is not None]
    seats = {rollout.id.rpartition("-")[2] for rollout in trained}
    assert len(seats) > 2
    sizes = Counter((rollout.group, rollout.prompt_ids.tobytes()) for rollout in trained)
    assert set(sizes.values()) == {2}  # two continuations: the same prompt within a group
    assert state_of(run)["rounds"][0]["points_greedy"] < 0.5


def test_a_prompt_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """The openings fit, as the run checks at its start. Prompts of other seats are longer."""
    splits: list[tuple[Split, int]] = [("train", 8), ("test", 2)]
    openings = [open_game("diplomacy").opening(split, number) for split, count in splits for number in range(count)]
    fits = max(len(problem.question) for problem in openings) + 12
    with pytest.raises(ConfigurationError, match=r"A prompt of the game has \d+ tokens"):
        completed(diplomacy(tmp_path / "model", fits, "plain"), tmp_path)


def test_it_has_no_verifier_to_evaluate() -> None:
    check_protocol(small_experiment(), ["tax"])
    with pytest.raises(UsageError, match="has none"):
        check_protocol(changed(), [])
