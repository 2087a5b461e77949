"""What counts as a flaw, and what the style probe may read, where a task executes solutions and conceals a part."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "store"))
from store_samples import rollout

from pvg.config.training import Verifier
from pvg.evaluation.intervals import draws
from pvg.evaluation.measures import calibration, separability
from pvg.evaluation.opened_run import ScoredRollouts
from pvg.evaluation.runner import flawed, solutions_read
from pvg.records import Checks, Grade, Problem, Role

PROBLEMS = [Problem(f"p{place}", "", "") for place in range(12)]


class Concealing:
    """A task whose sneaky solutions end with a certificate."""

    def shown(self, completion: str) -> str:
        return completion.split("CERTIFICATE", maxsplit=1)[0]

    def flaw(self, problem: Problem, completion: str) -> int:
        return 0

    def cuts(self, completion: str) -> list[int]:
        return [len(completion)]


def encode(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)


def one(problem: Problem, role: Role, text: str, *, correct: bool = False, checks: Checks | None = None):
    grade = Grade(correct, True, checks=checks)
    return replace(rollout(0), problem_id=problem.id, role=role, text=text, completion_ids=encode(text), grade=grade)


def test_a_flaw_without_proof_is_none() -> None:
    proven, unproven = Checks(1.0, 0.5, True), Checks(1.0, 0.5, False)
    rollouts = [one(PROBLEMS[0], Role.SNEAKY, "x", checks=checks) for checks in (proven, unproven, None)]
    assert ScoredRollouts(rollouts, np.zeros(3, dtype=np.float32), PROBLEMS).flaws_N.tolist() == [True, False, True]
    located = flawed(Concealing(), rollouts, PROBLEMS, 9)
    assert [rollout for rollout, _, _ in located] == [rollouts[0], rollouts[2]]


def test_the_style_probe_reads_what_the_verifier_reads() -> None:
    texts = {Role.HELPFUL: "return 1", Role.SNEAKY: "return 1CERTIFICATE: [3]"}
    rollouts = [one(problem, role, text) for problem in PROBLEMS for role, text in texts.items()]
    own = ScoredRollouts(rollouts, np.zeros(len(rollouts), dtype=np.float32), PROBLEMS)
    weights_BP = draws(len(PROBLEMS), 100, 0)
    read = solutions_read(rollouts, Concealing(), encode, end_ids=(0,))
    assert separability(own, read, weights_BP)["overall"]["value"] == 0.5
    whole = [r.completion_ids for r in rollouts]
    assert separability(own, whole, weights_BP)["overall"]["value"] == 1.0


def test_a_style_of_easier_problems_is_none_of_a_role() -> None:
    """Each problem has its word, and the correct sneaky solutions are of other problems than most helpful ones."""
    rollouts = []
    for place, problem in enumerate(PROBLEMS):
        text = "aab" if place % 2 else "ccd"
        rollouts += [one(problem, Role.HELPFUL, text, correct=True)] * (1 if place % 2 else 6)
        rollouts += [one(problem, Role.SNEAKY, text, correct=True)] * (6 if place % 2 else 1)
    own = ScoredRollouts(rollouts, np.zeros(len(rollouts), dtype=np.float32), PROBLEMS)
    found = separability(own, [r.completion_ids for r in rollouts], draws(len(PROBLEMS), 100, 0))
    assert found["overall"]["value"] > 0.7
    assert found["correct"]["value"] == 0.5


@pytest.mark.parametrize(
    ("loss", "ensemble", "known"),
    [("cross_entropy", "none", True), ("cross_entropy", "mean", False), ("bradley_terry", "none", False)],
)
def test_only_one_member_trained_by_cross_entropy_tells_probabilities(loss: str, ensemble: str, known: bool) -> None:
    rollouts = [one(problem, Role.HELPFUL, "x", correct=place > 5) for place, problem in enumerate(PROBLEMS)]
    own = ScoredRollouts(rollouts, np.linspace(-1, 1, len(rollouts), dtype=np.float32), PROBLEMS)
    found = calibration(own, Verifier(loss=loss, ensemble=ensemble), draws(len(PROBLEMS), 100, 0))
    assert found["raw_is_probability"] is known
