"""`pvg schemas [NAME]`: the JSON Schemas of the documents that commands print with --json, and of pvg's files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import pvg
from pvg_cli.boundary import DebugOption, JsonOption, emit, guarded, print_json

SCHEMAS = Path(__file__).with_name("schemas")
SUFFIX = ".schema.json"
# The schemas of files that the library writes are beside the modules that write them.
FILES = {
    "evaluation.json": ("evaluation/report.schema.json", "the file runs/NAME/evaluation/evaluation.json"),
    "study.json": ("study/study.schema.json", "the file runs/STUDY/study.json"),
    "benchmark-report": ("bench/report.schema.json", "the files that pvg bench writes, and pvg compare reads"),
}


def register(app: typer.Typer) -> None:
    app.command("schemas")(schemas)


def known_schemas() -> dict[str, Path]:
    """Name -> file: first the files that pvg writes, then the documents that commands print."""
    library = Path(pvg.__file__).parent
    files = {name: library / place for name, (place, _) in FILES.items()}
    documents = {path.name.removesuffix(SUFFIX): path for path in sorted(SCHEMAS.glob(f"*{SUFFIX}"))}
    return files | documents


def _names(incomplete: str) -> list[str]:
    return [name for name in known_schemas() if name.startswith(incomplete)]


@guarded
def schemas(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Print this schema. Without a name: list all.", autocompletion=_names),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the JSON Schemas of what pvg prints with --json and of its files, or print one of them."""
    found = known_schemas()
    if name is not None:
        print_json(_read(_chosen(name, found)))
    elif as_json:
        emit({"schemas": [_entry(each, path) for each, path in found.items()]})
    else:
        _print(found)


def _chosen(name: str, found: dict[str, Path]) -> Path:
    from pvg.config.load import did_you_mean
    from pvg.errors import UsageError

    if name not in found:
        raise UsageError(f"There is no schema {name!r}.{did_you_mean(name, list(found))}", "To list them: pvg schemas")
    return found[name]


def _read(path: Path) -> dict[str, Any]:
    import orjson

    schema: dict[str, Any] = orjson.loads(path.read_bytes())
    return schema


def _entry(name: str, path: Path) -> dict[str, Any]:
    schema = _read(path)
    return {
        "name": name,
        "version": schema["properties"]["schema_version"]["const"],
        "about": FILES[name][1] if name in FILES else schema["title"],
        "path": str(path),
    }


def _print(found: dict[str, Path]) -> None:
    from pvg.reporting.table import Column, Table
    from pvg_cli.output import stdout

    table = Table([Column("schema", style="strong", wrap=False), Column("version", "right"), Column("of")], narrow=True)
    for name, path in found.items():
        entry = _entry(name, path)
        table.add(name, str(entry["version"]), entry["about"])
    console = stdout()
    console.print(table)
    console.print("\nTo print one: pvg schemas NAME")
