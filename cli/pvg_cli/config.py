"""`pvg config show|validate|schema`: show and check the settings of an experiment without running it."""

from __future__ import annotations

import types
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer

from pvg_cli.boundary import DebugOption, ExperimentArgument, JsonOption, SetOption, emit, guarded, say

if TYPE_CHECKING:
    from pydantic import BaseModel

    from pvg.config.experiment import Experiment

ABSENT = object()

app = typer.Typer(no_args_is_help=True, help="Show, check and list the settings of an experiment.")


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
    """Print all settings of an experiment as TOML, with the defaults."""
    from pvg_cli.output import print_toml
    from pvg_cli.runs import resolve

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
@guarded
def schema(
    experiment: Annotated[
        str | None,
        typer.Argument(metavar="[EXPERIMENT]", help="Show the values of this experiment instead of the defaults."),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List all settings with type and default. With --json: print the JSON schema."""
    from pvg_cli.runs import resolve

    resolved = resolve(experiment, []) if experiment else None
    if as_json:
        from pvg.config.experiment import Experiment

        emit(Experiment.model_json_schema())
    else:
        print_schema(resolved)


# --- the settings as rows: key, type, default ------------------------------------------------------------------------


def setting_rows() -> list[tuple[str, str, Any]]:
    """(dotted key, type as text, default) of every setting. Keys of tasks name the kind: `task (gsm8k).path`."""
    from pydantic import BaseModel

    from pvg.config.experiment import Experiment
    from pvg.config.sections import TASKS

    rows: list[tuple[str, str, Any]] = []

    def walk(section: BaseModel, prefix: str) -> None:
        for name, info in type(section).model_fields.items():
            value = getattr(section, name)
            if name == "task" and not prefix:
                for kind, task in TASKS.items():
                    walk(task(), f"task ({kind}).")
            elif isinstance(value, BaseModel):
                walk(value, f"{prefix}{name}.")
            else:
                rows.append((f"{prefix}{name}", type_text(info.annotation), value))

    walk(Experiment(), "")
    return rows


def type_text(annotation: Any) -> str:
    """A type in words: `integer`, `"a" or "b"`, `number, or left out`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return type_text(get_args(annotation)[0])
    if origin is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(annotation))
    if origin in (Union, types.UnionType):
        parts = [type_text(part) for part in get_args(annotation) if part is not type(None)]
        return " or ".join(parts) + (", or left out" if type(None) in get_args(annotation) else "")
    if origin is tuple:
        return f"list of {type_text(get_args(annotation)[0])}"
    names = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path", dict: "table"}
    return names.get(origin or annotation, str(annotation))


def print_schema(experiment: Experiment | None) -> None:
    """Print every key with its type, and its default or the experiment's value."""
    from rich.text import Text

    from pvg_cli.output import quiet_table, stdout

    table = quiet_table()
    table.add_column("key", no_wrap=True)
    table.add_column("type", style="cyan")
    table.add_column("default" if experiment is None else experiment.name)
    for key, kind, default in setting_rows():
        if experiment is None:
            table.add_row(Text(key), Text(kind), Text(toml_value(default)))
        elif (value := value_at(experiment, key)) is not ABSENT:
            table.add_row(Text(key.replace(f" ({experiment.task.kind})", "")), Text(kind), Text(toml_value(value)))
    stdout().print(table)


def value_at(experiment: Experiment, key: str) -> Any:
    """The value of a row of `setting_rows`. ABSENT if the setting belongs to another kind of task."""
    node: Any = experiment
    for part in key.split("."):
        name, _, kind = part.partition(" ")
        node = getattr(node, name)
        if kind and kind != f"({node.kind})":
            return ABSENT
    return node


def toml_value(value: Any) -> str:
    """A value as in a TOML file. None is empty."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return str(value) if isinstance(value, (int, float, dict)) else f'"{value}"'
