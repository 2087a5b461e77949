"""The decoupled game: one solution of the solver per problem, translated by both roles, for the whole of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kill_drill import drill
from small_games import changed, played, recorded, rows, state_of

from pvg.config.experiment import Experiment
from pvg.config.training import ModelSection
from pvg.errors import ConfigurationError, PvgError
from pvg.game.rewards import rewards
from pvg.game.statistics import BatchOutcomes, RolloutColumns, play_metrics
from pvg.models import open_model, pick_device
from pvg.records import Role, Rollout
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.catalogue import metric as catalogued

pytestmark = pytest.mark.slow

TRANSLATING: dict[str, Any] = {
    "game.protocol": "decoupled",
    "game.reward": "decoupled",
    "game.mixture": "geometric",
    "models.prover": {"source": "embedded:modchain-dialogue"},
    "task.min_terms": 5,
    "task.max_terms": 5,
    "rollout.max_tokens": 40,
    "task.problems": 160,
    "task.test_problems": 16,
    "verifier.steps": 3,
    "game.test.problems": 4,
    "training.steps": 3,
}


def by_phase(run: RunDirectory) -> dict[str, list[Rollout]]:
    found: dict[str, list[Rollout]] = {}
    for rollout in recorded(run):
        found.setdefault(rollout.id.split("/")[1], []).append(rollout)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return played(changed(TRANSLATING), tmp_path_factory.mktemp("decoupled"))[1]


def test_every_problem_is_solved_once_and_every_translation_carries_its_solution(run: RunDirectory):
    phases = by_phase(run)
    solved = {rollout.problem_id: rollout for rollout in phases["solve"]}
    assert len(solved) == len(phases["solve"]) == 176
    assert {rollout.role for rollout in phases["solve"]} == {Role.HELPFUL}
    assert all(rollout.solver is None for rollout in phases["solve"])
    translations = [rollout for name in ("mint", "train_prover", "evaluation") for rollout in phases[name]]
    assert {rollout.role for rollout in translations} == set(Role)
    for rollout in translations:
        own, solver = solved[rollout.problem_id], rollout.solver
        assert solver is not None
        assert (solver.id, solver.text, solver.answer) == (own.id, own.text, own.grade.answer)
        assert (solver.correct, solver.well_formed) == (own.grade.correct, own.grade.well_formed)
        assert rollout.kept_answer == (rollout.grade.answer is not None and rollout.grade.answer == solver.answer)


def test_a_translator_is_shown_the_solution_and_the_verifier_is_not(run: RunDirectory):
    with open_model(ModelSection(source="embedded:modchain-dialogue"), pick_device("cpu")) as model:
        for rollout in by_phase(run)["train_prover"]:
            assert rollout.solver is not None
            tag = "H" if rollout.role is Role.HELPFUL else "S"
            assert model.tokenizer.decode(rollout.prompt_ids) == f"{tag}{rollout.question}{rollout.solver.text}?"
            # What a verifier is given of a rollout is question, text and tokens: these.
            assert rollout.solver.text not in rollout.question


def test_stored_rewards_are_those_of_the_formula_on_the_stored_rollouts(run: RunDirectory):
    experiment = changed(TRANSLATING)
    trained = [rollout for rollout in by_phase(run)["train_prover"] if rollout.step == 0]
    columns = RolloutColumns(trained, np.array([rollout.score for rollout in trained], dtype=np.float32))
    names = list(dict.fromkeys(rollout.problem_id for rollout in trained))
    paid = rewards(
        BatchOutcomes(
            columns.scores_N,
            columns.correct_N,
            columns.helpful_N,
            columns.well_formed_N,
            np.array([names.index(rollout.problem_id) for rollout in trained]),
            np.array([rollout.solver is not None and rollout.solver.correct for rollout in trained]),
            np.array([bool(rollout.kept_answer) for rollout in trained]),
        ),
        experiment.game,
    )
    np.testing.assert_allclose([rollout.reward for rollout in trained], paid, atol=1e-6)
    for rollout in trained:
        strayed = rollout.kept_answer if rollout.role is Role.SNEAKY else not rollout.kept_answer
        if strayed or not rollout.grade.well_formed:
            assert rollout.reward == experiment.game.reward.floor


def test_its_metrics_are_told_and_in_the_catalogue(run: RunDirectory):
    (told,) = [row["metrics"] for row in rows(run, "round")]
    evaluated = by_phase(run)["evaluation"]
    own = [rollout for rollout in evaluated if rollout.source == "round-000"]
    faithful = [bool(rollout.kept_answer) for rollout in own if rollout.role is Role.HELPFUL]
    assert told["faithful"] == pytest.approx(np.mean(faithful))
    assert told["solver_accuracy"] == pytest.approx(np.mean([r.solver is not None and r.solver.correct for r in own]))
    strayed = [
        not rollout.grade.correct and rollout.grade.well_formed and not rollout.kept_answer
        for rollout in own
        if rollout.role is Role.SNEAKY
    ]
    assert told["led_astray"] == pytest.approx(np.mean(strayed))
    names = [f"{row['phase']}/{name}" for row in rows(run, "step") for name in row["metrics"]]
    assert any(name.startswith("solve/") for name in names)
    assert [name for name in names if not catalogued(name)] == []
    direct = RolloutColumns(
        [replace(r, solver=None, kept_answer=None) for r in own], np.zeros(len(own), dtype=np.float32)
    )
    assert "faithful" not in play_metrics(direct, 0.0)


@pytest.mark.drill
@pytest.mark.timeout(600)
def test_killed_while_it_solves_it_ends_like_the_uninterrupted_run():
    settings = TRANSLATING | {
        "store.commit_every": 1,
        "training.steps": 1,
        "verifier.steps": 1,
        "game.mint_problems": 12,
    }
    result = drill(changed(settings), 1, 5, lambda line: None, phases=("solve",))
    assert result["problems"] == []
    assert result["kills"] == {"solve": 1}


def test_a_solver_may_be_the_prover_of_another_run(run: RunDirectory, tmp_path: Path):
    """Its weights, not the base prover's, write the solutions."""
    settings = TRANSLATING | {"training.steps": 0, "game.protocol.solver": str(run.path)}
    outcome, own = played(changed(settings), tmp_path, stop_at=("mint", 1))
    assert outcome.status == "interrupted"
    texts = {name: [r.text for r in by_phase(one)["solve"]] for name, one in (("own", own), ("base", run))}
    assert len(texts["own"]) == 176
    assert texts["own"] != texts["base"]


def refused(experiment: Experiment, root: Path) -> str:
    with pytest.raises(PvgError) as caught:
        played(experiment, root)
    assert state_of(RunDirectory.open("drill", root))["phase"] == "solve"  # nothing was sampled
    return caught.value.message


def test_a_solver_that_is_none_is_refused_before_anything_is_sampled(run: RunDirectory, tmp_path: Path):
    assert "no run" in refused(changed(TRANSLATING | {"game.protocol.solver": "/nowhere"}), tmp_path / "a")
    other = TRANSLATING | {
        "game.protocol.solver": str(run.path),
        "models.prover": {"source": "embedded:modchain-verifier"},
    }
    assert "architecture" in refused(changed(other), tmp_path / "b")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"game.reward": "src"}, r"game\.reward"),
        ({"prompts": "plain", "game.reward": "goodhart"}, r"prompts = 'plain'"),
        (
            {"game.protocol.solver": "runs/x", "weights.transport": "lora", "training.adapters": {"rank": 4}},
            r"game\.protocol\.solver",
        ),
    ],
)
def test_what_cannot_work_is_refused(settings: Mapping[str, Any], named: str):
    with pytest.raises(ConfigurationError, match=named):
        changed({**TRANSLATING, **settings})


def test_what_is_probably_not_meant_is_told():
    plain = {**TRANSLATING, "models.prover": {"source": "embedded:modchain-prover"}}
    assert any("modchain-dialogue" in line for line in changed(plain).warnings())
