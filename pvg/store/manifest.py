"""Manifests: one JSON document per finished phase, with its inputs, outputs, configuration and code."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from pvg.store.atomic import make_directory, write_atomic
from pvg.store.run_directory import RunDirectory

MANIFEST_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """`inputs` and `outputs` name files and what identifies them. `finished`: seconds since 1970. `peak_memory`: the
    maximum over the processes of the run so far, in bytes.

    A metric that is NaN or infinite reads back as None. `machine`: torch, device and threads, which affect the last
    bits of the results.
    """

    round: int
    phase: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    config_hash: str
    code_version: str
    metrics: Mapping[str, float | None]
    finished: float
    peak_memory: Mapping[str, float]
    machine: str
    schema: int = MANIFEST_SCHEMA


def write_manifest(
    run: RunDirectory,
    round_: int,
    phase: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    config_hash: str,
    code_version: str,
    metrics: Mapping[str, float | None],
    peak_memory: Mapping[str, float],
    machine: str = "",
    *,
    before: Callable[[], None] | None = None,
) -> Path:
    """Write `manifest/round-002-train_prover.json`, atomically. `before` is called just before it gets its name.

    If a process was killed between this and the commit, the repeated phase replaces the manifest.
    """
    given = (round_, phase, inputs, outputs, config_hash, code_version, metrics)
    manifest = Manifest(*given, time.time(), peak_memory, machine)
    path = run.manifest / f"round-{round_:03d}-{phase}.json"
    make_directory(run.manifest)
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
    write_atomic(path, orjson.dumps(asdict(manifest), option=options), before)
    return path
