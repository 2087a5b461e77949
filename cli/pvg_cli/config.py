"""`pvg config show|explain|validate|schema`: look at settings without running the experiment."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from pvg_cli import completion
from pvg_cli.boundary import emit, print_json, say
from pvg_cli.options import DebugOption, ExperimentArgument, JsonOption, SetOption

WIDEST_TYPE = 40

app = typer.Typer(no_args_is_help=True, help="Show, check and list the settings of an experiment.")


@app.command()
def show(
    experiment: ExperimentArgument = "modchain",
    overrides: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Print all settings of an experiment as TOML, with the defaults and a comment for each."""
    from pvg.config.describe import commented_toml
    from pvg_cli.output import print_toml
    from pvg_cli.runs import resolve

    resolved = resolve(experiment, overrides or [])
    if as_json:
        emit(resolved.plain())
    else:
        print_toml(commented_toml(resolved))


@app.command()
def explain(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY", help="A setting or a table: training.kl, or training.", autocompletion=completion.keys
        ),
    ],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Explain a setting: its meaning, type, range and default, and which experiments set it. A table: its settings."""
    from pvg.config.describe import explained

    told = explained(key)
    if as_json:
        emit(told)
    else:
        print_explained(told)


@app.command()
def validate(
    experiment: ExperimentArgument = "modchain",
    overrides: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check the settings of an experiment. If a setting is wrong: name its key, and exit with code 2."""
    from pvg_cli.runs import resolve

    resolved = resolve(experiment, overrides or [])
    warnings = resolved.warnings()
    if as_json:
        emit({"valid": True, "name": resolved.name, "hash": resolved.hash(), "warnings": warnings})
    else:
        typer.echo(f"{resolved.name} is valid (settings {resolved.hash()}).")
        for warning in warnings:
            say(f"warning: {warning}.")


@app.command()
def schema(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """List all settings with type and default. With --json: print the JSON schema."""
    from pvg.config.describe import json_schema, settings, toml_value
    from pvg.reporting.table import Column, Table
    from pvg_cli.output import stdout

    if as_json:
        print_json(json_schema())
        return
    columns = [Column("key", wrap=False), Column("type", style="verifier", max_width=WIDEST_TYPE), Column("default")]
    rows = [(setting.label, setting.type, toml_value(setting.default)) for setting in settings()]
    stdout().print(Table(columns, list(rows), narrow=True))


def print_explained(told: dict[str, Any]) -> None:
    """A setting, a tagged table or a section: meaning, type, default, and the experiments that set it."""
    from pvg_cli.output import print_paragraph, stdout

    show = partial(print_paragraph, stdout(), indent=2)
    show(told["key"], indent=0, strong=len(told["key"]))
    for form in told.get("forms", []):
        kinds = f" (kind {', '.join(form['kinds'])})" if form["kinds"] else ""
        show(f"{form['meaning']}{kinds}")
        allowed = ", ".join(filter(None, (form["type"], form["range"])))
        show(f"{allowed}; default: {form['default'] or 'unset'}")
    for kind, meaning in told.get("kinds", {}).items():
        mark = " (default)" if told["default"] in kind.split(", ") else ""
        show(f"{kind}{mark}: {meaning}", hanging=2)
    if "meaning" in told:
        show(told["meaning"])
    for inside in told.get("settings", []):
        kinds = f" (kind {', '.join(inside['kinds'])})" if inside["kinds"] else ""
        default = f"{inside['key']} = {inside['default'] or 'unset'}{kinds}"
        show(default, hanging=4, strong=len(inside["key"]))
        show(inside["meaning"], indent=4)
    if "experiments" in told:
        where = ", ".join(f"{name} = {value}" for name, value in told["experiments"].items())
        show(f"experiments: {where or 'none sets it'}", hanging=2)
