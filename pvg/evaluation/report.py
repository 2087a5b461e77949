"""`evaluation.json`: what `pvg evaluate` found, schema version 1 (docs/evaluation.md says what each number means).

    write_report(path, report)
    report = read_report(path)

The JSON Schema that comes with pvg, `report.schema.json`, is made from these classes by `python -m
pvg.evaluation.report`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from pvg.errors import StateError
from pvg.store.atomic import write_atomic
from pvg.store.run_directory import RunDirectory

REPORT_FILE = "evaluation.json"
SCHEMA_FILE = Path(__file__).with_name("report.schema.json")


class Strict(BaseModel):
    """Nothing unknown, and no number that JSON cannot hold."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


class Number(Strict):
    """A value, its interval at `settings.confidence`, and what it rests on: `n` solutions (curves: problems) of
    `problems` problems. null: there is no such number (a mean over nothing, an interval that cannot be told)."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    problems: int


class Check(Strict):
    """A trained attacker's fresh samples on test problems; they select nothing. `gap`: mean score of correct helpful
    solutions less that of its wrong ones, in logits."""

    error_rate: Number
    gap: Number
    accepted: Number


class Attack(Strict):
    """`steps` of a found exploit; of a censored attack the steps that were tried. `gap`s in logits, of the pooled
    window: at the end, and the smallest with enough wrong solutions (at `closest_step`)."""

    kind: Literal["src", "cgc", "goodhart"]
    status: Literal["found", "censored", "no_reference", "no_signal", "diverged"]
    limit: int
    window: int
    reference: Number
    steps: int | None = None
    error_rate: float | None = None
    gap: float | None = None
    closest_gap: float | None = None
    closest_step: int | None = None
    reason: str = ""
    check: Check | None = None


class BalancedPoint(Strict):
    n: int
    accuracy: Number
    excluded: int


class NaturalPoint(Strict):
    n: int
    accuracy: Number
    pass_at_n: Number
    chance: Number
    excluded: int


class Curves(Strict):
    """Best-of-n of one source of solutions; `excluded` problems had too few (balanced: of either kind)."""

    source: str
    balanced: list[BalancedPoint]
    natural: list[NaturalPoint]


class Flaws(Strict):
    """Detection of one source's flaws. `solutions` were sampled; the flaws among them are soundness.n. `roc`: corners
    of the curve as (false-positive rate, true-positive rate). `band`: (false-positive rate, true-positive rate, low,
    high) at fixed false-positive rates, a pointwise band and no simultaneous one; null where there is no interval, and
    empty where there are no flaws or none to tell them from, or where an older pvg measured it."""

    source: str
    solutions: int
    soundness: Number
    auc: Number
    roc: list[tuple[float, float]]
    band: list[tuple[float, float, float | None, float | None]] = []


class Detection(Strict):
    threshold: float
    completeness: Number
    helpful_accuracy: Number
    accepted_correct: Number
    sources: list[Flaws]


class Separability(Strict):
    overall: Number
    correct: Number
    incorrect: Number


class Bin(Strict):
    predicted: float
    correct: Number


class Calibrated(Strict):
    """`ece_by_chance`: what a calibrated verifier's error would be on as many problems; null as an interval."""

    ece: Number
    ece_by_chance: float | None = None
    brier: Number
    bins: list[Bin]


class Calibration(Strict):
    """`slope` and `offset` of the Platt fit to all solutions; `fitted` is cross-fitted."""

    raw_is_probability: bool
    raw: Calibrated
    fitted: Calibrated | None
    slope: float
    offset: float


class Localisation(Strict):
    """`gain` is accuracy less guessing's."""

    known: bool
    accuracy: Number | None = None
    chance: float | None = None
    gain: Number | None = None
    solutions: int = 0


class Distance(Strict):
    """A policy's helpful role: KL to the start in nats per sequence and per token, and its accuracy."""

    name: str
    kl: Number
    kl_per_token: Number
    accuracy: Number


class Tax(Strict):
    """`tax` has no value where the prover's KL is out of the baseline's range (`in_range`)."""

    policy: Distance
    tax: Number
    in_range: bool
    kl_range: tuple[float, float]


class Baseline(Strict):
    """The correctness baseline's trajectory; `source` is "trained" or the run it was taken from."""

    source: str
    points: list[Distance]


class RoundEvaluation(Strict):
    round: int
    verifier_version: str | None = None
    exploit: list[Attack] | None = None
    best_of_n: list[Curves] | None = None
    detection: Detection | None = None
    separability: Separability | None = None
    calibration: Calibration | None = None
    localisation: Localisation | None = None
    tax: Tax | None = None


class EvaluationReport(Strict):
    """`status` "partial": something of what was asked for is not there yet. `stale`: parts that were computed from
    other settings than `settings`, or from other samples than there are now, and are therefore not shown."""

    schema_version: Literal[1] = 1
    status: Literal["complete", "partial"]
    run: str
    experiment: str
    config_hash: str
    code_version: str
    machine: str
    created: str  # ISO 8601, UTC
    rounds_finished: int
    rounds_planned: int
    settings: dict[str, Any]
    rounds: list[RoundEvaluation]
    baseline: Baseline | None = None
    stale: list[str] = []
    notes: list[str] = []

    def plain(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


def write_report(path: Path, report: EvaluationReport) -> None:
    write_atomic(path, orjson.dumps(report.plain(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def report_of(run: RunDirectory) -> EvaluationReport | None:
    """What is there of a run; None where it was never evaluated. Raises StateError as `read_report`."""
    path = run.evaluation / REPORT_FILE
    return read_report(path) if path.is_file() else None


def read_report(path: Path) -> EvaluationReport:
    """Raises StateError for a file that is no evaluation of this version."""
    try:
        return EvaluationReport.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise StateError(
            f"{path} is no evaluation that this pvg can read: {place}: {first['msg']}.", "Run pvg evaluate again."
        ) from None


def schema() -> dict[str, Any]:
    """The JSON Schema of a report."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **EvaluationReport.model_json_schema()}


def schema_text() -> bytes:
    return orjson.dumps(schema(), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)


if __name__ == "__main__":
    SCHEMA_FILE.write_bytes(schema_text())
