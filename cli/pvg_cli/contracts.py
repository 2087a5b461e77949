"""`pvg schemas [NAME]`: the JSON Schemas of the documents that commands print with --json, and of pvg's files."""

from __future__ import annotations

from typing import Annotated

import typer

from pvg.errors import UsageError
from pvg_cli.boundary import emit, print_json
from pvg_cli.options import DebugOption, JsonOption

SETTINGS = "settings"


def _names(incomplete: str) -> list[str]:
    from pvg_cli.documents import FILES, documents

    return [name for name in (SETTINGS, *FILES, *documents()) if name.startswith(incomplete)]


def schemas(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Print this schema. Without a name: list all.", autocompletion=_names),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the JSON Schemas of what pvg prints with --json and of its files, or print one of them."""
    from pvg.config.load import did_you_mean
    from pvg_cli import documents
    from pvg_cli.output import names_table, stdout

    if name == SETTINGS:
        from pvg.config.describe import json_schema

        print_json(json_schema())
        return
    found = documents.schemas()
    if name is not None:
        if name not in found:
            hint = did_you_mean(name, [SETTINGS, *found])
            raise UsageError(f"There is no schema {name!r}.{hint}", "To list them: pvg schemas")
        print_json(found[name])
        return
    rows = [(each, schema["properties"]["schema_version"]["const"], schema["title"]) for each, schema in found.items()]
    if as_json:
        emit({"schemas": [{"name": each, "version": version, "about": about} for each, version, about in rows]})
    else:
        about = {each: f"version {version}, {about}" for each, version, about in rows}
        about[SETTINGS] = "the TOML file of an experiment"
        stdout().print(names_table(about, "To print one", "pvg schemas NAME"))
