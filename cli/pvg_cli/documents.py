"""`pvg schemas`: the JSON Schemas of the documents that commands print with --json (documents.toml), and of files.

A command prints a plain dictionary, and `boundary.emit` adds its `schema_version`. The tests of the command line check
every document against its schema.

Rules for a change: a new field is no new version. A field that is removed, renamed or gets another meaning raises
`schema_version` of that document by one, here and in the dictionary that the command prints.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema
from typer import Argument

from pvg.attack.runner import RobustnessCard
from pvg.bench.compare import ReportComparison
from pvg.bench.profiling import ProfileResult
from pvg.bench.report import BenchReport
from pvg.config.describe import json_schema
from pvg.config.experiment import BatchArithmetic
from pvg.config.load import did_you_mean
from pvg.errors import UsageError
from pvg.evaluation.report import EvaluationReport
from pvg.evaluation.trace_report import MeasureReport
from pvg.hub import Download
from pvg.reporting.diagnosis import Diagnosis
from pvg.reporting.follow import RunGlance
from pvg.reporting.run_summary import AlertRecord, RunSummary
from pvg.reporting.solutions import Example
from pvg.study.results import StudyResults
from pvg_cli.boundary import emit, print_json
from pvg_cli.doctor import CheckResult
from pvg_cli.options import DebugOption, JsonOption
from pvg_cli.output import names_table, stdout

SETTINGS = "settings"
PLACE = Path(__file__).with_name("documents.toml")
# The names that documents.toml uses. `Settings`: an experiment as in its TOML file, whose schema is that of
# `pvg schemas settings`.
CLASSES = (AlertRecord, BatchArithmetic, BenchReport, CheckResult, Diagnosis, Download, EvaluationReport, Example)
MORE_CLASSES = (MeasureReport, ProfileResult, ReportComparison, RobustnessCard, RunGlance, RunSummary, StudyResults)
NAMES: Mapping[str, Any] = {each.__name__: each for each in (*CLASSES, *MORE_CLASSES)} | {
    "Literal": Literal,
    "Metrics": dict[str, float],
    "Settings": dict[str, Any],
    "Ended": Literal["complete", "interrupted"],
}
# Files of pvg that other programs read: name -> the file, and its class.
FILES: dict[str, tuple[str, type[BaseModel]]] = {
    "evaluation.json": ("the file runs/NAME/evaluation/evaluation.json", EvaluationReport),
    "card.json": ("the file card.json of pvg attack", RobustnessCard),
    "measures.json": ("the file measures/SOURCE/measures.json", MeasureReport),
    "study.json": ("the file runs/STUDY/study.json", StudyResults),
    "benchmark-report": ("the files that pvg bench writes, and pvg compare reads", BenchReport),
}


@cache
def documents() -> dict[str, tuple[str, type[BaseModel]]]:
    """Name -> the command that prints the document, and its type."""
    described = tomllib.loads(PLACE.read_text(encoding="utf-8"))
    parts = described.pop("parts")
    names = dict(NAMES)
    for name, lines in parts.items():
        names[name] = _model(name, lines, names, parts)
    found = {}
    for name, each in described.items():
        base = NAMES.get(each.get("base", ""))
        fixed = "" if base else "schema_version: Literal[1]\n"
        kind = _model("Document", fixed + each.get("fields", ""), names, parts, base, each.get("about"))
        found[name] = (each["of"], kind if base is None or "fields" in each else base)
    return found


def _model(
    name: str,
    lines: str,
    names: Mapping[str, Any],
    parts: Mapping[str, str],
    base: type[BaseModel] | None = None,
    about: str | None = None,
) -> type[BaseModel]:
    fields, more = _fields(lines, names, parts)
    config = None if base else ConfigDict(extra="allow" if more else "forbid")
    make: Any = create_model  # its own type does not know fields that are made at run time
    made: type[BaseModel] = make(name, __config__=config, __base__=base, __doc__=about, **fields)
    made.model_rebuild(_types_namespace=names)
    return made


def _fields(lines: str, names: Mapping[str, Any], parts: Mapping[str, str]) -> tuple[dict[str, Any], bool]:
    """The fields that the lines describe, and whether there may be more."""
    found: dict[str, Any] = {}
    more = False
    for line in filter(None, lines.splitlines()):
        fields, _, kind = line.partition(": ")
        if line == "...":
            more = True
        elif line in parts:
            found |= _fields(parts[line], names, parts)[0]
        elif not kind:
            found |= {name: (hint, ...) for name, hint in get_type_hints(names[line]).items()}
        else:
            for name in fields.split(", "):
                missing = Field(default_factory=lambda: None) if name.endswith("?") else ...
                found[name.removesuffix("?")] = (kind, missing)
    return found, more


class DocumentSchema(GenerateJsonSchema):
    """A number may be null: JSON has no other word for one that is not finite, such as a mean of no values. A dataclass
    is written with all its fields, and no others."""

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return {"type": ["number", "null"]}

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        found = super().dataclass_schema(schema)
        return {**found, "required": sorted(found["properties"]), "additionalProperties": False}


def schemas() -> dict[str, JsonSchemaValue]:
    """Name -> JSON Schema: first of the files that pvg writes, then of the documents that commands print."""
    found = {name: _schema(kind, about) for name, (about, kind) in FILES.items()}
    return found | {
        name: _schema(kind, command if name == "error" else f"{command} --json")
        for name, (command, kind) in documents().items()
    }


def _schema(kind: type[BaseModel], title: str) -> JsonSchemaValue:
    made = TypeAdapter(kind).json_schema(mode="serialization", schema_generator=DocumentSchema)
    return {"$schema": GenerateJsonSchema.schema_dialect, **made, "title": title}


def _names(incomplete: str) -> list[str]:
    return [name for name in (SETTINGS, *FILES, *documents()) if name.startswith(incomplete)]


def print_schemas(
    name: Annotated[
        str | None, Argument(metavar="NAME", help="Print this schema. Without a name: list all.", autocompletion=_names)
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the JSON Schemas of what pvg prints with --json and of its files, or print one of them."""
    if name == SETTINGS:
        print_json(json_schema())
        return
    found = schemas()
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
