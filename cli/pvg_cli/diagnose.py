"""`pvg diagnose RUN`: find out from the record of a run what slows it down."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from pvg.errors import EXIT_CHECK_FAILED
from pvg_cli.boundary import emit, say
from pvg_cli.options import DebugOption, JsonOption, RunArgument, RunsOption

ANY = "any"


def diagnose(
    run: RunArgument,
    runs: RunsOption = Path("runs"),
    fail_on: Annotated[
        list[str] | None, Option(metavar="CAUSE|any", help="Exit code 1 if this cause is found. Repeatable.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Find what slows a run down: queues, reloads, checkpoints, an idle trainer, stragglers, a slow event loop."""
    from pvg.config.load import refuse_unknown
    from pvg.reporting import diagnosis
    from pvg.store.run_directory import RunDirectory
    from pvg_cli.output import stdout

    known, refused = [*diagnosis.SIGNATURES, ANY], fail_on or []
    for name in refused:
        refuse_unknown("signature {}", name, known)
    found = diagnosis.diagnose(RunDirectory.open(run, runs))
    if as_json:
        emit(found.plain())
    else:
        stdout().print(diagnosis.rendered(found))
    hit = [finding.signature for finding in found.findings if finding.signature in refused or ANY in refused]
    if hit:
        say(f"Found: {', '.join(hit)} (--fail-on).", typer.colors.RED)
        raise typer.Exit(EXIT_CHECK_FAILED)
