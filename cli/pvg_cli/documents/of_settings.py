"""The documents about settings and schemas, and those of servers."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from pvg_cli.documents.base import DocumentPart, JsonDocument

# --- config, init, schemas -------------------------------------------------------------------------------------------


class ConfigShowDocument(JsonDocument):
    """All settings of an experiment. Without `schema_version`, `pvg config schema --json` is their schema."""

    model_config = ConfigDict(extra="allow")

    name: str
    seed: int


class SettingForm(DocumentPart):
    kinds: list[str]
    meaning: str
    type: str
    range: str
    default: str


class InnerSetting(DocumentPart):
    key: str
    kinds: list[str]
    meaning: str
    range: str
    default: str


class ConfigExplainDocument(JsonDocument):
    """A setting has `forms`; a table with kinds has `kinds` and `settings`; a section has `meaning` and `settings`.
    `experiments`: by name, the value that it sets."""

    key: str
    forms: list[SettingForm] = Field(default=[])
    meaning: str = ""
    default: str = ""
    kinds: dict[str, str] = Field(default={})
    settings: list[InnerSetting] = Field(default=[])
    experiments: dict[str, str] = Field(default={})


class ConfigValidateDocument(JsonDocument):
    """A valid experiment. For settings that are wrong, the command prints an error."""

    valid: Literal[True]
    name: str
    hash: str
    warnings: list[str]


class InitDocument(JsonDocument):
    """`files`: what was written. `next`: by command, its purpose."""

    files: list[str]
    next: dict[str, str]


class SchemaEntry(DocumentPart):
    name: str
    version: int
    about: str
    path: str


class SchemasDocument(JsonDocument):
    """The schemas that come with pvg."""

    schemas: list[SchemaEntry]


# --- servers ---------------------------------------------------------------------------------------------------------


class ServeDocument(JsonDocument):
    """Printed when the server is ready. `pid`: end this process to stop the server."""

    url: str
    pid: int
    server_pid: int
    experiment: str
    purpose: Literal["prover", "verifier", "reference"] = Field(alias="for")
    model: str
    runner: str
    log: str
    weights_root: str
    python: str
    vllm: str
    device: str


class ServeVerifierDocument(JsonDocument):
    """Printed when the server is ready."""

    url: str
    run: str
    round: int


class WatchDocument(JsonDocument):
    """Printed when the page is ready. `forward`: an ssh command that shows it on another machine."""

    url: str
    run: str
    path: str
    forward: str
