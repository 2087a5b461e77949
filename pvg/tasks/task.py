"""The `Task` protocol: a source of problems that grades completions.

A new task is one file with such a class, its section in pvg.config.experiment, and a line in the table of `pvg.tasks`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from pvg.records import Grade, Half, Problem, Split


class Task(Protocol):
    """Deterministic: the same section gives the same problems in the same order, and the same grade for a text.

    `grade` never raises for any text that a model may write, takes time linear in the text, and executes parts of it
    only in pvg.sandbox. A task that holds resources is a context manager, which its opener must leave.
    """

    def problems(self, split: Split) -> Iterable[Problem]: ...

    def grade(self, problem: Problem, completion: str) -> Grade: ...


@runtime_checkable
class LocatesFlaws(Protocol):
    """An optional part of a task: it finds the first wrong step of a solution. For tasks whose solutions can be checked
    step by step."""

    def cuts(self, completion: str) -> list[int]:
        """The end of each step as an offset into the text, ascending; the last one is the final answer. Empty for a
        malformed solution."""
        ...

    def flaw(self, problem: Problem, completion: str) -> int | None:
        """The first wrong step, counted from 0 in the order of `cuts`. None for a flawless solution, a malformed one,
        and if the flaw is not in a single step."""
        ...


@runtime_checkable
class GradesInBatches(Protocol):
    """A task that grades many completions together faster than one by one."""

    def grade_many(self, solutions: Sequence[tuple[Problem, str]]) -> list[Grade]: ...


@runtime_checkable
class ConcealsText(Protocol):
    """A task whose completions contain a part that a verifier must not read."""

    def shown(self, completion: str) -> str:
        """The part that it may read. Completions that differ only in the concealed part give the same text."""
        ...


@runtime_checkable
class ComparesPrograms(Protocol):
    """A task whose solutions are programs, which can be compared (pvg.tasks.code.similarity)."""

    def solution(self, completion: str) -> str:
        """The program in a completion, "" without one."""
        ...


@runtime_checkable
class SplitsSteps(Protocol):
    """A task that knows the steps of a solution; for other tasks, lines are used as steps (see pvg.game.challenge)."""

    def steps(self, completion: str) -> list[tuple[int, int]]:
        """Start and end of each step in the text, in order, none empty, without overlap. Never raises."""
        ...


# --- the halves of the training problems: one for the prover's RL, one for the verifier's data ------------------------
#
# Invariant: no problem is in both. The half depends only on the id, so it does not change when problems are added or
# reordered, or on another machine.


def half_of(problem_id: str) -> Half:
    """The half of a problem: the lowest bit of the first byte of sha256(id), about 50/50."""
    bit = hashlib.sha256(problem_id.encode()).digest()[0] & 1
    return "verifier" if bit else "prover"


def problems_of_half(task: Task, half: Half) -> list[Problem]:
    return [problem for problem in task.problems("train") if half_of(problem.id) == half]
