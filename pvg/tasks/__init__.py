"""Tasks: sources of problems, and the grading of completions. Use `open_task(section)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pvg.config.task import TaskSection
from pvg.tasks.code import Code
from pvg.tasks.data import Data
from pvg.tasks.diplomacy.full_plan import DiplomacyPlan
from pvg.tasks.diplomacy.mini import DiplomacyMini
from pvg.tasks.diplomacy.outcome import DiplomacyOutcome
from pvg.tasks.gsm8k import Gsm8k
from pvg.tasks.modchain import Modchain
from pvg.tasks.openenv import OpenEnv
from pvg.tasks.play import Play
from pvg.tasks.reasoning_gym import ReasoningGym
from pvg.tasks.task import LocatesFlaws, Task, half_of, open_custom, problems_of_half

__all__ = ["TASKS", "LocatesFlaws", "Task", "half_of", "open_task", "problems_of_half"]

# `task.kind` -> the function that opens a task from its section.
TASKS: dict[str, Callable[[Any], Task]] = {
    "modchain": Modchain,
    "gsm8k": Gsm8k,
    "data": Data,
    "reasoning_gym": ReasoningGym,
    "code": Code,
    "diplomacy_mini": DiplomacyMini,
    "diplomacy_plan": DiplomacyPlan,
    "diplomacy_outcome": DiplomacyOutcome,
    "play": Play,
    "openenv": OpenEnv,
    "custom": open_custom,
}


def open_task(section: TaskSection) -> Task:
    """The task that `section` describes.

    Raises MissingRequirementError if data or a package is missing, ConfigurationError if its settings cannot work.
    """
    return TASKS[section.kind](section)
