"""`pvg config show|explain`: look at settings without running the experiment."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer
from typer import Argument

from pvg_cli import completion
from pvg_cli.boundary import emit
from pvg_cli.options import DebugOption, ExperimentArgument, JsonOption, SetOption

app = typer.Typer(no_args_is_help=True, help="Show and explain settings.")


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
        Argument(metavar="KEY", help="A setting or a table: training.kl, or training.", autocompletion=completion.keys),
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
