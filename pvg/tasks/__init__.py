"""Tasks: sources of problems, and the grading of completions. Use `open_task(section)`."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import orjson

from pvg.config.task import TaskSection
from pvg.errors import ConfigurationError, PvgError, shortened
from pvg.extensions import imported
from pvg.records import Problem
from pvg.tasks.task import Task

# `task.kind` -> what opens a task from its section: MODULE:NAME.
TASKS = {
    "modchain": "pvg.tasks.modchain:Modchain",
    "gsm8k": "pvg.tasks.data:Gsm8k",
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


@contextmanager
def opened_task(section: TaskSection) -> Iterator[Task]:
    """`open_task`, and at the end the release of what the task holds."""
    task = open_task(section)
    with task if isinstance(task, AbstractContextManager) else nullcontext():
        yield task


# Digests of a task's problems, to compare two processes: a run continues in another process than it began in.


def digest_of(problems: Iterable[Problem]) -> str:
    """A digest of ids, questions and answers, in their order."""
    digest = hashlib.sha256()
    for problem in problems:
        parts = (problem.id, problem.question, problem.answer)
        digest.update(orjson.dumps([part.encode("utf-8", "surrogatepass").hex() for part in parts]))
    return digest.hexdigest()


def digests_elsewhere(section: TaskSection, limit_s: float = 600.0) -> dict[str, str]:
    """Split -> digest of its problems in a new process. Raises ConfigurationError if that process fails, or does not
    end in `limit_s`."""
    data = orjson.dumps(section.model_dump(mode="json", exclude_none=True))
    command = [sys.executable, "-P", "-c", "import pvg.tasks; pvg.tasks.print_digests()"]
    try:
        done = subprocess.run(command, input=data, capture_output=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        why = f"The task has not opened in another process within {limit_s:.0f} s."
        raise ConfigurationError(why, "It opened here: see whether it waits for something.") from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigurationError(f"The task does not open in another process: {shortened(last)}")
    found: dict[str, str] = orjson.loads(done.stdout)
    return found


def print_digests() -> None:
    """The other process of `digests_elsewhere`: reads the section from its input."""
    from pvg.config.sections import AllSections

    try:
        with opened_task(AllSections.model_validate({"task": orjson.loads(sys.stdin.buffer.read())}).task) as task:
            print(orjson.dumps({split: digest_of(task.problems(split)) for split in ("train", "test")}).decode())
    except PvgError as error:
        sys.exit(error.message)
