"""Finds the experiment and the run that a command needs: a new run with a free name, or an unfinished run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pvg.config.base import is_hub_id
from pvg.config.experiment import MEMORY_SETTINGS, UNHASHED_SECTIONS, Experiment, without_memory_settings
from pvg.config.load import (
    chosen_keys,
    differences,
    find_experiment,
    fitted_as,
    load_experiment,
    overridden,
    read_override,
    read_settings,
    switch_note,
)
from pvg.config.operation import Store
from pvg.errors import MissingRequirementError, StateError, UsageError, counted, user_paths
from pvg.extensions import check_references
from pvg.reporting.run_summary import has_ended, unfinished_runs
from pvg.store.run_directory import RunDirectory, free_name, refuse_name, refuse_no_folder, refuse_samples
from pvg.store.run_players import pinned_players, pinned_players_as
from pvg.workers.choice import cluster_settings, with_workers
from pvg_cli.boundary import say

DEFAULT_EXPERIMENT = "modchain"
OTHER_FOLDER = "--set store.root=FOLDER"


def resolve(name: str | None, overrides: Sequence[str], cluster: str | None = None) -> Experiment:
    """The experiment `name` (a name or a file; None: the default) with `--cluster` and the overrides applied. Checks
    the settings, and that the user's files that they name exist."""
    path = find_experiment(DEFAULT_EXPERIMENT if name is None else name)
    settings = _settings(path, overrides, cluster)
    experiment = load_experiment(path, settings)
    if note := switch_note(read_settings(path), overridden(path, settings)[0]):
        say(note)
    check_references(experiment.own_code())
    return experiment


def located(sources: Mapping[str, str], before: Mapping[str, str] | None = None) -> dict[str, str]:
    """The sources, each hub id with its commit and each player of another run with its digest. `before`: those of the
    run that is resumed, whose commits and digests stay."""
    if _on_the_hub(sources):
        from pvg.hub import pinned, pinned_as

        sources = pinned(sources if before is None else pinned_as(sources, before), say)
    return pinned_players(sources if before is None else pinned_players_as(sources, before))


def fetch(sources: Mapping[str, str], keys: Collection[str] = ()) -> None:
    """Download the models and data of the hub that the sources name; only those of `keys`, if there are any."""
    if _on_the_hub(sources):
        from pvg.hub import KEYS, fetch_all

        fetch_all(sources, say, keys or KEYS)


def _on_the_hub(sources: Mapping[str, str]) -> bool:
    """Whether pvg.hub is needed. A game on models of this machine does not load it."""
    return any(map(is_hub_id, sources.values()))


def _settings(path: Path, overrides: Sequence[str], cluster: str | None) -> list[str]:
    chosen = [] if cluster is None else cluster_settings(cluster, load_experiment(path).cluster)
    return [*chosen, *overrides]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The experiment to play, and its run folder. The folder of a new run does not exist yet."""

    experiment: Experiment
    name: str
    run: RunDirectory
    resume: bool
    resume_command: str  # from the current folder
    notice: str = ""
    extended: bool = False  # a run that gets more rounds than it was planned with


def plan_new(experiment: Experiment, name: str | None, suffix: str = "") -> RunPlan:
    """Plan a new run: `name`, or the experiment's name with -2, -3 ... if that run exists. Pins hub ids,
    players of other runs, and the number of workers."""
    experiment = with_workers(experiment.with_sources(located(experiment.sources())))
    root = experiment.store.root
    refuse_no_folder(root, OTHER_FOLDER)
    wanted = f"{experiment.name}{suffix}" if name is None else name
    refuse_name(wanted)
    free = free_name(root, wanted) if name is None else wanted
    notice = f"{root / wanted} exists already, so this run is {free}." if free != wanted else ""
    if notice and wanted in (left.name for left in unfinished_runs(root)):
        notice += f" {_how_to_go_on(RunDirectory(root / wanted))}"
    run = RunDirectory(root / free)
    return RunPlan(experiment, free, run, resume=False, resume_command=resume_command(run), notice=notice)


def _how_to_go_on(run: RunDirectory) -> str:
    """How to go on with an unfinished run: to follow it if a process plays it, otherwise to resume it."""
    from pvg.reporting.follow import situation

    now = situation(run, run.load_state().state or {})
    if now.state in ("running", "silent"):  # the states in which resuming is refused
        return f"Process {now.process} on {now.host} plays {run.name}. To follow it: pvg view {run.argument} --live"
    return f"To continue {run.name} instead: {resume_command(run)}"


def create(plan: RunPlan) -> RunDirectory:
    """Create the folder of a new run. Raises MissingRequirementError if that fails."""
    root = plan.experiment.store.root
    try:
        return RunDirectory.create(root, plan.name, plan.experiment)
    except OSError as error:
        raise MissingRequirementError(
            f"pvg cannot create the run folder {plan.run.path}: {error.strerror}.",
            f"Choose another folder: {OTHER_FOLDER}",
        ) from error


@user_paths()
def plan_resume(
    name: str | None, overrides: Sequence[str], run_name: str, cluster: str | None = None, *, clean: bool = True
) -> RunPlan:
    """The run to resume: `run_name`, or the newest unfinished run of the experiment if `run_name` is empty.

    Without an experiment's name, uses the settings of the run plus the overrides. The run may get more rounds; raises
    StateError with the difference if another setting that affects the result differs from those of the run, except
    MEMORY_SETTINGS. `clean`: if the run is complete, remove the unfinished files of a process that was killed after its
    last commit.
    """
    given = resolve(name, overrides, cluster) if name else None
    kept = _kept(overrides)
    root = given.store.root if given else _root(overrides)
    if not run_name:
        refuse_no_folder(root, OTHER_FOLDER)
    more_rounds = "game.rounds" in chosen_keys(overrides)
    run = RunDirectory.open(run_name, root) if run_name else _newest(root, given.name if given else DEFAULT_EXPERIMENT)
    state = run.load_state().state or {}  # raises an error if the state is damaged or lost
    refuse_samples(run, state)
    own = run.experiment()
    # Before the run is refused, so that a mistyped key never gets the answer that the run is complete.
    wanted = given or load_experiment(run.experiment_file, _settings(run.experiment_file, overrides, cluster))
    if not more_rounds and has_ended(state, own):
        _refuse_complete(run, own.game.rounds, clean)
    experiment = with_workers(wanted.with_sources(located(wanted.sources(), own.sources())), own)
    experiment = fitted_as(own, experiment, chosen_keys(overrides))
    # Only if asked for: the experiment's file may have more rounds than the run was started with.
    extended = more_rounds and experiment.game.rounds > own.game.rounds
    if extended:
        own = own.model_copy(update={"game": own.game.model_copy(update={"rounds": experiment.game.rounds})})
    if more_rounds and experiment.game.rounds < own.game.rounds:
        raise StateError(
            f"The run {run.name!r} has {counted(own.game.rounds, 'round')}, and cannot get fewer.",
            f"Leave out game.rounds: {resume_command(run, kept)}",
        )
    changed = differences(without_memory_settings(own.hashed()), without_memory_settings(experiment.hashed()))
    if changed:
        again = resume_command(run, [*kept, *([f"game.rounds={experiment.game.rounds}"] if extended else [])])
        raise StateError(
            f"The run {run.name!r} was started with other settings: {'; '.join(changed)}.",
            f"Resume it with its own settings: {again}",
        )
    if not extended and has_ended(state, experiment):
        _refuse_complete(run, experiment.game.rounds, clean)
    if state:
        from pvg.game.ledger import check_same_inputs

        check_same_inputs(state, experiment)
    more = f" It will have {experiment.game.rounds} rounds." if extended else ""
    # The run does not record what a resumed run may change, such as the settings that bound memory.
    again = resume_command(run, overrides, name, cluster)
    return RunPlan(experiment, run.name, run, True, again, f"Resuming {run.name}.{more}", extended)


def resume_command(
    run: RunDirectory, overrides: Sequence[str] = (), name: str | None = None, cluster: str | None = None
) -> str:
    """The command that resumes `run` from the current folder, with what `plan_resume` gets."""
    words = [] if cluster is None else ["--cluster", cluster]
    words += [word for override in overrides for word in ("-s", override)]
    start = "pvg train --resume" if name is None else f"pvg train {shlex.quote(name)} --resume"
    return " ".join([start, run.argument, *map(shlex.quote, words)])


def _kept(overrides: Sequence[str]) -> list[str]:
    """The overrides that any resumed run may have."""
    found = []
    for override in overrides:
        keys = [key.split(".") for key in chosen_keys([override])]
        if all(key[0] in UNHASHED_SECTIONS or key[-1] in MEMORY_SETTINGS.get(key[0], ()) for key in keys):
            found.append(override)
    return found


def view_command(run: RunDirectory) -> str:
    return f"pvg view {run.argument}"


def _newest(root: Path, experiment: str) -> RunDirectory:
    found = unfinished_runs(root, experiment)
    if found:
        return found[0]
    others = unfinished_runs(root)
    raise UsageError(
        f"There is no unfinished run of {experiment!r} in {root}.",
        f"The newest unfinished run of another experiment: {resume_command(others[0])}"
        if others
        else "To give a complete run more rounds, name it: pvg train --resume RUN -s game.rounds=N",
    )


def _refuse_complete(run: RunDirectory, rounds: int, clean: bool) -> NoReturn:
    removed = _cleaned(run) if clean and os.access(run.path, os.W_OK) else 0
    removal = f" Removed {counted(removed, 'unfinished file')} of its last process." if removed else ""
    raise UsageError(
        f"The run {run.name!r} is complete.{removal}",
        f"To see the results: {view_command(run)}. To play another round: {resume_command(run)} "
        f"-s game.rounds={rounds + 1}",
    )


def _cleaned(run: RunDirectory) -> int:
    from pvg.game.ledger import remove_uncommitted

    with run.lock(waiting=say):
        state = run.load_state().state
        return 0 if state is None else len(remove_uncommitted(run, state))


def _root(overrides: Sequence[str]) -> Path:
    """The folder of runs if no experiment was named: `store.root` of the overrides, or the default."""
    values = {key: value for override in overrides for key, value, _ in read_override(override)}
    return Path(str(values.get("store.root", Store().root)))
