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
class LocatesFlaws(Protocol):
    """What a task may know besides: the steps of a solution, and which of them is the first wrong one. For tasks whose
    solutions can be checked step by step; the others do without these methods."""

    def steps(self, completion: str) -> list[int]:
        """Where each step ends, as an offset into the text, ascending; the last one is the final answer. Empty for a
        text that is no solution."""
        ...

    def flaw(self, problem: Problem, completion: str) -> int | None:
        """The first wrong step, counted from 0 in the order of `steps`; None for a flawless solution, for no solution,
        and where the flaw is in no single step."""
        ...
