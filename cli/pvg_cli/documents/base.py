"""What all documents have in common, and the document of an error."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Metrics = dict[str, float | None]  # null: not a finite number, such as a mean of no values
Settings = dict[str, Any]  # an experiment as in its TOML file; `pvg config schema --json` is its schema


class DocumentPart(BaseModel):
    model_config = ConfigDict(extra="forbid")


class JsonDocument(DocumentPart):
    """A whole document: one object on stdout."""

    schema_version: Literal[1]


class ErrorDetails(DocumentPart):
    """`message`: what is wrong, in one line. `remedy`: what to do, or "". `exit_code`: that of the command."""

    type: str
    message: str
    remedy: str
    exit_code: Literal[2, 3, 70, 130]


class ErrorDocument(JsonDocument):
    """Any command that cannot do its work prints this document instead."""

    error: ErrorDetails
