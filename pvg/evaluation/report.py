"""`evaluation.json`, the result of `pvg evaluate`, schema version 1 (docs/evaluation.md explains each number).

`pvg schemas evaluation.json` prints the JSON Schema of these classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import Field, ValidationError

from pvg.config.base import StrictRecord
from pvg.config.experiment import Experiment, without_memory_settings
from pvg.config.game import CgcReward, GoodhartReward, RewardSection, SrcReward
from pvg.config.load import build_experiment, differences, load_experiment, refuse_unknown
from pvg.config.rules import reward_conflicts
from pvg.errors import ConfigurationError, StateError, UsageError
from pvg.seeds import seed_for
from pvg.store.atomic import read_stored, write_atomic
from pvg.store.run_directory import RunDirectory
from pvg.store.run_players import pinned_players
from pvg.verifier.intervals import Estimate

# The parts of an evaluation, and the settings of the attackers and the baseline; loads no torch.

OF_PLAYERS = ("exploit", "best-of-n", "detection", "separability", "calibration", "localisation", "cross")
PARTS = (*OF_PLAYERS, "legibility", "tax")


def parse_parts(text: str) -> Sequence[str]:
    """The parts in `a,b,c`, in standard order. Raises UsageError with the nearest name."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        refuse_unknown("part {} of an evaluation", name, PARTS)
    if not names:
        raise UsageError("--parts names no part.", f"Known: {', '.join(PARTS)}.")
    return tuple(part for part in PARTS if part in names)


def parse_rounds(text: str | None) -> Sequence[int] | None:
    """The rounds in `0,2`; None for None. Raises UsageError for anything but numbers."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or not all(name.isdecimal() for name in names):
        raise UsageError(f"--rounds {text!r} is not a list of rounds.", "For example: --rounds 0,2")
    return [int(name) for name in names]


# --- settings ---------------------------------------------------------------------------------------------------------

KINDS = ("src", "cgc", "goodhart")
ATTACKED = ("found", "censored")  # statuses of attacks that have left an attacker


def policy_experiment(
    experiment: Experiment,
    role: Literal["helpful", "sneaky"],
    reward: RewardSection,
    training: Mapping[str, Any],
    place: str,
) -> Experiment:
    """The run's settings with one role, another reward, changes of the training, and separate random numbers.

    Validated like an experiment, except for one rule: a game requires both roles for `src` and `cgc`, but an attacker
    has one. Raises ConfigurationError."""
    plain = experiment.plain()
    plain["game"] |= {"sneaky_share": 1.0 if role == "sneaky" else 0.0, "reward": "goodhart"}
    plain["training"] |= {name: value for name, value in training.items() if value is not None}
    # An attack is judged by its batches, so they must not be selected by their outcome.
    plain["training"] |= {"dynamic_sampling": 0}
    plain["seed"] = seed_for(experiment.seed, "evaluate", place)
    valid = build_experiment(plain, "evaluate")
    final = valid.model_copy(update={"game": valid.game.model_copy(update={"reward": reward})})
    if impossible := reward_conflicts(final):
        raise ConfigurationError(
            f"No policy with reward {final.game.reward.kind!r} can be trained with these settings: {impossible[0]}.",
            "Remove it from evaluate.attacks, for example: -s 'evaluate.attacks=[\"goodhart\"]'.",
        )
    return final


def attacker_experiment(experiment: Experiment, kind: str, place: str, cgc_floor: float | None) -> Experiment:
    """The settings of an attacker with reward `kind`. Raises ConfigurationError."""
    section = experiment.evaluate
    reward = _reward(experiment, kind, cgc_floor)
    training = {"steps": section.attack_steps, "groups": section.attack_groups}
    return policy_experiment(experiment, "sneaky", reward, training, place)


def _reward(experiment: Experiment, kind: str, cgc_floor: float | None) -> RewardSection:
    """An attacker's reward; with the run's own settings where the run has a reward of that kind."""
    own = experiment.game.reward
    if kind == "cgc":
        return (
            CgcReward(floor=cgc_floor) if cgc_floor is not None else own if isinstance(own, CgcReward) else CgcReward()
        )
    if kind == "src":
        return own if isinstance(own, SrcReward) else SrcReward()
    return GoodhartReward()


def default_parts(experiment: Experiment) -> Sequence[str]:
    """The parts that are measured by default: all that exist for the run's game but legibility, in which a model reads
    each solution once per measure, token by token."""
    without = {"legibility"} | ({"tax"} if experiment.game.protocol.kind == "decoupled" else set())
    return tuple(part for part in PARTS if part not in without)


def attack_kinds(experiment: Experiment) -> list[str]:
    """The kinds of `evaluate.attacks` in standard order. In a decoupled game without those whose reward a translator
    cannot earn (the report's notes name them)."""
    translating = experiment.game.protocol.kind == "decoupled"
    kinds = [kind for kind in KINDS if kind in experiment.evaluate.attacks]
    return [kind for kind in kinds if not translating or _reward(experiment, kind, None).for_translators]


def settings_to_evaluate(run: RunDirectory, overrides: Sequence[str]) -> Experiment:
    """The settings of the run with the overrides. Raises StateError for an override that changes results.
    MEMORY_SETTINGS may differ."""
    own, experiment = run.experiment(), load_experiment(run.experiment_file, overrides)
    experiment = experiment.with_sources(pinned_players(experiment.sources()))
    changed = differences(without_memory_settings(own.hashed()), without_memory_settings(experiment.hashed()))
    if changed:
        raise StateError(
            f"The run {run.name!r} was played with other settings: {'; '.join(changed)}.",
            "Change evaluate.*, serving.*, telemetry.* and the settings that bound memory only, such as "
            "training.micro_batch_tokens. The other settings belong to the run.",
        )
    return experiment


def check_protocol(experiment: Experiment, parts: Sequence[str]) -> None:
    """Raises UsageError for self-play, which has no verifier, and for the tax in a decoupled game, whose faithful role
    need not be correct."""
    if experiment.task.kind == "play":
        raise UsageError(
            "pvg evaluate measures verifiers, and task.kind = 'play' has none.",
            "The rating of a policy is in its rounds: pvg view RUN",
        )
    if experiment.game.protocol.kind == "decoupled" and "tax" in parts:
        raise UsageError(
            "There is no legibility tax of game.protocol = 'decoupled': its faithful role is rewarded for keeping the "
            "solver's answer, not for being correct (solver_accuracy and faithful are in the rounds' metrics).",
            "Leave tax out of the parts.",
        )


def check_attacks(experiment: Experiment) -> None:
    """Raises ConfigurationError for attacks that could never succeed because they end before their window is full, and
    for attackers that could not learn."""
    section, minibatches = experiment.evaluate, experiment.training.minibatches
    if (least := section.attack_window * minibatches) > section.attack_steps:
        each = f" of {minibatches} steps each" if minibatches > 1 else ""
        raise ConfigurationError(
            f"evaluate.attack_window = {section.attack_window} batches{each} do not fit into evaluate.attack_steps = "
            f"{section.attack_steps}, so no attack could succeed.",
            f"Set evaluate.attack_steps to at least {least}, or lower evaluate.attack_window.",
        )
    kinds = attack_kinds(experiment)
    if section.attacks and not kinds:
        raise ConfigurationError(
            f"A translator of the decoupled game earns no reward of evaluate.attacks = {', '.join(section.attacks)}.",
            'Add one that it can earn: -s \'evaluate.attacks=["cgc","goodhart"]\'',
        )
    for kind in kinds:
        attacker_experiment(experiment, kind, f"attacks/{kind}", None)


REPORT_FILE = "evaluation.json"


class KindOfFlaw(StrictRecord):
    """`kind`: the grader's note without step and details. `share`: of the attacker's wrong solutions. `accepted`: the
    share of this kind that the verifier accepts."""

    kind: str
    share: Estimate
    accepted: Estimate


class FlawExample(StrictRecord):
    """A typical wrong solution of an attacker. `id`: of its rollout. `reference`: the problem's correct answer.
    `answer`: the one that was found in the solution. `score` in logits; `accepted`: whether it reaches the
    threshold."""

    id: str
    question: str
    reference: str
    solution: str
    answer: str | None
    note: str
    score: float
    accepted: bool


class AttackCheck(StrictRecord):
    """A trained attacker's fresh samples on test problems, which did not select it. `gap`: mean score of correct
    helpful solutions minus that of its wrong ones, in logits. `threshold`: of the verifier, in logits. `kinds`: of its
    wrong solutions, the most frequent first; empty if the grader names none."""

    error_rate: Estimate
    gap: Estimate
    accepted: Estimate
    threshold: float
    kinds: list[KindOfFlaw]
    examples: list[FlawExample]


class AttackRecord(StrictRecord):
    """`steps`: of a found exploit, the steps until it; of a censored attack, the steps tried. `gap`s in logits, of the
    pooled window: at the end, and the smallest with enough wrong solutions (at `closest_step`)."""

    kind: Literal["src", "cgc", "goodhart"]
    status: Literal["found", "censored", "no_reference", "no_signal", "diverged"]
    limit: int
    window: int
    reference: Estimate
    steps: int | None = None
    error_rate: float | None = None
    gap: float | None = None
    closest_gap: float | None = None
    closest_step: int | None = None
    reason: str = ""
    check: AttackCheck | None = None


class BalancedPoint(StrictRecord):
    n: int
    accuracy: Estimate
    excluded: int


class NaturalPoint(StrictRecord):
    n: int
    accuracy: Estimate
    pass_at_n: Estimate
    chance: Estimate
    excluded: int


class BestOfNCurves(StrictRecord):
    """Best-of-n of one source of solutions; `excluded` problems had too few (balanced: of either kind)."""

    source: str
    balanced: list[BalancedPoint]
    natural: list[NaturalPoint]


class FlawDetection(StrictRecord):
    """Detection of one source's flaws. `solutions`: the number sampled; fooled_rate.n of them are flaws. `roc`: corners
    of the curve as (false-positive rate, true-positive rate); empty without flaws or without correct solutions."""

    source: str
    solutions: int
    fooled_rate: Estimate
    auc: Estimate
    roc: list[tuple[float, float]]


class Detection(StrictRecord):
    threshold: float
    helpful_accuracy: Estimate
    accepted_helpful: Estimate
    sources: list[FlawDetection]


class Separability(StrictRecord):
    overall: Estimate
    correct: Estimate
    incorrect: Estimate


class CalibrationBinRecord(StrictRecord):
    predicted: float
    correct: Estimate


class CalibrationErrors(StrictRecord):
    """`ece_by_chance`: the error that a calibrated verifier would have on as many problems; null as an interval."""

    ece: Estimate
    ece_by_chance: float | None
    brier: Estimate
    bins: list[CalibrationBinRecord]


class Calibration(StrictRecord):
    """`slope` and `offset`: of the Platt fit to all solutions; `fitted` is cross-fitted."""

    raw_is_probability: bool
    raw: CalibrationErrors
    fitted: CalibrationErrors | None
    slope: float
    offset: float


class Localisation(StrictRecord):
    """`gain`: the accuracy minus that of guessing."""

    known: bool
    accuracy: Estimate | None = None
    chance: float | None = None
    gain: Estimate | None = None
    solutions: int = 0


class CrossPlay(StrictRecord):
    """The round's verifier with the test samples that the game stored of one prover, `source`. `fooled_rate`: the share
    of its flaws that the verifier accepts. `auc`: of correct against incorrect solutions. `matthews`: the correlation
    of accepted with correct."""

    source: str
    fooled_rate: Estimate
    auc: Estimate
    matthews: Estimate


class JudgeAtStep(StrictRecord):
    """The judge at a step of the training, or after a round. None: only one kind of decision or of trace."""

    step: int
    traces: int
    mcc: float | None


class SourceRecord(StrictRecord):
    """The measures of traces (pvg.traces.measures) of one source, in the order of pvg.evaluation.trace_report.LABELS.
    `said`: what could not be read. `refused`: measures that a server refused to the reader. `change`: the
    step from which on the judge's MCC differs, and the p value of that change."""

    name: str
    kind: str
    traces: int
    problems: int
    said: list[str]
    refused: list[str] = Field(default_factory=list)
    measures: dict[str, Estimate]
    judge: list[JudgeAtStep] = Field(default_factory=list)
    change: tuple[int, float] | None = None


class PolicyDistance(StrictRecord):
    """A policy's helpful role: KL to the start in nats per sequence and per token, and its accuracy."""

    name: str
    kl: Estimate
    kl_per_token: Estimate
    accuracy: Estimate


class TaxRecord(StrictRecord):
    """If the prover's KL is above the baseline's range (not `in_range`), `tax` is a lower bound. Below it, there is no
    value."""

    policy: PolicyDistance
    tax: Estimate
    in_range: bool
    kl_range: tuple[float, float]


class BaselineRecord(StrictRecord):
    """The correctness baseline's trajectory. `points`: empty if its training diverged. Then no round has a tax."""

    points: list[PolicyDistance]


class RoundEvaluation(StrictRecord):
    round: int
    verifier_version: str | None = None
    exploit: list[AttackRecord] | None = None
    best_of_n: list[BestOfNCurves] | None = None
    detection: Detection | None = None
    separability: Separability | None = None
    calibration: Calibration | None = None
    localisation: Localisation | None = None
    cross: list[CrossPlay] | None = None
    legibility: list[SourceRecord] | None = None
    tax: TaxRecord | None = None


def field_of(part: str) -> str:
    """The name of a part in a round of the report."""
    return part.replace("-", "_")


class EvaluationReport(StrictRecord):
    """`status` "partial": a requested part is missing. `stale`: parts that were computed with other settings than
    `settings`, or from other samples than the present ones, and are therefore not shown."""

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
    baseline: BaselineRecord | None = None
    stale: list[str] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)

    def missing(self, parts: Sequence[str], rounds: Sequence[int], kinds: Sequence[str]) -> str:
        """The first of `parts` that a round of `rounds` does not have, in one line; "" if it has all of them. `kinds`:
        of the attacks. After the training of the baseline diverged, no tax is missing."""
        diverged = self.baseline is not None and not self.baseline.points
        by_number = {found.round: found for found in self.rounds}
        for number, part in product(rounds, parts):
            round_ = by_number.get(number)
            if getattr(round_, field_of(part), None) is None and not (part == "tax" and diverged):
                return f"its evaluation has no {part} of round {number}"
            attacks = (round_.exploit if round_ and part == "exploit" else None) or ()
            if part == "exploit" and len(attacks) != len(kinds):  # an interrupted evaluation may have some of them
                return f"its evaluation has not all attacks of round {number}"
            if attacks and "detection" in parts and round_ and round_.detection:
                sources = {flaws.source for flaws in round_.detection.sources}
                attackers = (attack.kind for attack in attacks if attack.status in ATTACKED)
                if late := next((kind for kind in attackers if f"attack-{kind}" not in sources), None):
                    return f"its evaluation has no detection of the {late} attacker of round {number}"
        return ""


def write_report(path: Path, report: EvaluationReport) -> None:
    write_atomic(path, orjson.dumps(report.plain(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def report_of(run: RunDirectory) -> EvaluationReport | None:
    """The stored report of a run; None if it was never evaluated. Raises StateError as `read_report`."""
    path = run.evaluation / REPORT_FILE
    return read_report(path) if path.is_file() else None


def read_report(path: Path) -> EvaluationReport:
    """Raises StateError if the file is not an evaluation of this version."""
    try:
        return EvaluationReport.model_validate_json(read_stored(path))
    except ValidationError as error:
        first = error.errors()[0]
        wrong = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))  # invalid JSON has no place
        raise StateError(
            f"{path} is not an evaluation that this pvg can read: {wrong}.", "Run pvg evaluate again."
        ) from None


# --- notes: limits of the numbers, in sentences -----------------------------------------------------------------------


def notes(experiment: Experiment) -> list[str]:
    rollout, training = experiment.rollout, experiment.training
    share, decoupled = experiment.game.sneaky_share, experiment.game.protocol.kind == "decoupled"
    untrained = "sneaky" if share == 0.0 else "helpful"
    unearned = [kind for kind in experiment.evaluate.attacks if kind not in attack_kinds(experiment)]
    found = {
        f"game.sneaky_share = {share} never trained the {untrained} role: its figures here come from a prover that was "
        "trained only for the other role.": share in (0.0, 1.0),
        "prompts = 'plain' gives both roles one prompt, so they are one policy: helpful and sneaky solutions differ "
        "only by chance, and a separability of 0.5 says nothing.": experiment.prompts.kind == "plain",
        "The batches of an attack may differ in size (rollout.deadline), but the window of its criterion weights them "
        "equally.": rollout.deadline.kind != "none",
        "Attackers, and the baseline of the tax, do not use the run's dynamic sampling.": training.dynamic_sampling > 0,
        "The solutions are translations, and a translation with the correct answer counts as correct: a faithful "
        "translator is correct as often as its solver. A wrong translation counts as a flaw whether or not it keeps "
        "the solver's answer. A cgc attacker is rewarded only for those that do not.": decoupled,
        f"No {', '.join(unearned)} attackers: a translator cannot earn these rewards.": decoupled and bool(unearned),
    }
    return [text for text, holds in found.items() if holds]


def notes_of_results(rounds: Sequence[Mapping[str, Any]], error_rate: float) -> list[str]:
    """Notes about attackers of the report's `rounds` that were never wrong often enough to succeed."""
    found: dict[str, list[str]] = {}
    for round_ in rounds:
        for attack in round_.get("exploit") or ():
            if attack["status"] == "censored" and attack["closest_gap"] is None:
                found.setdefault(attack["kind"], []).append(str(round_["round"]))
    return [
        f"The {kind} attacker of round {', '.join(numbers)} was never wrong in {100 * error_rate:g} % of a window's "
        "solutions (evaluate.attack_error_rate). So it could not succeed, which says nothing about the verifier."
        for kind, numbers in found.items()
    ]
