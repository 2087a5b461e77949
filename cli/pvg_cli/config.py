"""`pvg config show|validate|schema`: look at an experiment's settings without running it."""

from __future__ import annotations

from typing import Annotated

import typer

from pvg_cli.boundary import DebugOption, JsonOption, emit, guarded, say
from pvg_cli.options import ExperimentArgument, SetOption

app = typer.Typer(no_args_is_help=True, help="Show, check and describe the settings of an experiment.")


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="config")


@app.command()
@guarded
def show(
    experiment: ExperimentArgument = "modchain",
    overrides: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Print every setting of an experiment, defaults included, as TOML."""
    from pvg_cli.output import print_toml
    from pvg_cli.resolve import resolve

    resolved = resolve(experiment, overrides or [])
    if as_json:
        emit(resolved.plain())
    else:
        print_toml(resolved.to_toml())


@app.command()
@guarded
def validate(
    experiment: ExperimentArgument = "modchain",
    overrides: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check an experiment; exit 2 and name the key when it cannot work."""
    from pvg_cli.resolve import resolve

    resolved = resolve(experiment, overrides or [])
    warnings = resolved.warnings()
    if as_json:
        emit({"valid": True, "name": resolved.name, "hash": resolved.hash(), "warnings": warnings})
    else:
        typer.echo(f"{resolved.name} is valid (settings {resolved.hash()}).")
        for warning in warnings:
            say(f"warning: {warning}.")


@app.command()
@guarded
def schema(
    experiment: Annotated[
        str | None,
        typer.Argument(metavar="[EXPERIMENT]", help="Show this experiment's values instead of the defaults."),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List every key with its type and default; with --json, the JSON schema."""
    from pvg_cli.output import print_schema
    from pvg_cli.resolve import resolve

    resolved = resolve(experiment, []) if experiment else None
    if as_json:
        from pvg.config.experiment import Experiment

        emit(Experiment.model_json_schema())
    else:
        print_schema(resolved)
