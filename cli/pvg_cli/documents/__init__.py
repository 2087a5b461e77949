"""The JSON documents that commands print with --json, as types. The shipped schemas are made from them.

    python -m pvg_cli.documents     # writes cli/pvg_cli/schemas/, and the table in docs/contracts.md

A command prints a plain dictionary, and `boundary.emit` adds its `schema_version`. The tests of the command line check
every document against its schema. To add a document: write its class here, add it to DOCUMENTS, and write the schemas.

Rules for a change: a new field is no new version. A field that is removed, renamed or gets another meaning raises
`schema_version` of that document by one, here and in the dictionary that the command prints.
"""

from __future__ import annotations

from pathlib import Path

import orjson
from pydantic import BaseModel

from pvg_cli.documents.base import ErrorDocument
from pvg_cli.documents.of_measurements import (
    BenchDocument,
    BenchProfilesDocument,
    CompareDocument,
    DiagnoseDocument,
    DoctorDocument,
    PlanDocument,
    ProfileDocument,
    StudyDocument,
    StudyListDocument,
    StudyPlanDocument,
)
from pvg_cli.documents.of_runs import (
    DryRunDocument,
    EvaluateDocument,
    ExportDocument,
    ReportBenchmarksDocument,
    ReportDocument,
    ReportRunsDocument,
    RolloutDocument,
    RunsListDocument,
    RunsRemoveDocument,
    RunsShowDocument,
    RunsTagDocument,
    ScoreDocument,
    TaskCheckDocument,
    TrainDocument,
)
from pvg_cli.documents.of_settings import (
    ConfigExplainDocument,
    ConfigShowDocument,
    ConfigValidateDocument,
    InitDocument,
    SchemasDocument,
    ServeDocument,
    ServeVerifierDocument,
    WatchDocument,
)

SCHEMAS = Path(__file__).parent.with_name("schemas")
PAGE = Path("docs") / "contracts.md"
MARKS = ("<!-- documents -->", "<!-- end of documents -->")
DIALECT = "https://json-schema.org/draft/2020-12/schema"

# Name -> the command that prints the document, and its class.
DOCUMENTS: dict[str, tuple[str, type[BaseModel]]] = {
    "error": ("any command", ErrorDocument),
    "train": ("pvg train", TrainDocument),
    "train-dry-run": ("pvg train --dry-run", DryRunDocument),
    "rollout": ("pvg rollout", RolloutDocument),
    "task-check": ("pvg task check NAME", TaskCheckDocument),
    "runs-list": ("pvg runs list", RunsListDocument),
    "runs-show": ("pvg runs show RUN", RunsShowDocument),
    "runs-tag": ("pvg runs tag RUN", RunsTagDocument),
    "runs-remove": ("pvg runs remove RUN", RunsRemoveDocument),
    "report": ("pvg report RUN", ReportDocument),
    "report-runs": ("pvg report RUN RUN", ReportRunsDocument),
    "report-benchmarks": ("pvg report FILE", ReportBenchmarksDocument),
    "evaluate": ("pvg evaluate RUN", EvaluateDocument),
    "score": ("pvg score RUN FILE.jsonl --out FILE", ScoreDocument),
    "export": ("pvg export RUN --player prover --out DIR", ExportDocument),
    "bench": ("pvg bench --profile NAME", BenchDocument),
    "bench-profiles": ("pvg bench", BenchProfilesDocument),
    "compare": ("pvg compare A B", CompareDocument),
    "profile": ("pvg profile", ProfileDocument),
    "plan": ("pvg plan", PlanDocument),
    "study": ("pvg study NAME", StudyDocument),
    "study-list": ("pvg study", StudyListDocument),
    "study-plan": ("pvg study NAME --dry-run", StudyPlanDocument),
    "diagnose": ("pvg diagnose RUN", DiagnoseDocument),
    "doctor": ("pvg doctor", DoctorDocument),
    "config-show": ("pvg config show", ConfigShowDocument),
    "config-explain": ("pvg config explain KEY", ConfigExplainDocument),
    "config-validate": ("pvg config validate", ConfigValidateDocument),
    "init": ("pvg init", InitDocument),
    "schemas": ("pvg schemas", SchemasDocument),
    "serve": ("pvg serve EXPERIMENT", ServeDocument),
    "serve-verifier": ("pvg serve RUN --player verifier", ServeVerifierDocument),
    "watch": ("pvg watch RUN", WatchDocument),
}


def json_schema(name: str) -> bytes:
    """The JSON Schema of a document, as the shipped file."""
    command, document = DOCUMENTS[name]
    schema = {
        "$schema": DIALECT,
        **document.model_json_schema(mode="serialization"),
        "title": f"{command} --json" if name != "error" else "any command --json, on an error",
    }
    return orjson.dumps(schema, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)


def write_schemas() -> None:
    for name in DOCUMENTS:
        (SCHEMAS / f"{name}.schema.json").write_bytes(json_schema(name))


def with_table(page: str) -> str:
    """The text of docs/contracts.md with the present table of documents between its marks."""
    head, _, rest = page.partition(MARKS[0])
    _, _, tail = rest.partition(MARKS[1])
    rows = ["| schema | version | printed by | content |", "|---|---|---|---|"]
    for name, (command, document) in DOCUMENTS.items():
        version = document.model_json_schema()["properties"]["schema_version"]["const"]
        about = " ".join((document.__doc__ or "").split())
        printed_by = command if name == "error" else f"`{command}`"
        rows.append(f"| `{name}` | {version} | {printed_by} | {about} |")
    return "\n".join([f"{head}{MARKS[0]}", "", *rows, "", f"{MARKS[1]}{tail}"])
