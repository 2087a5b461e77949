"""A task in the user's file: `task.kind = "custom"`, `task.source = "FILE.py:NAME"`.

NAME is a class with the `Task` protocol; pvg creates it with `task.settings` as keyword arguments. docs/research.md has
an example. pvg checks the task's results where it depends on them, so that an error message names the user's file.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from pvg.config.sections import CustomTask
from pvg.errors import ConfigurationError
from pvg.extensions import called, load
from pvg.records import Grade, Problem, Split
from pvg.tasks.task import Task

KEY = "task.source"


class CheckedTask:
    """A user's task. Its errors become a ConfigurationError that names the file."""

    def __init__(self, source: str, task: Task) -> None:
        self._source, self._task = source, task

    def problems(self, split: Split) -> Iterator[Problem]:
        """The task's problems. Raises ConfigurationError for an object that is not a Problem, and for a repeated id."""
        found = called(KEY, self._source, lambda: list(self._task.problems(split)))
        seen: set[str] = set()
        for problem in found:
            if not isinstance(problem, Problem):
                raise self._wrong(f"problems({split!r}) must give pvg's Problem, not {type(problem).__name__}")
            if problem.id in seen:
                raise self._wrong(f"problems({split!r}) gave the id {problem.id!r} twice")
            seen.add(problem.id)
        return iter(found)

    def grade(self, problem: Problem, completion: str) -> Grade:
        grade = called(KEY, self._source, self._task.grade, problem, completion)
        if not isinstance(grade, Grade):
            raise self._wrong(f"grade must return pvg's Grade, not {type(grade).__name__}")
        return grade

    def __getattr__(self, name: str) -> Any:
        """The task's optional methods (the optional protocols of pvg.tasks.task)."""
        found = getattr(self._task, name)
        return partial(called, KEY, self._source, found) if callable(found) else found

    def _wrong(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"{KEY} = {self._source!r}: {what}.", "See docs/research.md for an example.")


def open_custom(section: CustomTask) -> CheckedTask:
    """Raises ConfigurationError if the file, the class or its settings are wrong."""
    kind = load(KEY, section.source)
    return CheckedTask(section.source, called(KEY, section.source, lambda: kind(**section.settings)))
