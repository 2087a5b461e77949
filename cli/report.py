"""`pvg report RUN`: what a run did, finished or not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.boundary import DebugOption, JsonOption, emit, guarded
from cli.options import RunArgument, RunsOption


def register(app: typer.Typer) -> None:
    app.command("report")(report)


@guarded
def report(
    run: RunArgument,
    runs: RunsOption = Path("runs"),
    examples: Annotated[int, typer.Option("--examples", min=0, help="Example solutions per role.")] = 2,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Print a run: rounds, phases, metrics, time budget, alerts, and example solutions of both roles."""
    from cli.output import stdout
    from pvg.reporting import terminal
    from pvg.reporting.examples import choose_examples
    from pvg.reporting.run_summary import read_run
    from pvg.store.run_directory import RunDirectory

    directory = RunDirectory.open(run, runs)
    summary = read_run(directory)
    chosen = choose_examples(directory, examples) if examples else []
    if as_json:
        emit({**summary.plain(), "examples": [example.plain() for example in chosen]})
    else:
        stdout().print(terminal.report(summary, chosen))
