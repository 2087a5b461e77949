"""The two halves of the training problems: one for the prover's RL, one for the verifier's data.

Invariant: no problem is in both (invariant 4). The half follows from the id alone, so it stays the same when problems
are added, reordered or read on another machine.
"""

from __future__ import annotations

import hashlib

from pvg.records import Half, Problem
from pvg.tasks.task import Task


def half_of(problem_id: str) -> Half:
    """The half of a problem: the lowest bit of the first byte of sha256(id), about 50/50."""
    bit = hashlib.sha256(problem_id.encode()).digest()[0] & 1
    return "verifier" if bit else "prover"


def problems_of_half(task: Task, half: Half) -> list[Problem]:
    """The training problems of `half`, in the task's order."""
    return [problem for problem in task.problems("train") if half_of(problem.id) == half]
