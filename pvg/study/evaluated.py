"""Whether what `pvg evaluate` left in a cell's run is what the study asks for.

It is read from the document itself: somebody may have evaluated the run by hand since, or changed the study's file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from pvg.evaluation.courses import default_parts
from pvg.experiment import Experiment, differences
from pvg.store.run_directory import RunDirectory
from pvg.study.measures import EVALUATION

TRAINED = "trained"  # the baseline that an evaluation trains for itself: a study gives it no other
ATTACKED = ("found", "censored")  # attacks whose attacker's flaws are detected, or not


def lacking(run: RunDirectory, wanted: Experiment, parts: Sequence[str], rounds: Sequence[int]) -> str:
    """What the evaluation of a run has not of `parts` (none: all) of these rounds with the settings of `wanted`, in one
    line; "" where it has everything."""
    try:
        found = orjson.loads((run.path / EVALUATION).read_bytes())
    except FileNotFoundError:
        return "it is not evaluated"
    except orjson.JSONDecodeError:
        return "its evaluation is damaged"
    if not isinstance(found, Mapping) or not isinstance(found.get("settings"), Mapping):
        return "its evaluation tells no settings"
    return _foreign(found, wanted) or _missing(found, parts or default_parts(wanted), rounds)


def _foreign(found: Mapping[str, Any], wanted: Experiment) -> str:
    """What the evaluation was made of, where that is something else."""
    if found.get("config_hash") != wanted.hash():
        return "its evaluation is of another game"
    settings = {key: value for key, value in found["settings"].items() if value is not None}
    changed = differences(settings, wanted.evaluate.model_dump(mode="json", exclude_none=True), "evaluate.")
    return f"its evaluation has other settings: {'; '.join(changed)}" if changed else ""


def _missing(found: Mapping[str, Any], asked: Sequence[str], rounds: Sequence[int]) -> str:
    by_number = {row.get("round"): row for row in found.get("rounds", ())}
    for number in rounds:
        row = by_number.get(number, {})
        if part := next((part for part in asked if row.get(part.replace("-", "_")) is None), None):
            return f"its evaluation has no {part} of round {number}"
        if {"exploit", "detection"} <= set(asked) and (kind := _undetected(row)):
            return f"its evaluation has no detection of the {kind} attacker of round {number}"
    if "tax" in asked and (found.get("baseline") or {}).get("source") != TRAINED:
        return "its tax is measured against another baseline"
    return ""


def _undetected(row: Mapping[str, Any]) -> str:
    """The kind of an attacker that detection was not asked about: it was trained later."""
    sources = {flaws["source"] for flaws in row["detection"].get("sources", ())}
    attacked = (attack["kind"] for attack in row["exploit"] if attack["status"] in ATTACKED)
    return next((kind for kind in attacked if f"attack-{kind}" not in sources), "")
