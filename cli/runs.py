"""From what the user typed to a run: a new one with a free name, or an unfinished one to go on with."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cli.boundary import say
from cli.resolve import DEFAULT_EXPERIMENT, resolve
from pvg.config.experiment import Experiment, differences, load_experiment, read_override
from pvg.config.sections import Store
from pvg.errors import MissingRequirementError, StateError, UsageError
from pvg.hub import pinned, pinned_as
from pvg.reporting.run_summary import read_run, unfinished_runs
from pvg.store.run_directory import RunDirectory, free_name, refuse_name


@dataclass(frozen=True, slots=True)
class Plan:
    """What is going to be played, and where. A new run's folder does not exist yet."""

    experiment: Experiment
    name: str
    run: RunDirectory
    resume: bool
    notice: str = ""


def plan_new(experiment: Experiment, name: str | None, suffix: str = "") -> Plan:
    """A new run: `name`, or the experiment's name, with -2, -3 ... when that exists. Its hub ids get a commit."""
    experiment = pinned(experiment, say)
    root = experiment.store.root
    wanted = f"{experiment.name}{suffix}" if name is None else name
    refuse_name(wanted)
    free = free_name(root, wanted) if name is None else wanted
    notice = f"{root / wanted} exists already; this run is {free}." if free != wanted else ""
    return Plan(experiment, free, RunDirectory(root / free), resume=False, notice=notice)


def create(plan: Plan) -> RunDirectory:
    """Make the folder of a new run. Raises MissingRequirementError when it cannot be written."""
    root = plan.experiment.store.root
    try:
        return RunDirectory.create(root, plan.name, plan.experiment)
    except OSError as error:
        raise MissingRequirementError(
            f"The run folder {plan.run.path} cannot be made: {error.strerror}.",
            "Choose another place with --set store.root=FOLDER.",
        ) from error


def plan_resume(name: str | None, overrides: Sequence[str], run_name: str, *, clean: bool = True) -> Plan:
    """The run to go on with: `run_name`, or where that is empty the newest unfinished one of the experiment.

    Without an experiment's name the run's own settings are taken, with the overrides on top. Raises StateError that
    names the difference when settings that change the outcome are not those of the run. `clean`: if the run is
    complete, remove the unfinished files of a process that was killed after its last commit.
    """
    given = resolve(name, overrides) if name else None
    root = given.store.root if given else _root(overrides)
    run = RunDirectory.open(run_name, root) if run_name else _newest(root, given.name if given else DEFAULT_EXPERIMENT)
    _refuse_unplayable(run, clean)
    own = run.experiment()
    experiment = pinned(pinned_as(given or load_experiment(run.experiment_file, overrides), own), say)
    changed = differences(own.hashed(), experiment.hashed())
    if changed:
        raise StateError(
            f"The run {run.name!r} was started with other settings: {'; '.join(changed)}.",
            f"Go on with its own settings: {resume_command(run)}",
        )
    return Plan(experiment, run.name, run, resume=True, notice=f"Resuming {run.name}.")


def resume_command(run: RunDirectory) -> str:
    """Exactly what to type to go on with `run`, from this folder."""
    return f"pvg train --resume {shlex.quote(_target(run))}"


def report_command(run: RunDirectory) -> str:
    return f"pvg report {shlex.quote(_target(run))}"


def _target(run: RunDirectory) -> str:
    """How a command finds the run: by name in the default folder, by path elsewhere."""
    return run.name if run.path == Store().root / run.name else str(run.path)


def _newest(root: Path, experiment: str) -> RunDirectory:
    found = unfinished_runs(root, experiment)
    if found:
        return found[0]
    others = unfinished_runs(root)
    raise UsageError(
        f"There is no unfinished run of {experiment!r} in {root}.",
        f"The newest unfinished run of another experiment: {resume_command(others[0])}"
        if others
        else f"Start one with: pvg train {experiment}",
    )


def _refuse_unplayable(run: RunDirectory, clean: bool) -> None:
    run.load_state()  # raises an error if the state is damaged or lost
    summary = read_run(run)
    if summary.status == "complete":
        removed = _cleaned(run) if clean and os.access(run.path, os.W_OK) else 0
        told = f" Removed {removed} unfinished files of its last process." if removed else ""
        raise UsageError(f"The run {run.name!r} is complete.{told}", f"Look at it with: {report_command(run)}")
    if summary.status == "samples":
        raise UsageError(f"The run {run.name!r} holds samples of `pvg rollout`, not a game.", "Start one: pvg train")


def _cleaned(run: RunDirectory) -> int:
    from pvg.game.ledger import remove_uncommitted

    with run.lock():
        state = run.load_state().state
        return 0 if state is None else len(remove_uncommitted(run, state))


def _root(overrides: Sequence[str]) -> Path:
    """The runs folder when no experiment was named: the default, unless it is set."""
    values = {key: value for override in overrides for key, value, _ in read_override(override)}
    return Path(str(values.get("store.root", Store().root)))
