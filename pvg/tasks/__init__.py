"""Tasks: where problems come from and how completions are graded. `open_task(section)` is the way in."""

from __future__ import annotations

from pvg.experiment import ModchainTask
from pvg.tasks.halves import half_of, problems_of_half
from pvg.tasks.modchain import Modchain
from pvg.tasks.task import Task

__all__ = ["TASKS", "Task", "half_of", "open_task", "problems_of_half"]

# `task.kind` -> what opens it.
TASKS = {"modchain": Modchain}


def open_task(section: ModchainTask) -> Task:
    """The task that `section` describes."""
    return TASKS[section.kind](section)
