"""Checks a document that a command printed with --json against its schema."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema

from pvg_cli import documents

GROUPS = ("config", "runs")  # commands with commands of their own
PLAIN_SCHEMAS = ("schemas-named",)  # these print a JSON Schema


@cache
def schemas() -> dict[str, Any]:
    return documents.schemas()


def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schemas()[name])


def check_document(arguments: Sequence[str], document: Any) -> None:
    name = "error" if "error" in document else document_name(arguments, document)
    if name in PLAIN_SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(document)
    else:
        validator(name).validate(document)


def document_name(arguments: Sequence[str], document: Any) -> str:
    """The name of the schema for what `pvg ARGUMENTS` printed."""
    command, *rest = [word for word in arguments if word != "--json"]
    if command in GROUPS:
        inner = rest[0] if rest and not rest[0].startswith("-") else "list"
        return f"{command}-{inner}"
    of_report = next(iter(document.keys() & {"reports", "runs"}), "")
    variants = {
        "train": "train-dry-run" if "--dry-run" in rest else "train",
        "study": "study-list" if not rest else "study-plan" if "--dry-run" in rest else "study",
        "bench": "bench" if {"-p", "--profile"} & set(rest) else "bench-profiles",
        "view": "view-live" if "--live" in rest else "view",
        "report": {"reports": "report-benchmarks", "runs": "report-runs"}.get(of_report, "report"),
        "compare": "report-runs" if "runs" in document else "compare",
        "serve": "serve-verifier" if "--player" in rest else "serve",
        "schemas": "schemas-named" if rest else "schemas",
    }
    return variants.get(command, command)
