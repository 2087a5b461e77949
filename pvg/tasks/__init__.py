"""Tasks: where problems come from and how completions are graded. `open_task(section)` is the way in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pvg.config.sections import TaskSection
from pvg.tasks.code import Code
from pvg.tasks.custom import open_custom
from pvg.tasks.gsm8k import Gsm8k
from pvg.tasks.modchain import Modchain
from pvg.tasks.reasoning_gym import ReasoningGym
from pvg.tasks.task import LocatesFlaws, Task, half_of, problems_of_half

__all__ = ["TASKS", "LocatesFlaws", "Task", "half_of", "open_task", "problems_of_half"]

# `task.kind` -> what opens it from a section of that kind.
TASKS: dict[str, Callable[[Any], Task]] = {
    "modchain": Modchain,
    "gsm8k": Gsm8k,
    "reasoning_gym": ReasoningGym,
    "code": Code,
    "custom": open_custom,
}


def open_task(section: TaskSection) -> Task:
    """The task that `section` describes.

    Raises MissingRequirementError when it lacks data or a package, ConfigurationError when its settings cannot work.
    """
    return TASKS[section.kind](section)
