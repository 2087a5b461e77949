"""Another task for an experiment: `-s task.kind=KIND` on the command line.

The table `[task]` of the file belongs to the file's kind, so it starts again with the defaults of the new kind. The
other tables stay. `TaskSwitch` says what was dropped, and which other settings the new task needs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pvg.config.experiment import TABLES, Experiment
from pvg.config.load import read_override, read_toml
from pvg.config.task import CustomTask, DataTask, Gsm8kTask, ReasoningGymTask
from pvg.errors import UsageError
from pvg.installation import install_extra

# The embedded models know the characters of their own task. Beginning of the name -> tasks that need other characters.
UNSPOKEN = {
    "modchain-": frozenset({"gsm8k", "reasoning_gym", "code", "diplomacy_mini", "diplomacy_plan", "diplomacy_outcome"}),
    "diplomacy-": frozenset({"modchain", "gsm8k", "reasoning_gym", "code", "diplomacy_plan"}),
}
# Task -> its embedded prover and verifier. The other tasks need a model that can read text.
EMBEDDED_FOR = {
    "modchain": ("modchain-prover", "modchain-verifier"),
    "diplomacy_mini": ("diplomacy-prover", "diplomacy-verifier"),
}


@dataclass(frozen=True, slots=True)
class TaskSwitch:
    """A task that the overrides chose in place of the file's. `dropped`: the settings of the file's task."""

    before: str
    after: str
    dropped: tuple[str, ...]

    @property
    def note(self) -> str:
        """One line for the user; empty if the file sets nothing that the switch drops."""
        names = ", ".join(self.dropped)
        change = f"task.kind = {self.after!r} replaces {self.before!r}"
        return f"{change}, so these settings of the file are dropped: {names}." if names else ""


def task_switch(path: Path, overrides: Sequence[str], experiment: Experiment) -> TaskSwitch | None:
    """The switch that `overrides` made in the experiment file `path`; None if the task has the file's kind.

    Raises UsageError, naming all other settings that the new task needs.
    """
    table = read_toml(path, "experiment").get("task", {})
    given = {"kind": table} if isinstance(table, str) else table
    before, after = given.get("kind", TABLES["task"].default), experiment.task.kind
    chosen = {key for override in overrides for key, _, _ in read_override(override)}
    if before == after or not chosen & {"task", "task.kind"}:
        return None
    needs = list(_needs(experiment))
    if needs:
        problems = "; ".join(problem for problem, _ in needs)
        settings = " ".join(f"-s {setting}" for _, setting in needs if setting)
        raise UsageError(
            f"task.kind = {after!r} needs more changes to {path}: {problems}.", f"Add: {settings}" if settings else ""
        )
    return TaskSwitch(before, after, tuple(sorted(f"task.{name}" for name in given if name != "kind")))


def _needs(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """(what is wrong, the setting to add) of each thing that the task needs; "" where no setting helps."""
    task = experiment.task
    if isinstance(task, ReasoningGymTask) and importlib.util.find_spec("reasoning_gym") is None:
        yield f"the package reasoning-gym is not installed (type: {install_extra('reasoning-gym')})", ""
    if isinstance(task, Gsm8kTask) and task.path is None:
        yield "task.path is not set", "task.path=hf:openai/gsm8k"
    if isinstance(task, DataTask) and task.path is None:
        yield "task.path is not set", "task.path=FILE.jsonl"
    if isinstance(task, CustomTask) and task.source == CustomTask().source and not Path("my_task.py").is_file():
        yield "task.source is not set", "task.source=FILE.py:NAME"
    models = (("prover", experiment.models.prover.source), ("verifier", experiment.models.verifier.source))
    unfit = [(player, source) for player, source in models if _cannot_express(source, task.kind)]
    fitting = EMBEDDED_FOR.get(task.kind)
    for player, source in unfit:
        model = f"embedded:{fitting[player == 'verifier']}" if fitting else "hf:OWNER/NAME"
        yield (
            f"models.{player}.source = {source!r} does not know the characters of this task",
            f"models.{player}.source={model}",
        )
    if unfit and not fitting and experiment.prompts.kind not in ("chat", "text"):
        yield f"prompts = {experiment.prompts.kind!r} is for the embedded models", "prompts=chat"


def _cannot_express(source: str, kind: str) -> bool:
    name = source.removeprefix("embedded:")
    return name != source and any(name.startswith(start) and kind in kinds for start, kinds in UNSPOKEN.items())
