"""Measures: the values that a study reads from a finished run, by name; and `MeasuredValue`, a number or a lower bound.

A measure comes from the metrics of the run's rounds, from its steps, or from the results of `pvg evaluate` (a path in a
round of its JSON document). Every metric of a round (pvg.telemetry.catalogue) is a measure. A censored value is known
to be above `number`, so it can be ordered but not averaged.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pvg.config.load import refuse_unknown
from pvg.errors import ConfigurationError
from pvg.evaluation.report import ATTACKED, KINDS, report_of
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
        refuse_unknown("measure {}", name, MEASURES, ConfigurationError)
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

Found = MeasuredValue | float | None
OfRound = Callable[[RunFacts, int], Found]  # the value of a measure after a round of the run
OfEvaluation = Callable[[Mapping[str, Any]], Found]  # the same from the round in the document of `pvg evaluate`


def by_round(value: OfRound) -> Read:
    """One value per round, in order."""
    return lambda facts: [_finite(value(facts, number)) for number in sorted(facts.summary.rounds)]


def of_evaluation(value: OfEvaluation) -> Read:
    """One value per round of the run; None if the evaluation does not have the round."""

    def read(facts: RunFacts, number: int) -> Found:
        rounds = facts.evaluation["rounds"] if facts.evaluation else ()
        return next((value(found) for found in rounds if found["round"] == number), None)

    return by_round(read)


def _finite(found: Found) -> MeasuredValue | None:
    """None for what is no number: numbers of a mean of no values."""
    if found is None or isinstance(found, MeasuredValue):
        return found
    return MeasuredValue(float(found)) if math.isfinite(found) else None


def _metric(name: str, facts: RunFacts, number: int) -> Found:
    return facts.summary.rounds[number].get(name)


def _gain(facts: RunFacts, number: int) -> Found:
    row = facts.summary.rounds[number]
    known = "helpful_accuracy" in row and "base_helpful_accuracy" in row
    return row["helpful_accuracy"] - row["base_helpful_accuracy"] if known else None


def _prover_steps(facts: RunFacts, number: int) -> list[Mapping[str, float]]:
    """The metrics of the round's steps; a stop rule may end them early."""
    return [step.metrics for step in facts.summary.steps if (step.phase, step.round) == ("train_prover", number)]


def _last_kl(facts: RunFacts, number: int) -> Found:
    """With minibatches, not every step has it."""
    return next((step["kl"] for step in reversed(_prover_steps(facts, number)) if "kl" in step), None)


def _at_path(path: str, round_: Mapping[str, Any]) -> Found:
    """Of an attack: the steps until it had exploited the round's verifier. Censored if it did not succeed within its
    steps; None if it could not be judged."""
    found = _at(path, round_)
    if not isinstance(found, Mapping):
        return found  # type: ignore[no-any-return]
    known = found["status"] in ATTACKED
    return MeasuredValue(float(found["steps"]), censored=found["status"] == "censored") if known else None


def _worst_auc_of_learnt(round_: Mapping[str, Any]) -> Found:
    """The lowest AUC against the flaws of the base prover or of an earlier round's; with game.mixture = "equal" the
    verifier has learned from all of them. None if one of them has no AUC, because the unknown one may be lower."""
    writers = [BASE_SOURCE, *(source_of_round(number) for number in range(round_["round"]))]
    aucs = [_at(f"detection.sources[source={writer}].auc.value", round_) for writer in writers]
    return None if None in aucs else min(aucs)


def _at(path: str, round_: Mapping[str, Any]) -> Any:
    """The value at `path` of a round of the document of `pvg evaluate`; None if the round does not have it.

    A path consists of dotted keys. `[key=value]` selects the element of a list whose key has that value; `{own}` is the
    source name of the round's prover: `best_of_n[source={own}].balanced[n=4].accuracy.value`.
    """
    node: Any = round_
    for step in re.findall(r"\[[^\]]*\]|[^.\[\]]+", path.replace("{own}", source_of_round(round_["round"]))):
        if step.startswith("["):
            key, _, wanted = step[1:-1].partition("=")
            node = next((element for element in node or () if str(element[key]) == wanted), None)
        elif node is not None:
            node = node.get(step)
    return node


# --- the table ---------------------------------------------------------------------------------------------------


def _of_a_round() -> Iterator[StudyMeasure]:
    """Every metric of a round."""
    better = {"higher": True, "lower": False}
    for metric in METRICS.values():
        if metric.where == "round":
            look, name = metric_display(metric.short), metric.short
            higher = better.get(metric.better) if look.higher_is_better is None else look.higher_is_better
            read = by_round(partial(_metric, name))
            yield StudyMeasure(name, look.label, look.style, higher, metric.meaning, read)


READERS: dict[str, Read] = {
    "gain": by_round(_gain),
    "kl": by_round(_last_kl),
    "steps": by_round(lambda facts, number: float(len(_prover_steps(facts, number)))),
    "seconds": lambda facts: [_finite(facts.summary.seconds)],
    "worst_auc": of_evaluation(_worst_auc_of_learnt),
}


def _of_data() -> Iterator[StudyMeasure]:
    """The other measures, from measures.toml."""
    for given in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["measures"]:
        for kind in KINDS if "attack" in given else ("",):
            texts = {key: text.replace("{kind}", kind) for key, text in given.items() if isinstance(text, str)}
            row: dict[str, Any] = {**given, **texts}
            path, better = row.pop("path", ""), row.pop("better", None)
            read = of_evaluation(partial(_at_path, path)) if path else READERS[row.pop("read")]
            row |= {"parts": tuple(row.get("parts", ())), "attack": kind}
            yield StudyMeasure(**{"compared": better is not None, **row}, higher_is_better=better, read=read)


MEASURES = {measure.name: measure for measures in (_of_a_round(), _of_data()) for measure in measures}
