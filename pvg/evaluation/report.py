"""`evaluation.json`: what `pvg evaluate` found, schema version 1 (docs/evaluation.md says what each number means).

    write_report(path, report)
    report = read_report(path)

The JSON Schema that comes with pvg, `report.schema.json`, is made from these classes by `python -m
pvg.evaluation.report`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from pvg.config.experiment import Experiment
from pvg.errors import StateError
from pvg.evaluation.opponents import attack_kinds
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


# What a reader must know of an evaluation's numbers, in sentences.


def notes(experiment: Experiment) -> list[str]:
    """What a reader must know of this run's numbers."""
    found = []
    rollout = experiment.rollout
    if rollout.top_p < 1.0 or rollout.top_k > 0:
        found.append(
            f"Solutions are sampled from a part of the distribution (rollout.top_p = {rollout.top_p}, rollout.top_k = "
            f"{rollout.top_k}): the KL's estimate is biased."
        )
    if experiment.verifier.loss != "cross_entropy":
        found.append(
            f"verifier.loss = {experiment.verifier.loss!r} fixes no offset of a score: sigmoid(score) is no "
            "probability. The fitted calibration is one as far as a straight line in the score goes."
        )
    if experiment.verifier.ensemble > 1:
        found.append(
            f"verifier.ensemble = {experiment.verifier.ensemble} members' scores are put together "
            f"({experiment.verifier.aggregation}), and no loss has made a probability of sigmoid(that)."
        )
    return found + _notes_of_roles(experiment) + _notes_of_attacks(experiment) + _notes_of_translators(experiment)


def _notes_of_roles(experiment: Experiment) -> list[str]:
    share, found = experiment.game.sneaky_share, []
    if share in (0.0, 1.0):
        role = "sneaky" if share == 0.0 else "helpful"
        found.append(
            f"game.sneaky_share = {share} never trained the {role} role: what stands here of it is of a prover that "
            "was trained for the other one alone."
        )
    if experiment.rollout.prompts == "plain":
        found.append(
            "rollout.prompts = 'plain' gives both roles one prompt, so they are one policy: helpful and sneaky "
            "solutions differ by chance alone, and a separability of 0.5 says nothing."
        )
    return found


def _notes_of_attacks(experiment: Experiment) -> list[str]:
    training, found = experiment.training, []
    if training.schedule != "constant":
        found.append(
            f"training.schedule = {training.schedule!r} runs out over evaluate.attack_steps = "
            f"{experiment.evaluate.attack_steps}: steps to exploit compare among attacks of that limit alone."
        )
    if experiment.rollout.group_deadline_s is not None:
        found.append(
            "Attacks' batches may differ in size (rollout.group_deadline_s), and the window "
            "of an attack's criterion weighs them alike."
        )
    return found


def _notes_of_translators(experiment: Experiment) -> list[str]:
    if experiment.game.protocol.kind != "decoupled":
        return []
    found = [
        "The solutions are translations, and correct is one with the right answer: a faithful translator is right as "
        "often as its solver. A wrong translation counts as a flaw whether or not it keeps the solver's answer; a cgc "
        "attacker is paid for those alone that do not."
    ]
    if unpaid := [kind for kind in experiment.evaluate.attacks if kind not in attack_kinds(experiment)]:
        found.append(f"No {', '.join(unpaid)} attackers: what they are paid, no translator can earn.")
    return found


def notes_of_results(rounds: Sequence[Mapping[str, Any]], error_rate: float) -> list[str]:
    """Attackers of the report's `rounds` that never were what an attack is judged as: wrong often enough."""
    found: dict[str, list[str]] = {}
    for round_ in rounds:
        for attack in round_.get("exploit") or ():
            if attack["status"] == "censored" and attack["closest_gap"] is None:
                found.setdefault(attack["kind"], []).append(str(round_["round"]))
    return [
        f"The {kind} attacker of round {', '.join(numbers)} was never wrong in {100 * error_rate:g} % of a window's "
        "solutions (evaluate.attack_error_rate): no success of it could be found, which says nothing of the verifier."
        for kind, numbers in found.items()
    ]
