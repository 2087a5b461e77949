"""Games whose verifier writes verdicts: it learns which are right, scores by votes, resumes, and is measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kill_drill import differences, fingerprint
from small_games import changed, completed, played, recorded, rows, state_of
from tiny_chat import chatting
from transformers import LlamaConfig, LlamaForCausalLM

from pvg.api import Run
from pvg.config.experiment import Experiment
from pvg.config.game import SimultaneousSchedule
from pvg.errors import ConfigurationError, PvgError
from pvg.evaluation.trace_report import summarised
from pvg.records import Rollout
from pvg.store.pairs import is_held_out
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.catalogue import metric as catalogued
from pvg.traces.loaders import load_traces
from pvg.traces.measures import MeasuredTrace
from pvg.verifier.data import log_odds, read_verdict

HEAD = {"kind": "generative", "votes": 3, "tokens": 3}


def experiment(**settings: Any) -> Experiment:
    plain = {"models.verifier": {"source": "embedded:modchain-prover"}, "verifier.head": HEAD, "verifier.held_out": 0.3}
    return changed({**plain, **settings})


def verdicts(run: RunDirectory) -> list[Rollout]:
    return [rollout for rollout in recorded(run) if "/train_verifier/" in rollout.id]


# --- verdicts and votes -----------------------------------------------------------------------------------------------


def test_a_score_is_the_log_odds_of_the_readable_votes() -> None:
    assert log_odds([0, 0, 0, 2]) == pytest.approx(math.log(3.5 / 1.5))  # (3 + 1/2) / (4 + 1) against the rest
    assert log_odds([1, 7]) == pytest.approx(math.log(0.5 / 2.5))
    assert log_odds([0, None, 3, None]) == 0.0
    assert log_odds([None, None]) == 0.0
    assert log_odds([0]) == pytest.approx(math.log(3.0))


@pytest.mark.parametrize(
    ("style", "text", "verdict"),
    [
        ("tag", "0", 0),
        ("tag", "4", 4),
        ("tag", "12", 12),
        ("tag", "00", None),
        ("tag", "", None),
        ("tag", "04", None),
        ("tag", "4 ", None),
        ("tag", "٣", None),
        ("chat", "Step 1 is right.\nVerdict: correct\n", 0),
        ("text", "Verdict: correct\nNo.\nVerdict: wrong, step 12", 12),
        ("chat", "Verdict: wrong, step 0", None),
        ("chat", "Verdict: wrong", None),
        ("chat", "verdict: correct", None),
        ("chat", "Verdict: correct\nVerdict: wrong, step", None),
        ("chat", "0", None),
    ],
)
def test_only_the_asked_form_of_a_verdict_is_readable(style: Any, text: str, verdict: int | None) -> None:
    assert read_verdict(text, style) == verdict


@given(check=st.text(max_size=200), step=st.integers(0, 9999), style=st.sampled_from(["tag", "chat", "text", "plain"]))
def test_any_text_has_a_verdict_or_none(check: str, step: int, style: Any) -> None:
    found = read_verdict(check, style)
    assert found is None or 0 <= found <= 9999
    line = f"Verdict: wrong, step {step}" if step else "Verdict: correct"
    assert read_verdict(f"{check}\n{line}", "chat") == step


# --- games ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return completed(experiment(**{"game.rounds": 2}), tmp_path_factory.mktemp("game"))


@pytest.mark.slow
def test_verdicts_are_paid_for_being_right_and_never_about_held_out_problems(game: RunDirectory) -> None:
    minted = {(r.round, r.problem_id): r for r in recorded(game) if "/mint/" in r.id}
    trained = [r for r in verdicts(game) if "held-out" not in r.id]
    assert len(trained) == 2 * 7 * 8 * 4
    for verdict in trained:
        named = read_verdict(verdict.text, "tag")
        assert verdict.grade.well_formed == (named is not None)
        right = named is not None and (named == 0) == (verdict.reference == "0")
        assert (verdict.grade.correct, verdict.reward) == (right, float(right))
        assert (verdict.round, verdict.problem_id) in minted
        assert not is_held_out(verdict.problem_id, 0.3)
    batch = [r for r in trained if r.round == 0 and r.step == 0]
    assert sum(r.reference == "0" for r in batch) == len(batch) / 2
    assert all(is_held_out(r.problem_id, 0.3) for r in verdicts(game) if "held-out" in r.id)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("verifier.engine", "vllm"),
        ("verifier.ensemble", "mean"),
        ("rollout.engine", "vllm"),
        ("cluster", "local"),
        ("cluster", "ray"),
        ("rollout.group_size", 1),
    ],
)
def test_what_a_generative_verifier_cannot_do_is_refused_before_the_mint(key: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"cannot be combined with {key} = .*; set .*"):
        experiment(**{"game.reward": "goodhart", key: value})


@pytest.mark.slow
def test_the_phase_tells_accuracy_and_wrong_reasons(game: RunDirectory) -> None:
    for row in rows(game, "step") + rows(game, "phase"):
        if row["phase"] == "train_verifier":
            assert [name for name in row["metrics"] if not catalogued(f"train_verifier/{name}")] == []
    (phase,) = (r for r in rows(game, "phase") if (r["phase"], r["round"]) == ("train_verifier", 0))
    held_out = [r for r in verdicts(game) if r.round == 0 and "held-out" in r.id]
    assert phase["metrics"]["verdict_accuracy"] == np.mean([r.grade.correct for r in held_out])
    assert phase["metrics"]["unreadable"] == np.mean([not r.grade.well_formed for r in held_out])
    blamed = [r for r in held_out if r.reference.isdecimal() and r.reference != "0" and r.grade.correct]
    expected = np.mean([r.grade.answer != r.reference for r in blamed]) if blamed else None
    assert phase["metrics"]["wrong_reason"] == expected
    traces = load_traces(f"{game.path}/round-0", {}, game.path.parent, None)  # what pvg measure reads
    record = summarised(traces, [MeasuredTrace(trace, [], [], [], {}) for trace in traces.traces])
    assert record.measures["wrong_reason"].value == expected


@pytest.mark.slow
def test_a_run_opens_the_scores_that_its_game_had(game: RunDirectory) -> None:
    sampled = [r for r in recorded(game) if r.round == 1 and "/train_prover/" in r.id][:20]
    with Run(game.path).open_scorer(1) as scorer:
        again = [float(scorer.score_texts(r.question, [r.text])[0]) for r in sampled]
    assert again == [r.score for r in sampled]
    possible = {np.float32(log_odds([0] * yes + [1] * no)) for yes in range(4) for no in range(4 - yes)}
    assert set(map(np.float32, again)) <= possible


@pytest.mark.drill
def test_the_shipped_critic_gives_more_right_verdicts_after_training(tmp_path: Path) -> None:
    """Of 256 verdicts on 32 solutions per step; the rounds of the game begin from the same critic."""
    settings = {
        "models.prover": {"source": "embedded:modchain-prover"},
        "models.verifier": {"source": "embedded:modchain-critic"},
        "task": {"kind": "modchain", "min_terms": 5, "max_terms": 5, "problems": 512, "test_problems": 64},
        "rollout.max_tokens": 40,
        "rollout.group_size": 8,
        "rollout.engine": {"max_rows": 256},
        "verifier": {"head": {"kind": "generative", "votes": 8, "tokens": 2}, "steps": 24, "pairs": 16},
        "verifier.learning_rate": 3e-4,
        "game.rounds": 2,
        "game.mint_problems": 48,
        "training.steps": 1,
    }
    run = completed(changed(settings), tmp_path)
    for round_ in range(2):
        steps = [
            r["metrics"]["verdict_accuracy"]
            for r in rows(run, "step")
            if (r["phase"], r["round"]) == ("train_verifier", round_)
        ]
        assert np.mean(steps[-6:]) > np.mean(steps[:6]) + 0.02, steps


@pytest.mark.drill
@pytest.mark.parametrize("stop_at", [("train_verifier", 4), ("train_verifier", 8), ("train_prover", 4)])
def test_stopped_and_resumed_it_ends_like_the_uninterrupted_run(stop_at: tuple[str, int], tmp_path: Path) -> None:
    """Event 8 of the verifier's phase is its last step, after which it has yet to judge held-out solutions."""
    whole, stopped, settings = tmp_path / "whole", tmp_path / "stopped", experiment()
    completed(settings, whole)
    outcome, run = played(settings, stopped, stop_at=stop_at)
    assert (outcome.status, state_of(run)["phase"]) == ("interrupted", stop_at[0])
    played(settings, stopped, resume=True)
    assert differences(fingerprint(stopped), fingerprint(whole)) == []


BESIDE = {
    "game.schedule": "simultaneous",
    "game.schedule.every": 2,
    "game.test.problems": 4,
    "models.prover": {"source": "embedded:modchain-prover"},
    "models.verifier": {"source": "embedded:modchain-critic"},  # writes readable verdicts: a signal in each step
    "task.min_terms": 5,
    "task.max_terms": 5,
    "rollout.max_tokens": 40,
}


@pytest.fixture
def small_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimultaneousSchedule, "problems", 6)


@pytest.mark.slow
@pytest.mark.usefixtures("small_updates")
def test_beside_the_prover_it_learns_from_fresh_solutions_too_and_pays_by_the_newest_verdicts(tmp_path: Path) -> None:
    run = completed(experiment(**BESIDE), tmp_path)
    steps = [r["metrics"] for r in rows(run, "step") if r["phase"] == "train_prover"]
    assert ["verdict_accuracy" in metrics for metrics in steps] == [False, True] * 3 + [False]
    assert [name for metrics in steps for name in metrics if not catalogued(f"train_prover/{name}")] == []
    every = [rollout for rollout in verdicts(run) if "held-out" not in rollout.id]
    assert {rollout.step for rollout in every} == set(range(7 + 6))  # the steps of the phase, and of three updates
    beside = [rollout for rollout in every if rollout.step >= 7]
    fresh = {rollout.problem_id for rollout in recorded(run) if "/fresh/" in rollout.id}
    assert {rollout.problem_id for rollout in beside} & fresh
    assert not any(is_held_out(rollout.problem_id, 0.3) for rollout in beside)
    assert all(rollout.reward == float(rollout.grade.correct) for rollout in beside)
    scored = {r.step: r.verifier_version for r in recorded(run) if "/train_prover/" in r.id}
    assert scored[0] == scored[1] != scored[2] == scored[3] != scored[4]
    with Run(run.path).open_scorer(0) as scorer:  # the last verifier of the round
        assert scorer.version == scored[6]


@pytest.mark.drill
@pytest.mark.usefixtures("small_updates")
@pytest.mark.parametrize("stop_at", [("train_prover", 3), ("train_prover", 4)])
def test_beside_the_prover_it_resumes_like_the_uninterrupted_run(stop_at: tuple[str, int], tmp_path: Path) -> None:
    whole, stopped, settings = (
        tmp_path / "whole",
        tmp_path / "stopped",
        experiment(**BESIDE, **{"store.commit_every": 1}),
    )
    completed(settings, whole)
    assert played(settings, stopped, stop_at=stop_at)[0].status == "interrupted"
    played(settings, stopped, resume=True)
    assert differences(fingerprint(stopped), fingerprint(whole)) == []


@pytest.mark.slow
def test_it_scores_solutions_that_were_sampled_ahead(tmp_path: Path) -> None:
    run = completed(experiment(**{"rollout.prefetch": "fresh"}), tmp_path)
    sampled = [rollout for rollout in recorded(run) if "/train_prover/" in rollout.id]
    assert any(rollout.version for rollout in sampled)
    with Run(run.path).open_scorer(0) as scorer:
        again = [float(scorer.score_texts(r.question, [r.text])[0]) for r in sampled[:20]]
    assert again == [r.score for r in sampled[:20]]


@pytest.mark.slow
def test_without_steps_a_frozen_model_judges(tmp_path: Path) -> None:
    run = completed(experiment(**{"verifier.steps": 0, "training.steps": 1}), tmp_path)
    assert {"/held-out/" in r.id for r in verdicts(run)} == {True}
    (phase,) = (r for r in rows(run, "phase") if r["phase"] == "train_verifier")
    assert phase["metrics"]["held_out"] > 0


COIN = """
from pvg.records import Grade, Problem
class Coin:
    def problems(self, split):
        return [Problem(f"{split}-{number}", f"Toss coin {number}.", "") for number in range(40)]
    def grade(self, problem, completion):
        return Grade(correct=len(completion) % 2 == 0, well_formed=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("style", ["chat", "text"])
def test_a_model_that_writes_no_verdict_is_paid_nothing_and_gives_even_odds(style: str, tmp_path: Path) -> None:
    (tmp_path / "coin.py").write_text(COIN)
    folder, tokenizer = tmp_path / "model", chatting()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=tokenizer.vocab_size, max_position_embeddings=2048, eos_token_id=0, **sizes)
    ).save_pretrained(folder)
    tokenizer.save(folder)
    settings = {
        "task": {"kind": "custom", "source": f"{tmp_path / 'coin.py'}:Coin"},
        "prompts": style,
        "models.prover": {"source": f"{folder}"},
        "models.verifier": {"source": f"{folder}"},
        "verifier.steps": 2,
        "verifier.pairs": 2,
        "training.steps": 1,
    }
    run = completed(experiment(**settings), tmp_path / "runs")
    assert all("Verdict: wrong, step N" in tokenizer.decode(r.prompt_ids) for r in verdicts(run))
    assert not any(r.grade.well_formed or r.reward for r in verdicts(run))
    assert {r.score for r in recorded(run) if "/train_prover/" in r.id} == {0.0}
    (phase,) = (r for r in rows(run, "phase") if r["phase"] == "train_verifier")
    found = {
        name: phase["metrics"][name] for name in ("unreadable", "verdict_accuracy", "wrong_reason", "verifier_auc")
    }
    assert found == {"unreadable": 1.0, "verdict_accuracy": 0.0, "wrong_reason": None, "verifier_auc": 0.5}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"verifier.ensemble": "mean"}, "verifier.ensemble"),
        ({"verifier.engine": "vllm"}, "verifier.engine"),
        ({"cluster": {"kind": "local", "workers": 2}}, "cluster"),
        ({"verifier.loss": "cross_entropy"}, "verifier.loss"),
        ({"rollout.group_size": 1, "training.loss": "spo"}, "rollout.group_size"),
        ({"verifier.head": "implicit", "verifier.steps": 0}, "verifier.steps = 0"),
    ],
)
def test_what_cannot_be_combined_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        experiment(**settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"verifier.head": {**HEAD, "tokens": 110}}, "models.verifier takes at most 128 tokens"),
        ({"verifier.micro_batch_tokens": 30}, "verifier.micro_batch_tokens = 30"),
        ({"prompts": "text"}, "cannot express"),
    ],
)
def test_a_verdict_that_does_not_fit_is_refused_before_the_mint(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(PvgError, match=says):
        played(experiment(**settings), tmp_path)
