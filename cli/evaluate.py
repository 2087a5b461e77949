"""`pvg evaluate RUN`: what a finished run has led to, measured on fresh samples and with fresh attackers."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.boundary import EXIT_STOPPED, DebugOption, JsonOption, emit, guarded, say
from cli.options import RunArgument, RunsOption, SetOption

if TYPE_CHECKING:
    import asyncio

    from cli.driving import Watcher
    from pvg.config.experiment import Experiment
    from pvg.evaluation.runner import EvaluationOutcome, EvaluationRequest
    from pvg.store.run_directory import RunDirectory


def register(app: typer.Typer) -> None:
    app.command("evaluate")(evaluate)


@guarded
def evaluate(
    target: RunArgument,
    parts: Annotated[
        str | None,
        typer.Option(
            "--parts",
            metavar="PART,...",
            help="Of exploit, best-of-n, detection, separability, calibration, localisation, tax. Without it: all.",
        ),
    ] = None,
    rounds: Annotated[
        str | None, typer.Option("--rounds", metavar="N,...", help="Without it: all that are finished.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="RUN",
            help="A run with game.reward = correctness, for the legibility tax. Without it, one is trained.",
        ),
    ] = None,
    overrides: SetOption = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure every finished round of a run: steps to exploit, best-of-n, detection, separability, calibration, flaw
    localisation, legibility tax.

    Ctrl-C stops at a commit point; the same command goes on from there.
    """
    from pvg.evaluation.opponents import default_parts, parse_parts, parse_rounds
    from pvg.hub import fetch_all
    from pvg.store.run_directory import RunDirectory

    named, numbers = None if parts is None else parse_parts(parts), parse_rounds(rounds)
    run = RunDirectory.open(target, runs)
    experiment = _experiment(run, overrides or [])
    wanted = default_parts(experiment) if named is None else named
    other = None if baseline is None else RunDirectory.open(baseline, runs)
    _refuse_early(run)
    fetch_all(experiment, say)
    from pvg.evaluation.runner import EvaluationRequest

    outcome = _measure(experiment, run, EvaluationRequest(wanted, numbers, other), as_json)
    again = ["pvg", "evaluate", target]
    for option, value in (("--parts", parts), ("--rounds", rounds), ("--baseline", baseline)):
        again += [option, value] if value is not None else []
    again += [word for override in overrides or () for word in ("-s", override)]
    again += ["--runs", str(runs)] if runs != Path("runs") else []
    _tell(outcome, run, shlex.join(again), as_json)


def _experiment(run: RunDirectory, overrides: list[str]) -> Experiment:
    """The run's settings with the overrides. Raises StateError for those that the run was played with."""
    from pvg.config.experiment import differences, load_experiment
    from pvg.errors import StateError

    experiment = load_experiment(run.experiment_file, overrides)
    if changed := differences(run.experiment().hashed(), experiment.hashed()):
        raise StateError(
            f"The run {run.name!r} was played with other settings: {'; '.join(changed)}.",
            "Set evaluate.* (and serving.*, telemetry.*) only: the rest is what is evaluated.",
        )
    return experiment


def _refuse_early(run: RunDirectory) -> None:
    """Before torch is loaded. Raises UsageError for a run that has no finished round."""
    from pvg.errors import UsageError
    from pvg.reporting.run_summary import read_run

    summary = read_run(run)
    if summary.status == "samples":
        raise UsageError(f"The run {run.name!r} holds samples of `pvg rollout`, not a game.", "Play one: pvg train")
    if not summary.rounds:
        raise UsageError(
            f"No round of the run {run.name!r} is finished, so there is nothing to evaluate.",
            f"Play it on: pvg train --resume {shlex.quote(run.name)}",
        )


def _measure(experiment: Experiment, run: RunDirectory, request: EvaluationRequest, as_json: bool) -> EvaluationOutcome:
    from cli.board import Board
    from cli.driving import drive, watcher_for
    from cli.train import last_words

    async def work(observer: Watcher, stop: asyncio.Event) -> EvaluationOutcome:
        from pvg.evaluation.runner import evaluate as measure

        return await measure(experiment, run, request, observer=observer, stop=stop)

    board = Board(experiment.name, run.name, experiment.game.rounds, phases=_phases(request), once=False)
    watcher = watcher_for(board, experiment.telemetry.refresh_per_second)
    with run.lock():
        return drive(work, watcher, last_words(run.name, as_json), experiment.telemetry.event_loop)


def _phases(request: EvaluationRequest) -> tuple[str, ...]:
    """What the display shows as the phases of a round."""
    phases = ["samples"]
    if "tax" in request.parts:
        phases += ["baseline", "kl"] if request.baseline is None else ["kl"]
    if "exploit" in request.parts:
        phases.append("attack")
    if set(request.parts) - {"exploit"}:
        phases.append("measures")
    return tuple(phases)


def _tell(outcome: EvaluationOutcome, run: RunDirectory, again: str, as_json: bool) -> None:
    """What was found, where it lies, and after Ctrl-C how to go on: `again`, the settings included."""
    from cli.output import stdout
    from cli.runs import report_command
    from pvg.evaluation.report import REPORT_FILE
    from pvg.reporting.evaluation import evaluation_tables

    stopped = outcome.status == "interrupted"
    if as_json:
        emit(
            {
                "status": outcome.status,
                "run": run.name,
                "path": str(run.evaluation / REPORT_FILE),
                "seconds": outcome.seconds,
                "evaluation": outcome.report.plain(),
                "resume": again if stopped else None,
            }
        )
    else:
        stdout().print(evaluation_tables(outcome.report))
        say(f"\nThe numbers: {run.evaluation / REPORT_FILE}")
        say(f"The page: {report_command(run)}")
        if stopped:
            say(f"Stopped. Go on with: {again}")
    if stopped:
        raise typer.Exit(EXIT_STOPPED)
