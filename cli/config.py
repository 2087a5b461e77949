"""`pvg config show|explain|validate|schema`: look at an experiment's settings without running it."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.boundary import DebugOption, JsonOption, emit, guarded, say
from cli.options import ExperimentArgument, SetOption

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
    """Print every setting of an experiment, defaults included, as TOML with comments."""
    from cli.output import print_toml
    from cli.resolve import resolve
    from pvg.config.describe import commented_toml

    resolved = resolve(experiment, overrides or [])
    if as_json:
        emit(resolved.plain())
    else:
        print_toml(commented_toml(resolved))


@app.command()
@guarded
def explain(
    key: Annotated[str, typer.Argument(metavar="KEY", help="A setting or a table, such as training.kl.")],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Explain a setting: its meaning, type and default, and where the experiments use it."""
    from cli.output import print_explained
    from pvg.config.describe import explained

    told = explained(key)
    if as_json:
        emit(told)
    else:
        print_explained(told)


@app.command()
@guarded
def validate(
    experiment: ExperimentArgument = "modchain",
    overrides: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check an experiment; exit 2 and name the key when it cannot work."""
    from cli.resolve import resolve

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
    from cli.output import print_schema
    from cli.resolve import resolve

    resolved = resolve(experiment, []) if experiment else None
    if as_json:
        from pvg.config.experiment import Experiment

        emit(Experiment.model_json_schema())
    else:
        print_schema(resolved)
