"""Tasks: sources of problems, and the grading of completions. Use `open_task(section)`."""

from __future__ import annotations

from pvg.config.task import TaskSection
from pvg.extensions import imported
from pvg.tasks.task import LocatesFlaws, Task, half_of, problems_of_half

__all__ = ["TASKS", "LocatesFlaws", "Task", "half_of", "open_task", "problems_of_half"]

# `task.kind` -> what opens a task from its section: MODULE:NAME.
TASKS = {
    "modchain": "pvg.tasks.modchain:Modchain",
    "gsm8k": "pvg.tasks.gsm8k:Gsm8k",
    "data": "pvg.tasks.data:Data",
    "reasoning_gym": "pvg.tasks.reasoning_gym:ReasoningGym",
    "code": "pvg.tasks.code:Code",
    "diplomacy_mini": "pvg.tasks.diplomacy_mini:DiplomacyMini",
    "diplomacy_plan": "pvg.tasks.diplomacy_plan:DiplomacyPlan",
    "play": "pvg.tasks.play:Play",
    "openenv": "pvg.tasks.play:OpenEnv",
    "custom": "pvg.tasks.task:open_custom",
}


def open_task(section: TaskSection) -> Task:
    """The task that `section` describes.

    Raises MissingRequirementError if data or a package is missing, ConfigurationError if its settings cannot work.
    """
    task: Task = imported(TASKS[section.kind])(section)
    return task
