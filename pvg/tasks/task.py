"""The `Task` protocol: where problems come from and how completions are graded.

A new task is one file with such a class, its section in pvg.config.experiment and a line in the table of `pvg.tasks`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from pvg.records import Grade, Half, Problem, Split


class Task(Protocol):
    """Deterministic: the same section gives the same problems in the same order, and the same grade for a text.

    `grade` never raises for any text a model may write, runs in time linear in the text, and executes nothing of it
    outside of pvg.sandbox. A task that holds something open is a context manager; whoever opened it leaves it.
    """

    def problems(self, split: Split) -> Iterable[Problem]: ...

    def grade(self, problem: Problem, completion: str) -> Grade: ...


@runtime_checkable
class LocatesFlaws(Protocol):
    """What a task may know besides: which step of a solution is the first wrong one. For tasks whose solutions can be
    checked step by step; the others do without these methods."""

    def cuts(self, completion: str) -> list[int]:
        """Where each step ends, as an offset into the text, ascending; the last one is the final answer. Empty for a
        text that is no solution."""
        ...

    def flaw(self, problem: Problem, completion: str) -> int | None:
        """The first wrong step, counted from 0 in the order of `cuts`; None for a flawless solution, for no solution,
        and where the flaw is in no single step."""
        ...


@runtime_checkable
class GradesInBatches(Protocol):
    """A task that grades many completions faster than one after the other."""

    def grade_many(self, solutions: Sequence[tuple[Problem, str]]) -> list[Grade]: ...


@runtime_checkable
class ConcealsText(Protocol):
    """A task whose completions hold what a verifier must not read."""

    def shown(self, completion: str) -> str:
        """What it may read: the same for two completions that differ in what is concealed alone."""
        ...


@runtime_checkable
class ComparesPrograms(Protocol):
    """A task whose solutions are programs, which can be compared (pvg.tasks.code.similarity)."""

    def solution(self, completion: str) -> str:
        """The program in a completion, "" for none."""
        ...


@runtime_checkable
class SplitsSteps(Protocol):
    """A task that knows the steps of a solution better than its lines tell (see pvg.game.challenge)."""

    def steps(self, completion: str) -> list[tuple[int, int]]:
        """Where each step begins and ends in the text, in order: none empty, none over another. Never raises."""
        ...


# The two halves of the training problems: one for the prover's RL, one for the verifier's data.
#
# Invariant: no problem is in both (invariant 4). The half follows from the id alone, so it stays the same when
# problems are added, reordered or read on another machine.


def half_of(problem_id: str) -> Half:
    """The half of a problem: the lowest bit of the first byte of sha256(id), about 50/50."""
    bit = hashlib.sha256(problem_id.encode()).digest()[0] & 1
    return "verifier" if bit else "prover"


def problems_of_half(task: Task, half: Half) -> list[Problem]:
    """The training problems of `half`, in the task's order."""
    return [problem for problem in task.problems("train") if half_of(problem.id) == half]
