"""What a user should know about the test problems of a run: how many there are, and whether that is enough.

for line in about_test_problems(experiment, task, problems): print(line)
"""

from __future__ import annotations

from collections.abc import Sequence

from pvg.config.experiment import Experiment
from pvg.errors import counted
from pvg.records import Problem
from pvg.tasks.task import HasNote, Task

# With fewer problems, the 95 % interval of an accuracy covers half of all possible values.
FEWEST = 10


def about_test_problems(experiment: Experiment, task: Task, problems: Sequence[Problem]) -> list[str]:
    """One line, or none if the task has enough test problems and a file with them. `problems`: all of them."""
    there, wanted = len(problems), experiment.game.test.problems
    parts = [task.note] if isinstance(task, HasNote) and task.note else []
    if there < wanted:
        parts.append(f"A round tests with {counted(there, 'problem')}, not with game.test.problems = {wanted:,}.")
    if there < FEWEST:
        parts.append(f"Fewer than {FEWEST} are too few for reliable figures: {_remedy(experiment)}.")
    return [" ".join(parts)] if parts else []


def _remedy(experiment: Experiment) -> str:
    if hasattr(experiment.task, "test_path"):
        return "add problems, or set task.test_path to a file with test problems"
    return "raise task.test_problems" if hasattr(experiment.task, "test_problems") else "add test problems"
