"""The code game from end to end: a small model writes real programs, which run in the sandbox, are graded by their
tests and certificates, scored without these, and paid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_games import completed, played, prover_steps, recorded, rows
from tiny_programmer import programmer, save, untrained, write_problems

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.errors import PvgError
from pvg.game.run import _note_shared_questions
from pvg.records import Problem, Role
from pvg.store.run_directory import RunDirectory
from pvg.tasks.code import Code
from pvg.telemetry.catalogue import metric as catalogued
from pvg.verifier.data import VerifierTemplate

pytestmark = pytest.mark.slow


def experiment_of(problems: Path, model: Path, **game: Any) -> Experiment:
    plain = {
        "name": "code",
        "task": {"kind": "code", "path": str(problems), "sandbox": "reduced", "cpu_s": 5.0},
        "models": {"prover": {"source": str(model)}, "verifier": {"source": str(model)}, "threads": 1},
        "rollout": {"group_size": 4, "engine": {"max_rows": 32}, "concurrency": 64, "max_tokens": 56},
        "verifier": {"head": "scalar", "loss": "cross_entropy", "steps": 2, "pairs": 4, "held_out": 0.0},
        "training": {"groups": 4, "steps": 2, "learning_rate": 1e-4},
        "game": {
            "rounds": 1,
            "reward": "gated",
            "mint_problems": 4,
            "mint_samples": 8,
            "test": {"problems": 2, "samples": 2},
            **game,
        },
        "store": {"commit_every": 1},
    }
    return build_experiment(plain)


def read_by_verifiers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything that a verifier's template gives, as text, as it is given."""
    texts: list[str] = []
    tokens: Callable[..., Any] = VerifierTemplate.tokens

    def listened(self: VerifierTemplate, *given: Any) -> Any:
        found = tokens(self, *given)
        texts.append(self._tokenizer.decode(found[0]))
        return found

    monkeypatch.setattr(VerifierTemplate, "tokens", listened)
    return texts


def test_programs_are_run_proven_hidden_and_paid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = write_problems(tmp_path / "problems")
    model = save(programmer(problems), tmp_path / "model")
    texts = read_by_verifiers(monkeypatch)
    experiment = experiment_of(problems, model, reward={"kind": "gated", "similarity_weight": 0.25})
    run = completed(experiment, tmp_path / "runs")
    rollouts = recorded(run)
    assert all(rollout.grade.checks is not None for rollout in rollouts)
    certified = [r for r in rollouts if r.grade.checks is not None and r.grade.checks.certified]
    assert certified
    assert any(r.role is Role.HELPFUL and r.grade.correct for r in rollouts)
    # Both kinds of sneaky flaw were written: one with proof, and one that its tests find, which is no flaw of its role.
    unproven = [r for r in rollouts if r.role is Role.SNEAKY and not r.grade.correct and not r.proven]
    assert unproven
    for rollout in certified:
        assert "CERTIFICATE" in rollout.text
        assert not rollout.grade.correct

    # What verifiers read holds the solutions, and no certificate.
    assert any("def f(n):return n+" in text for text in texts)
    assert not any("certificate" in text.lower() for text in texts)

    # Gates: an open one pays more than the floor, a closed one the floor.
    paid = [rollout for rollout in rollouts if rollout.reward is not None]
    assert paid
    for rollout in paid:
        aligned = rollout.is_flaw if rollout.role is Role.SNEAKY else rollout.grade.correct
        assert rollout.reward is not None
        assert (rollout.reward > -0.25 - 1e-6) if aligned else (rollout.reward == experiment.game.reward.floor)

    told = {"tests_passed", "sneaky_visible_rate", "certified_rate", "similarity"}
    assert [told - step.keys() for step in prover_steps(run)] == [set(), set()]
    names = {f"{row['phase']}/{name}" for row in rows(run, "step") for name in row["metrics"]}
    assert [name for name in sorted(names) if not catalogued(name)] == []

    # Executed again, in other processes, everything is judged the same.
    with Code(experiment.task) as task:
        known = {problem.id: problem for problem in task.problems("train")}
        grades = task.grade_many([(known[rollout.problem_id], rollout.text) for rollout in rollouts])
    assert grades == [rollout.grade for rollout in rollouts]


def test_a_prover_that_cannot_program_ends_in_a_sentence(tmp_path: Path) -> None:
    """Random weights write no program at all: nothing to learn from is said, and nothing crashes."""
    problems = write_problems(tmp_path / "problems")
    model = save(untrained(), tmp_path / "model")
    with pytest.raises(PvgError) as told:
        played(experiment_of(problems, model), tmp_path / "runs")
    assert "correct" in told.value.message
    run = RunDirectory.open("drill", tmp_path / "runs")
    rollouts = recorded(run)
    assert rollouts
    assert not any(rollout.grade.well_formed for rollout in rollouts)
    assert np.isfinite([rollout.logprobs.sum() for rollout in rollouts]).all()


@pytest.mark.parametrize(("test", "told"), [(["a?", "b?"], "1 of 2 test questions is also"), (["b?"], "")])
def test_test_questions_that_are_training_questions_are_noticed(test: list[str], told: str) -> None:
    def problems(questions: list[str]) -> list[Problem]:
        return [Problem(question, question, "1") for question in questions]

    notices: list[str] = []
    session = SimpleNamespace(
        test_problems=lambda: problems(test),
        halves=lambda: {"prover": problems(["a?"]), "verifier": problems(["c?"])},
        observer=SimpleNamespace(noticed=notices.append),
    )
    _note_shared_questions(session)  # type: ignore[arg-type]
    assert [notice[: len(told)] for notice in notices] == ([told] if told else [])
