"""The contracts for other programs: schemas, error documents, and the page about them."""

from __future__ import annotations

import re
from pathlib import Path

import jsonschema
import orjson
import pytest
from calling import pvg
from run_samples import begin, played
from shipped_schemas import GROUPS, schemas

from pvg.config.describe import json_schema as settings_schema
from pvg.errors import EXIT_CHECK_FAILED, EXIT_ENVIRONMENT, EXIT_USAGE
from pvg.store.shards import SHARD_SCHEMA
from pvg.store.state import STATE_SCHEMA
from pvg_cli.boundary import EXIT_DEFECT, EXIT_STOPPED
from pvg_cli.documents import FILES, documents
from pvg_cli.main import PLACES, load_command

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_every_command_with_json_has_a_schema() -> None:
    names = {"error", "train-dry-run", "report-runs", "report-benchmarks", "serve-verifier", "bench-profiles"}
    names |= {"study-list", "study-plan", "view-live"}  # what one command prints besides its main document
    for name in PLACES:
        each = load_command(name)
        inner = getattr(each, "commands", {})
        if inner:
            assert name in GROUPS
        for inside, parts in ({f"{name}-{part}": found for part, found in inner.items()} or {name: each}).items():
            assert any("--json" in option.opts for option in parts.params), inside
            names.add(inside)
    assert names == set(documents())


def test_schemas_lists_and_prints_them() -> None:
    assert "train-dry-run" in pvg("schemas").out
    entries = pvg("schemas", "--json").document["schemas"]
    assert {entry["name"] for entry in entries} == set(documents()) | set(FILES)
    assert orjson.loads(pvg("schemas", "train").out) == schemas()["train"]
    assert orjson.loads(pvg("schemas", "settings").out) == settings_schema()
    for name, schema in schemas().items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["properties"]["schema_version"]["const"] >= 1, name
    wrong = pvg("schemas", "trian", "--json")
    assert wrong.code == 2
    assert "'train'" in wrong.document["error"]["message"]


def test_the_settings_of_a_dry_run_follow_the_schema_of_settings() -> None:
    shown = dict(pvg("config", "show", "--json").document)
    del shown["schema_version"]
    planned = pvg("train", "--dry-run", "--json").document["experiment"]
    validator_ = jsonschema.Draft202012Validator(settings_schema())
    for settings in (shown, planned):
        assert [error.message for error in validator_.iter_errors(settings)] == []


def test_documents_of_commands_that_look() -> None:
    """`document` checks each of them against its schema; other tests read those of the other commands."""
    played(Path("runs"))
    for line in ("report first fresh", "config explain seed", "config explain training", "config show", "init new"):
        begin(Path("runs"), "fresh")
        called = pvg(*line.split(), "--json")
        assert called.code == 0, (line, called.err)
        assert called.document
        assert pvg("runs", "remove", "fresh", "--yes", "--json").document["removed"] == ["runs/fresh"]


def test_the_page_has_the_versions_and_exit_codes_of_the_code() -> None:
    page = (ROOT / "docs/contracts.md").read_text()
    codes = {EXIT_CHECK_FAILED, EXIT_USAGE, EXIT_ENVIRONMENT, EXIT_DEFECT, EXIT_STOPPED}
    listed = {int(line.split("|")[1]) for line in page.splitlines() if re.match(r"\| \d+ \|", line)}
    assert listed == {0, *codes}
    assert f"its field `schema`, now {STATE_SCHEMA}" in page
    assert SHARD_SCHEMA == b"1"
