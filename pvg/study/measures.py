"""Measures: what a study reads from a finished run, by name. One table, one line each.

    for measure in measures_named(["helpful_accuracy", "kl"]):
        measure.read(facts)                # the value after each round; None where the run has none

A measure comes from the metrics of the run's rounds, from its steps, or from what `pvg evaluate` left behind
(`evaluated`: a path into its JSON document). Every metric of a round (pvg.telemetry.catalogue) is a measure by itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from pvg.errors import ConfigurationError
from pvg.experiment import nearest
from pvg.reporting.figures import Style, shown
from pvg.reporting.run_summary import RunSummary, read_run
from pvg.store.run_directory import RunDirectory
from pvg.study.values import Value
from pvg.telemetry.catalogue import METRICS

EVALUATION = Path("evaluation") / "evaluation.json"  # in a run's folder
DEFAULT_MEASURES = ("helpful_accuracy", "sneaky_error_rate", "fooled_rate", "verifier_auc")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Everything that measures are read from. `evaluation` is None where the run was not evaluated."""

    summary: RunSummary
    evaluation: Any = None


Series = list[Value | None]
Read = Callable[[RunFacts], Series]


@dataclass(frozen=True, slots=True)
class Measure:
    """`read` gives the values by round, in order; a measure of the whole run (`by_round` false) gives one.

    `higher_is_better`: None where neither is. `evaluated`: it is there only after `pvg evaluate`. Not
    `compared`: it is told, and no hypothesis of a study; each one more makes Holm's adjustment dearer.
    """

    name: str
    label: str
    style: Style
    higher_is_better: bool | None
    meaning: str
    read: Read
    by_round: bool = True
    evaluated: bool = False
    compared: bool = True


def measures_named(names: Sequence[str]) -> list[Measure]:
    """Raises ConfigurationError for an unknown name, with the nearest, and for one that comes twice."""
    for name in names:
        if name not in MEASURES:
            hint = nearest(name, list(MEASURES))
            raise ConfigurationError(
                f"There is no measure {name!r}." + (f" Did you mean {hint!r}?" if hint else ""),
                f"Known: {', '.join(MEASURES)}.",
            )
    if twice := next((name for name in names if list(names).count(name) > 1), None):
        raise ConfigurationError(f"The measure {twice!r} is named twice.", "Name each measure once.")
    return [MEASURES[name] for name in names]


def read_facts(run: RunDirectory) -> RunFacts:
    """Raises ConfigurationError where the run's files, or its evaluation, are damaged."""
    file = run.path / EVALUATION
    if not file.is_file():
        return RunFacts(read_run(run))
    try:
        return RunFacts(read_run(run), orjson.loads(file.read_bytes()))
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"{file} is not JSON: {error}.", f"Remove it: rm {file}") from None


# --- where they come from ----------------------------------------------------------------------------------------


def of_rounds(value: Callable[[Mapping[str, float]], float | None]) -> Read:
    """From the row of each round's table."""

    def read(facts: RunFacts) -> Series:
        rounds = facts.summary.rounds
        return [_value(value(rounds[number])) for number in sorted(rounds)]

    return read


def of_last_step(phase: str, metric: str) -> Read:
    """From the last step of a phase in each round."""

    def read(facts: RunFacts) -> Series:
        last = {step.round: step.metrics.get(metric) for step in facts.summary.steps if step.phase == phase}
        return [_value(last.get(number)) for number in sorted(facts.summary.rounds)]

    return read


def of_step_count(phase: str) -> Read:
    """How many steps a phase took in each round: a stop rule may end it early."""

    def read(facts: RunFacts) -> Series:
        counts = [step.round for step in facts.summary.steps if step.phase == phase]
        return [Value(float(counts.count(number))) for number in sorted(facts.summary.rounds)]

    return read


def of_evaluation(path: str, *, within: str = "") -> Read:
    """From the document of `pvg evaluate`: every value at `path`, in the order of the document.

    A path is dotted keys; `[*]` takes every element of a list, and `[key=value]` those whose key has that value:
    `parts.bon.rounds[*].accuracy`. With `within` (a key beside the last one of the path) a null is a value that was
    not found within that many: censored. A part that the document lacks gives no values.
    """
    *above, leaf = _steps(path)

    def read(facts: RunFacts) -> Series:
        found: Series = []
        for place in _select(facts.evaluation, above):
            if not isinstance(place, Mapping):
                continue
            number, limit = place.get(leaf), place.get(within)
            censored = number is None and isinstance(limit, (int, float))
            found.append(Value(float(limit), censored=True) if censored and limit is not None else _value(number))
        return found

    return read


def _steps(path: str) -> list[str]:
    return re.findall(r"\[[^\]]*\]|[^.\[\]]+", path)


def _select(node: Any, steps: Sequence[str]) -> Iterator[Any]:
    """What lies at the path of `steps`, as far as it is there."""
    if not steps:
        yield node
        return
    step, rest = steps[0], steps[1:]
    if not step.startswith("["):
        if isinstance(node, Mapping) and step in node:
            yield from _select(node[step], rest)
        return
    key, _, wanted = step[1:-1].partition("=")
    for element in node if isinstance(node, list) else []:
        if key == "*" or (isinstance(element, Mapping) and str(element.get(key)) == wanted):
            yield from _select(element, rest)


def _value(number: Any) -> Value | None:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
        return None
    return Value(float(number))


# --- the table ---------------------------------------------------------------------------------------------------


def _round_metric(name: str, better: str, meaning: str) -> Measure:
    look = shown(name)
    higher = (
        look.higher_is_better if look.higher_is_better is not None else {"higher": True, "lower": False}.get(better)
    )
    return Measure(name, look.label, look.style, higher, meaning, of_rounds(lambda row: row.get(name)))


def _gain(row: Mapping[str, float]) -> float | None:
    if "helpful_accuracy" not in row or "base_helpful_accuracy" not in row:
        return None
    return row["helpful_accuracy"] - row["base_helpful_accuracy"]


def _seconds(facts: RunFacts) -> Series:
    return [_value(facts.summary.seconds)]


def _table() -> dict[str, Measure]:
    of_a_round = [
        _round_metric(metric.short, metric.better, metric.meaning)
        for metric in METRICS.values()
        if metric.where == "round"
    ]
    others = [
        Measure(
            "accuracy_gain",
            "accuracy gain",
            "share",
            True,
            "helpful_accuracy less the base prover's.",
            of_rounds(_gain),
        ),
        Measure(
            "kl", "KL to start", "number", None, "KL at the prover's last step.", of_last_step("train_prover", "kl")
        ),
        Measure(
            "prover_steps", "prover steps", "number", None, "Steps the prover took.", of_step_count("train_prover")
        ),
        Measure(
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
    return {measure.name: measure for measure in [*of_a_round, *others]}


MEASURES = _table()
