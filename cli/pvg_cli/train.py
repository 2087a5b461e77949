"""`pvg train` plays a game, or resumes one."""

from __future__ import annotations

import io
import os
from collections.abc import Collection
from contextlib import ExitStack, nullcontext, redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer import Option

from pvg.errors import StoppedAtStart, UsageError
from pvg_cli import completion
from pvg_cli.boundary import EXIT_STOPPED, announce_loading, arguments, emit, say
from pvg_cli.options import (
    ClusterOption,
    DebugOption,
    ExperimentOrDefault,
    JsonOfFirst,
    MetricsPortOption,
    RunNameOption,
    SetOption,
    metrics_port_override,
)

if TYPE_CHECKING:
    import asyncio

    from pvg.config.experiment import Experiment
    from pvg.game.run import GameOutcome
    from pvg.game.warm_start import Demonstrations
    from pvg.workers.launch import Launch
    from pvg.workers.ranks import RankGroup
    from pvg_cli.dry_run import Fit
    from pvg_cli.run_display import RunDisplay
    from pvg_cli.runs import RunPlan


def train(
    name: ExperimentOrDefault = None,
    *,
    overrides: SetOption = None,
    run_name: RunNameOption = None,
    model: Annotated[str | None, Option(metavar="DIR|ID", help="The chat model of prover and verifier.")] = None,
    data: Annotated[str | None, Option(metavar="FILE", help="Play the experiment own with this file.")] = None,
    resume: Annotated[
        str | None,
        Option(metavar="[RUN]", help="A run. Default: the newest unfinished one.", autocompletion=completion.runs),
    ] = None,
    cluster: ClusterOption = None,
    metrics_port: MetricsPortOption = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print time, memory, prompts and grades, and stop.")] = False,
    force: Annotated[bool, Option("--force", help="Play although the memory is too small by the plan.")] = False,
    as_json: JsonOfFirst = False,
    debug: DebugOption = False,
) -> None:
    """Play a prover-verifier game. Without arguments: the embedded game, on the CPU, in a few minutes.

    Ctrl-C stops the run at its next commit point. To resume it, use: pvg train --resume
    """
    if resume is not None and run_name is not None:
        raise UsageError(
            "--name and --resume cannot be used together.",
            "Give the name of the run to --resume: pvg train --resume RUN",
        )
    from pvg.config.load import chosen_keys
    from pvg.config.operation import ranks_of

    settings = [] if model is None else [f"models.{player}.source={model}" for player in ("prover", "verifier")]
    settings += [*([] if data is None else [f"task.path={data}"]), *(overrides or [])]
    settings += metrics_port_override(metrics_port)
    if (model or data) and resume is None:
        name = name or "own"
    with ExitStack() as stack:
        launch = ranks = None
        if "TORCHELASTIC_RUN_ID" in os.environ:
            launch, ranks = _joined(stack, dry_run)
        if launch is not None and ranks is not None:
            from pvg.workers.ranks import noted_run

            if (noted := noted_run(launch)) and Path(noted).is_dir():
                resume, run_name = noted, None
            elif launch.run:  # the run that pvg's launcher has chosen
                resume, run_name = (launch.run, None) if resume is not None else (None, Path(launch.run).name)
        chosen = chosen_keys(settings)
        again = launch is not None and bool(launch.store)
        with redirect_stderr(io.StringIO()) if again else nullcontext():  # the launcher has said all of it
            plan = _planned(name, settings, run_name, resume, cluster, clean=not dry_run)
        if launch is not None:
            from pvg.workers.launch import refuse_other_counts

            refuse_other_counts(plan.experiment, launch)
        elif (count := ranks_of(plan.experiment.cluster)) is not None and not dry_run:
            _start_ranks(count, plan)
        demonstrations = None if plan.resume else _demonstrations(plan)
        fit = partial(_fitted, resume=plan.resume, chosen=chosen, force=force)
        if dry_run:
            from pvg_cli.dry_run import show_plan

            show_plan(plan, demonstrations, as_json, fit)
            return
        if plan.notice:
            say(plan.notice)
        _print_result(_play(plan, as_json, launch, ranks, fit), plan, as_json)


def _joined(stack: ExitStack, dry_run: bool) -> tuple[Launch | None, RankGroup | None]:
    """A launcher has started several processes. The first of them drives the others: it gets their group, but not for a
    dry run. Any other process works for the first one, and ends here."""
    from pvg.workers.launch import ALONE, end_with_launcher, launched

    launch = launched(os.environ)
    if launch is None:
        return None, None
    if dry_run:
        if not launch.number:
            return launch, None
        say(f"Process {launch.number} of torchrun prints no plan, because process 0 does. To see it here, {ALONE}")
        raise typer.Exit
    end_with_launcher(launch)
    if not launch.number:
        announce_loading()
    from pvg.workers.ranks import joined

    ranks = stack.enter_context(joined(launch))
    if launch.number:
        raise typer.Exit(ranks.serve())
    return launch, ranks


def _start_ranks(count: int, plan: RunPlan) -> NoReturn:
    """Let pvg's own launcher start all ranks of the run, and end with the driver's exit code."""
    from pvg.workers.launch import start_ranks

    if not plan.resume:
        plan.run.refuse_existing()
        if plan.notice:  # the driver tells of a run that it resumes
            say(plan.notice)
    raise typer.Exit(start_ranks(count, arguments(), plan.run.path, say))


def _planned(
    name: str | None, settings: list[str], run_name: str | None, resume: str | None, cluster: str | None, *, clean: bool
) -> RunPlan:
    """The run to play. Warns about its settings."""
    from pvg.telemetry.cpu import precision_warnings
    from pvg_cli.runs import plan_new, plan_resume, resolve

    if resume is not None:
        plan = plan_resume(name, settings, resume, cluster, clean=clean)
    else:
        plan = plan_new(resolve(name, settings, cluster), run_name)
    for warning in [*plan.experiment.warnings(), *precision_warnings(plan.experiment, resumed=plan.resume)]:
        say(f"warning: {warning}.")
    return plan


def _demonstrations(plan: RunPlan) -> Demonstrations | None:
    """The demonstrations of the warm start; None without one. Raises what is wrong with its file."""
    section = plan.experiment.warmup
    if section.path is None:
        return None
    announce_loading()
    from pvg.game.warm_start import read_demonstrations

    return read_demonstrations(section)


def _fitted(experiment: Experiment, *, resume: bool, chosen: Collection[str], force: bool) -> tuple[Experiment, str]:
    """See fitted_here. A run that is resumed keeps what it began with, and is not refused: it has played before."""
    from pvg.config.experiment import FITTED
    from pvg.planning.plan import fitted_here

    return fitted_here(experiment, say, chosen=FITTED if resume else chosen, force=force or resume)


def _play(plan: RunPlan, as_json: bool, launch: Launch | None, ranks: RankGroup | None, fit: Fit) -> GameOutcome:
    """Play under the display. If a new run fails before its first commit, its folder is deleted."""
    from pvg.reporting.run_summary import read_run
    from pvg.workers.choice import open_supply
    from pvg_cli.driving import drive_run
    from pvg_cli.output import stderr
    from pvg_cli.run_display import PHASES, PLAY_PHASES, RunDisplay
    from pvg_cli.runs import create, fetch

    fetch(plan.experiment.sources())
    announce_loading()
    own = not plan.experiment.models.embedded
    if own:
        plan = _said(plan, fit)
    with ExitStack() as opening:
        # Workers import torch while this process does, so with embedded models nothing imports it before them.
        supply = open_supply(plan.experiment)
        if supply is not None:
            opening.callback(supply.end)
        if not own:
            plan = _said(plan, fit)
        experiment = plan.experiment
        run = plan.run if plan.resume else create(plan)
        stack = opening.pop_all()
    if launch is not None:
        from pvg.workers.ranks import note_run

        note_run(launch, str(run.path.absolute()))

    async def work(observer: RunDisplay, stop: asyncio.Event) -> GameOutcome:
        from pvg.game.run import play

        if plan.extended:
            run.set_rounds(experiment.game.rounds)
        return await play(experiment, run, observer=observer, stop=stop, resume=plan.resume, supply=supply, ranks=ranks)

    phases = PLAY_PHASES if experiment.task.kind == "play" else PHASES
    display = RunDisplay(run.name, experiment.game.rounds, stderr(), effort=experiment.game.effort, phases=phases)
    if plan.resume:
        display.recall(read_run(run))
    lock = run.lock(discard=lambda: not plan.resume and not run.has_state, waiting=say)
    with stack:
        return drive_run(work, run, display, lock, again=f"To resume it: {plan.resume_command}", as_json=as_json)


def _said(plan: RunPlan, fit: Fit) -> RunPlan:
    """The plan with settings that fit into the memory. Says the time and the memory of the game."""
    try:
        experiment, line = fit(plan.experiment)
    except KeyboardInterrupt:  # it imports torch, which takes seconds
        if not plan.resume:
            raise
        raise StoppedAtStart(
            f"Stopped while {plan.run.name!r} was starting.", f"To resume it: {plan.resume_command}"
        ) from None
    say(line)
    return replace(plan, experiment=experiment)


def _print_result(outcome: GameOutcome, plan: RunPlan, as_json: bool) -> None:
    """Print the table of rounds and the next commands, and set the exit code."""
    from pvg.reporting.run_summary import read_run
    from pvg.reporting.terminal import closing
    from pvg_cli.output import stdout
    from pvg_cli.runs import view_command

    summary = read_run(plan.run)
    stopped = outcome.status == "interrupted"
    resume = plan.resume_command
    if as_json:
        facts = {"status": outcome.status, "run": summary.name, "path": str(summary.path), "seconds": outcome.seconds}
        recorded = {key: value for key, value in summary.plain().items() if key in ("experiment", "rounds", "alerts")}
        emit({**facts, **recorded, "resume": resume if stopped else None})
    else:
        commands = {resume: "resume the run"} if stopped else {}
        commands[view_command(plan.run)] = "some solutions, and a page with all solutions and curves"
        if not stopped and plan.experiment.task.kind != "play":
            commands[f"pvg evaluate {plan.run.argument}"] = "how well the verifiers resist new attackers"
        stdout().print(closing(summary, commands))
    if stopped:
        raise typer.Exit(EXIT_STOPPED)
