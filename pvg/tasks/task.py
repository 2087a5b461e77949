"""The `Task` protocol: where problems come from and how completions are graded.

A new task is one file with such a class, its section in pvg.experiment and a line in the table of `pvg.tasks`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from pvg.records import Grade, Problem, Split


class Task(Protocol):
    """Deterministic: the same section gives the same problems in the same order, and the same grade for a text.

    `grade` never raises for any text a model may write, runs in time linear in the text, and executes nothing of it.
    """

    def problems(self, split: Split) -> Iterable[Problem]: ...

    def grade(self, problem: Problem, completion: str) -> Grade: ...


@runtime_checkable
class Stepwise(Protocol):
    """A task that knows the steps of a solution better than its lines tell (see pvg.game.challenge)."""

    def steps(self, completion: str) -> list[tuple[int, int]]:
        """Where each step begins and ends in the text, in order: none empty, none over another. Never raises."""
        ...
