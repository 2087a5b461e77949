"""What counts as a flaw, and what the style probe may read, where a task executes solutions and conceals a part."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "store"))
from store_samples import rollout

from pvg.evaluation.measures import separability
from pvg.evaluation.opened_run import ScoredRollouts
from pvg.evaluation.runner import solutions_read
from pvg.records import Checks, Grade, Problem, Role
from pvg.verifier.intervals import draws

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


def test_the_style_probe_reads_what_the_verifier_reads() -> None:
    texts = {Role.HELPFUL: "return 1", Role.SNEAKY: "return 1CERTIFICATE: [3]"}
    rollouts = [one(problem, role, text) for problem in PROBLEMS for role, text in texts.items()]
    own = ScoredRollouts(rollouts, np.zeros(len(rollouts), dtype=np.float32), PROBLEMS)
    weights_BP = draws(len(PROBLEMS), 100, 0)
    read = solutions_read(rollouts, Concealing(), encode, end_ids=(0,))
    assert separability(own, read, weights_BP)["overall"].value == 0.5
    whole = [r.completion_ids for r in rollouts]
    assert separability(own, whole, weights_BP)["overall"].value == 1.0
