"""`pvg schemas [NAME]`: the JSON Schemas of the documents that commands print with --json, and of pvg's files."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pvg_cli.boundary import emit, print_json
from pvg_cli.options import DebugOption, JsonOption


def _names(incomplete: str) -> list[str]:
    from pvg_cli.documents import FILES, documents

    return [name for name in FILES | documents() if name.startswith(incomplete)]


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
    from pvg.errors import UsageError
    from pvg_cli import documents

    found = documents.schemas()
    if name is None:
        entries = [_entry(each, schema) for each, schema in found.items()]
        emit({"schemas": entries}) if as_json else _print(entries)
    elif name in found:
        print_json(found[name])
    else:
        raise UsageError(f"There is no schema {name!r}.{did_you_mean(name, list(found))}", "To list them: pvg schemas")


def _entry(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "version": schema["properties"]["schema_version"]["const"], "about": schema["title"]}


def _print(entries: list[dict[str, Any]]) -> None:
    from pvg.reporting.table import Column, Table
    from pvg_cli.output import stdout

    table = Table([Column("schema", style="strong", wrap=False), Column("version", "right"), Column("of")], narrow=True)
    for entry in entries:
        table.add(entry["name"], str(entry["version"]), entry["about"])
    console = stdout()
    console.print(table)
    console.print("\nTo print one: pvg schemas NAME")
