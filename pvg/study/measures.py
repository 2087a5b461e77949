"""Measures: the values that a study reads from a finished run, by name; and `MeasuredValue`, a number or a lower bound.

    for measure in measures_named(["helpful_accuracy", "kl"]):
        measure.read(facts)            # the value after each round; None if the run has none

    MeasuredValue(0.84)                        # a share
    MeasuredValue(200, censored=True)          # steps-to-exploit: not found within 200 steps

A measure comes from the metrics of the run's rounds, from its steps, or from the results of `pvg evaluate` (a path in a
round of its JSON document). Every metric of a round (pvg.telemetry.catalogue) is a measure. A censored value is known
to be above `number`, so it can be ordered but not averaged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pvg.config.load import did_you_mean
from pvg.errors import ConfigurationError
from pvg.evaluation.report import report_of
from pvg.records import BASE_SOURCE, source_of_round
from pvg.reporting.formats import NumberStyle, metric_display
from pvg.reporting.run_summary import RunSummary, read_run
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.catalogue import METRICS


@dataclass(frozen=True, slots=True)
class MeasuredValue:
    """A number, or with `censored` a value known only to be above it."""

    number: float
    censored: bool = False


def capped(values: Sequence[MeasuredValue], cap: float | None) -> list[float]:
    """Numbers in the order of the values: everything not known to be below `cap` is tied at `cap`."""
    if cap is None:
        return [value.number for value in values]
    return [cap if value.censored else min(value.number, cap) for value in values]


def cap_of(values: Sequence[MeasuredValue]) -> float | None:
    """The number up to which all values can be ordered: the smallest censored one; None without censored values."""
    return min((value.number for value in values if value.censored), default=None)


# --- measures ---------------------------------------------------------------------------------------------------------

DEFAULT_MEASURES = ("helpful_accuracy", "sneaky_error_rate", "fooled_rate", "verifier_auc")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Everything from which measures are read. `evaluation` is None if the run was not evaluated."""

    summary: RunSummary
    evaluation: Any = None


Series = list[MeasuredValue | None]
Read = Callable[[RunFacts], Series]


@dataclass(frozen=True, slots=True)
class StudyMeasure:
    """`read` gives the values by round, in order; a measure of the whole run (`by_round` false) gives one.

    `higher_is_better`: None if neither direction is better. `parts`: the parts of `pvg evaluate` that it needs;
    `attack`: the kind of attack that it needs, if any; `samples`: the smallest evaluate.samples. If not `compared`, a
    study shows it but does not test it, because each further test makes Holm's adjustment stricter.
    """

    name: str
    label: str
    style: NumberStyle
    higher_is_better: bool | None
    meaning: str
    read: Read
    by_round: bool = True
    parts: tuple[str, ...] = ()
    compared: bool = True
    attack: str = ""
    samples: int = 0


def measures_named(names: Sequence[str]) -> list[StudyMeasure]:
    """Raises ConfigurationError for an unknown name, with the nearest, and for a repeated one."""
    for name in names:
        if name not in MEASURES:
            raise ConfigurationError(
                f"There is no measure {name!r}.{did_you_mean(name, list(MEASURES))}",
                f"Known: {', '.join(MEASURES)}.",
            )
    if twice := next((name for name in names if list(names).count(name) > 1), None):
        raise ConfigurationError(f"The measure {twice!r} is named twice.", "Name each measure once.")
    return [MEASURES[name] for name in names]


def read_facts(run: RunDirectory, *, evaluated: bool = True) -> RunFacts:
    """The facts from which measures of `run` are read; without its evaluation unless `evaluated`.

    Raises StateError if the run's files, or its evaluation, are damaged.
    """
    report = report_of(run) if evaluated else None
    return RunFacts(read_run(run), None if report is None else report.plain())


# --- where measures come from ------------------------------------------------------------------------------------


def of_rounds(value: Callable[[Mapping[str, float]], float | None]) -> Read:
    """From the row of each round in the round table."""

    def read(facts: RunFacts) -> Series:
        rounds = facts.summary.rounds
        return [_value(value(rounds[number])) for number in sorted(rounds)]

    return read


def of_last_step(phase: str, metric: str) -> Read:
    """From each round's last step of a phase that has the metric; with minibatches, not every step has it."""

    def read(facts: RunFacts) -> Series:
        steps = [step for step in facts.summary.steps if step.phase == phase and metric in step.metrics]
        last = {step.round: step.metrics[metric] for step in steps}
        return [_value(last.get(number)) for number in sorted(facts.summary.rounds)]

    return read


def of_step_count(phase: str) -> Read:
    """The number of steps of a phase in each round; a stop rule may end it early."""

    def read(facts: RunFacts) -> Series:
        counts = [step.round for step in facts.summary.steps if step.phase == phase]
        return [MeasuredValue(float(counts.count(number))) for number in sorted(facts.summary.rounds)]

    return read


def of_evaluation(path: str) -> Read:
    """From the document of `pvg evaluate`: the value at `path` in each of its rounds.

    A path consists of dotted keys. `[key=value]` selects the element of a list whose key has that value; `{own}` is the
    source name of the round's prover: `best_of_n[source={own}].balanced[n=4].accuracy.value`.
    """

    def value(round_: Mapping[str, Any]) -> MeasuredValue | None:
        return _value(_at(round_, path))

    return _of_evaluated_rounds(value)


def steps_to_exploit(kind: str) -> Read:
    """Steps until a new attacker with reward `kind` had exploited the round's verifier. Censored if it did not succeed
    within its steps; None if the attack could not be judged."""

    def value(round_: Mapping[str, Any]) -> MeasuredValue | None:
        attack = _at(round_, f"exploit[kind={kind}]")
        if not isinstance(attack, Mapping) or attack.get("status") not in ("found", "censored"):
            return None
        steps = _value(attack.get("steps"))
        return None if steps is None else MeasuredValue(steps.number, censored=attack["status"] == "censored")

    return _of_evaluated_rounds(value)


def worst_auc_of_learnt(facts: RunFacts) -> Series:
    """The lowest AUC against the flaws of the base prover or of an earlier round's; with game.mixture = "equal" the
    verifier has learned from all of them. None if one of them has no AUC, because the unknown one may be lower."""

    def value(round_: Mapping[str, Any]) -> MeasuredValue | None:
        writers = [BASE_SOURCE, *(source_of_round(number) for number in range(int(round_["round"])))]
        found = [_value(_at(round_, f"detection.sources[source={writer}].auc.value")) for writer in writers]
        known = [auc for auc in found if auc is not None]
        return min(known, key=lambda auc: auc.number) if len(known) == len(found) else None

    return _of_evaluated_rounds(value)(facts)


def _of_evaluated_rounds(value: Callable[[Mapping[str, Any]], MeasuredValue | None]) -> Read:
    """In the order of the run's rounds; None if the evaluation does not have the round."""

    def read(facts: RunFacts) -> Series:
        by_number = {row["round"]: row for row in facts.evaluation["rounds"]} if facts.evaluation else {}
        return [value(by_number[n]) if n in by_number else None for n in sorted(facts.summary.rounds)]

    return read


def _at(round_: Mapping[str, Any], path: str) -> Any:
    """The value at `path` of a round; None if the round does not have it."""
    own = source_of_round(int(round_["round"]))
    node: Any = round_
    for step in re.findall(r"\[[^\]]*\]|[^.\[\]]+", path.replace("{own}", own)):
        if not step.startswith("["):
            node = node.get(step) if isinstance(node, Mapping) else None
            continue
        elements = node if isinstance(node, list) else []
        key, _, wanted = step[1:-1].partition("=")
        node = next((e for e in elements if isinstance(e, Mapping) and str(e.get(key)) == wanted), None)
    return node


def _value(number: Any) -> MeasuredValue | None:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
        return None
    return MeasuredValue(float(number))


# --- the table ---------------------------------------------------------------------------------------------------


def _of_a_round() -> Iterator[StudyMeasure]:
    """Every metric of a round."""
    better = {"higher": True, "lower": False}
    for metric in METRICS.values():
        if metric.where == "round":
            look, name = metric_display(metric.short), metric.short
            higher = better.get(metric.better) if look.higher_is_better is None else look.higher_is_better
            yield StudyMeasure(name, look.label, look.style, higher, metric.meaning, of_rounds(partial(_cell, name)))


def _cell(name: str, row: Mapping[str, float]) -> float | None:
    return row.get(name)


def _gain(row: Mapping[str, float]) -> float | None:
    if "helpful_accuracy" not in row or "base_helpful_accuracy" not in row:
        return None
    return row["helpful_accuracy"] - row["base_helpful_accuracy"]


def _seconds(facts: RunFacts) -> Series:
    return [_value(facts.summary.seconds)]


OF_A_RUN = [
    StudyMeasure(
        "accuracy_gain", "accuracy gain", "share", True, "helpful_accuracy minus the base prover's.", of_rounds(_gain)
    ),
    StudyMeasure(
        "kl", "KL to start", "number", None, "KL at the prover's last step.", of_last_step("train_prover", "kl")
    ),
    StudyMeasure("prover_steps", "prover steps", "number", None, "The prover's steps.", of_step_count("train_prover")),
    StudyMeasure(
        "seconds",
        "time in phases",
        "seconds",
        False,
        "Seconds of all phases.",
        _seconds,
        by_round=False,
        compared=False,
    ),
]
# Of `pvg evaluate`: name, label, style, whether higher is better, meaning, part, path in a round of its document.
OF_AN_EVALUATION: list[tuple[str, str, NumberStyle, bool | None, str, str, str]] = [
    ("completeness", "completeness", "share", True, "Helpful solutions that are correct and accepted.",
     "detection", "detection.completeness.value"),
    ("soundness", "soundness", "share", True, "Own flaws that the round's verifier rejects.",
     "detection", "detection.sources[source={own}].soundness.value"),
    ("soundness_base", "soundness, base", "share", True, "The base prover's flaws that it rejects.",
     "detection", "detection.sources[source=base].soundness.value"),
    ("detection_auc", "detection AUC", "auc", True, "P(a correct helpful solution scores above an own flaw).",
     "detection", "detection.sources[source={own}].auc.value"),
    ("separability", "separability", "auc", False, "AUC of a probe that separates helpful and sneaky solutions.",
     "separability", "separability.overall.value"),
    ("calibration_error", "calibration error", "share", False, "Of the fitted probabilities.",
     "calibration", "calibration.fitted.ece.value"),
    ("localisation_gain", "localisation gain", "share", True, "Accuracy of locating flaws, minus that of guessing.",
     "localisation", "localisation.gain.value"),
    ("legibility_tax", "legibility tax", "share", False, "Accuracy lost against the baseline at no more KL.",
     "tax", "tax.tax.value"),
    # One small n for all arms: with a large n only few problems have enough solutions of both kinds, and these problems
    # differ between arms.
    ("best_of_n", "best of 4, balanced", "share", True, "Verifier's choice among 4, half of them correct.",
     "best-of-n", "best_of_n[source={own}].balanced[n=4].accuracy.value"),
    ("best_of_n_excluded", "left out of best of 4", "number", None,
     "Test problems without 2 correct and 2 incorrect solutions.",
     "best-of-n", "best_of_n[source={own}].balanced[n=4].excluded"),
    ("best_of_n_natural", "best of 4", "share", True, "Verifier's choice among 4 helpful samples.",
     "best-of-n", "best_of_n[source={own}].natural[n=4].accuracy.value"),
]  # fmt: skip
LEAST_SAMPLES = {"best_of_n": 2, "best_of_n_excluded": 2, "best_of_n_natural": 4}


def _of_attackers() -> Iterator[StudyMeasure]:
    for kind in ("src", "cgc", "goodhart"):
        name, label = f"steps_to_exploit_{kind}", f"steps to exploit, {kind}"
        meaning = f"Steps until a new sneaky prover with reward {kind} had exploited the round's verifier."
        read = steps_to_exploit(kind)
        yield StudyMeasure(name, label, "number", True, meaning, read, parts=("exploit",), attack=kind)
        name, label = f"soundness_attack_{kind}", f"soundness, {kind} attack"
        meaning = f"Flaws of a new {kind} attacker that the round's verifier rejects."
        read = of_evaluation(f"detection.sources[source=attack-{kind}].soundness.value")
        yield StudyMeasure(name, label, "share", True, meaning, read, parts=("detection", "exploit"), attack=kind)


def _table() -> dict[str, StudyMeasure]:
    worst = StudyMeasure(
        "detection_auc_worst",
        "detection AUC, worst",
        "auc",
        True,
        "The lowest detection_auc against the flaws of the base prover or of an earlier round's prover.",
        worst_auc_of_learnt,
        parts=("detection",),
    )
    evaluated = [
        StudyMeasure(
            name,
            label,
            style,
            higher,
            meaning,
            of_evaluation(path),
            parts=(part,),
            compared=higher is not None,
            samples=LEAST_SAMPLES.get(name, 0),
        )
        for name, label, style, higher, meaning, part, path in OF_AN_EVALUATION
    ]
    found = [*_of_a_round(), *OF_A_RUN, *_of_attackers(), worst, *evaluated]
    return {measure.name: measure for measure in found}


MEASURES = _table()
