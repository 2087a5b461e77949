"""`pvg diagnose RUN|LOG...`: find out from the event log what slows a run down."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pvg.errors import EXIT_CHECK_FAILED, UsageError, user_paths
from pvg_cli import completion
from pvg_cli.boundary import DebugOption, JsonOption, RunsOption, emit, guarded, say

ANY = "any"


def register(app: typer.Typer) -> None:
    app.command("diagnose")(diagnose)


@guarded
def diagnose(
    logs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|LOG",
            help="A run, or log files, plain or .gz. - reads standard input.",
            autocompletion=completion.runs,
        ),
    ],
    runs: RunsOption = Path("runs"),
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-on",
            metavar="CAUSE",
            help="Exit with code 1 if this cause is found. 'any': if any cause is found. Repeatable.",
        ),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Find what slows a run down: queues, reloads, checkpoints, an idle trainer, stragglers, a slow event loop."""
    from pvg.reporting.diagnosis import diagnose as look
    from pvg.reporting.diagnosis.diagnosis import rendered
    from pvg_cli.output import stdout

    refused = _checked(fail_on or [])
    found = look(_sources(logs, runs))
    if not found.tally.lines.events:  # otherwise --fail-on would pass for any file
        raise UsageError(
            f"There is no event in {', '.join(logs)}.",
            "Give a run or its events.log. A line looks like this: [weights] t=12.3 event=client.done wall_ms=80",
        )
    if as_json:
        emit(found.plain())
    else:
        stdout().print(rendered(found))
    hit = [finding.signature for finding in found.findings if finding.signature in refused or ANY in refused]
    if hit:
        say(f"Found: {', '.join(hit)} (--fail-on).", typer.colors.RED)
        raise typer.Exit(EXIT_CHECK_FAILED)


def _checked(names: list[str]) -> frozenset[str]:
    from pvg.config.load import did_you_mean
    from pvg.reporting.diagnosis import SIGNATURES

    known = [*SIGNATURES, ANY]
    for name in names:
        if name not in known:
            raise UsageError(
                f"There is no signature {name!r}.{did_you_mean(name, known)}",
                f"Known: {', '.join(known)}.",
            )
    return frozenset(names)


@user_paths()
def _sources(logs: list[str], runs: Path) -> list[str]:
    """The files to read."""
    from pvg.reporting.diagnosis.log_events import STDIN
    from pvg.store.run_directory import RunDirectory

    sources: list[str] = []
    for log in logs:
        if log == STDIN or (Path(log).exists() and not Path(log).is_dir()):
            sources.append(log)
            continue
        run = RunDirectory.open(log, runs)
        if not run.events.exists():
            raise UsageError(f"The run {run.name!r} has no {run.events.name}.", "The game has not started yet.")
        sources.append(str(run.events))
    twice = sorted({source for source in sources if sources.count(source) > 1})
    if twice:
        raise UsageError(f"{twice[0]} is given twice.", "Give each log once.")
    return sources
