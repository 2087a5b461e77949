"""Solutions whose grade is known: the reference answer in the documented form, and near misses.

`pvg train --dry-run` and `pvg task check` show how a task grades them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from pvg.records import Problem
from pvg.tasks.task import Task, WritesSolutions
from pvg.tasks.wordings import wording_of

OTHERS = 8  # answers of other problems that are tried
NONSENSE = "?"


@dataclass(frozen=True, slots=True)
class KnownSolution:
    """A solution that must be graded `correct`. `name`: what it is. `certain`: False for the answer of another problem,
    which may be right here too."""

    name: str
    text: str
    correct: bool
    certain: bool = True


def correct_solution(task: Task, problem: Problem) -> KnownSolution | None:
    """The task's own solution, or the reference answer in the form of the problem's wording. None if the task has no
    such form, or if the problem has no reference answer."""
    if isinstance(task, WritesSolutions):
        return KnownSolution("a correct solution", task.written(problem, True), True)
    wording = wording_of(problem)
    if not wording.form or not problem.answer:
        return None
    return KnownSolution("the reference answer", wording.written(problem.answer), True)


def wrong_solutions(task: Task, problem: Problem, others: Iterable[Problem]) -> Iterator[KnownSolution]:
    """Near misses: a wrong solution of the task, answers of `others`, the form without an answer, and an empty text."""
    wording = wording_of(problem)
    if isinstance(task, WritesSolutions):
        yield KnownSolution("a wrong solution", task.written(problem, False), False)
    elif wording.form and problem.answer:
        seen = {problem.answer: None} | dict.fromkeys(other.answer for other in others if other.answer)
        for answer in islice(seen, 1, OTHERS + 1):
            yield KnownSolution("another problem's answer", wording.written(answer), False, certain=False)
            yield KnownSolution(
                "the reference answer, then another one",
                f"{wording.written(problem.answer)}\n{wording.written(answer)}",
                False,
                certain=False,
            )
    if wording.form:
        yield KnownSolution("the form without an answer", wording.written(""), False)
        yield KnownSolution("nonsense as an answer", wording.written(NONSENSE), False)
    yield KnownSolution("an empty text", "", False)
