"""`pvg evaluate RUN`: measure the models of a run on fresh samples and with fresh attackers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from pvg_cli.boundary import EXIT_STOPPED, announce_loading, command_line, emit, say
from pvg_cli.options import DebugOption, JsonOption, RunArgument, RunsOption, SetOption

if TYPE_CHECKING:
    import asyncio

    from pvg.evaluation.runner import EvaluationOutcome
    from pvg.store.run_directory import RunDirectory


PARTS = "exploit, best-of-n, detection, separability, calibration, localisation, cross, tax"


def evaluate(
    target: RunArgument,
    parts: Annotated[str | None, Option(metavar="PART,...", help=f"Default: {PARTS}. One more: legibility.")] = None,
    rounds: Annotated[str | None, Option(metavar="N,...", help="Rounds to measure. Default: all finished.")] = None,
    overrides: SetOption = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure each finished round of a run: attacks, best-of-n, detection, calibration, legibility tax and more.

    Ctrl-C stops at a commit point. The same command resumes the evaluation.
    """
    from pvg.evaluation.report import default_parts, parse_parts, parse_rounds, settings_to_evaluate
    from pvg.store.run_directory import RunDirectory
    from pvg.store.run_players import open_round
    from pvg_cli.driving import drive_run
    from pvg_cli.output import stderr
    from pvg_cli.run_display import RunDisplay
    from pvg_cli.runs import fetch

    named, numbers = None if parts is None else parse_parts(parts), parse_rounds(rounds)
    run = RunDirectory.open(target, runs)
    experiment = settings_to_evaluate(run, overrides or [])
    wanted = default_parts(experiment) if named is None else named
    for number in numbers or [0]:
        open_round(run, number)
    reader = experiment.evaluate.reader if "legibility" in wanted else None
    fetch(experiment.sources())
    fetch({"models.prover.source": reader or ""})
    announce_loading()
    from pvg.planning.evaluation import evaluation_says

    say(evaluation_says(experiment, wanted, numbers or range(experiment.game.rounds), say))

    async def work(observer: RunDisplay, stop: asyncio.Event) -> EvaluationOutcome:
        from pvg.evaluation.runner import evaluate as measure

        return await measure(experiment, run, wanted, numbers, observer=observer, stop=stop)

    display = RunDisplay(run.name, experiment.game.rounds, stderr(), phases=())
    lock, again = run.lock(waiting=say, work="evaluate"), "The same command resumes the evaluation."
    outcome = drive_run(work, run, display, lock, again=again, as_json=as_json)
    _print_result(outcome, run, command_line(), as_json)


def _print_result(outcome: EvaluationOutcome, run: RunDirectory, again: str, as_json: bool) -> None:
    """Print the results and where they are, and after Ctrl-C the command that resumes (`again`)."""
    from pvg.evaluation.report import REPORT_FILE
    from pvg.reporting.evaluation import evaluation_tables
    from pvg_cli.output import stdout
    from pvg_cli.runs import view_command

    stopped = outcome.status == "interrupted"
    if as_json:
        facts = {"status": outcome.status, "run": run.name, "path": str(run.evaluation / REPORT_FILE)}
        resume = again if stopped else None
        emit({**facts, "seconds": outcome.seconds, "evaluation": outcome.report.plain(), "resume": resume})
    else:
        stdout().print(evaluation_tables(outcome.report))
        say(f"\nNumbers: {run.evaluation / REPORT_FILE}")
        say(f"To make the page: {view_command(run)}")
        if stopped:
            say(f"Stopped. To resume: {again}")
    if stopped:
        raise typer.Exit(EXIT_STOPPED)
