"""Sections of a run's page: rounds, learning curves, scores and the machine. Their charts are data."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from markupsafe import Markup

from pvg.errors import counted
from pvg.reporting.charts import (
    HALVES,
    PROVER,
    VERIFIER,
    WINDOW,
    ChartLine,
    ReferenceLine,
    RoundAxis,
    StepAxis,
    line_chart,
    mirrored_histogram,
)
from pvg.reporting.formats import NumberStyle, duration, metric_display, percent
from pvg.reporting.run_summary import RunSummary
from pvg.reporting.solutions import RoundScores
from pvg.reporting.table import PageSection, elements
from pvg.reporting.terminal import judgements, machine_facts, outcome, rounds_table

WARMUP = "warmup"
BINS = 32
MOST_CHANGES = 20  # of the number of workers


class ChartOf(NamedTuple):
    """A chart of metrics. `lines`: metric, colour and dash of each, such as "kl ink, loss sneaky dashed". `style`: of
    the numbers; empty: as of the first metric. `at`: reference lines."""

    title: str
    lines: str
    style: NumberStyle | Literal[""] = ""
    zero: bool = False
    at: Sequence[ReferenceLine] = ()
    whole: bool = True


def _charts(rows: Sequence[dict[str, Any]]) -> tuple[ChartOf, ...]:
    return tuple(ChartOf(**row | {"at": [ReferenceLine(*line) for line in row.get("at", ())]}) for row in rows)


_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
BY_ROUND = _charts(_DATA["by_round"])
LEARNING = {phase: _charts(rows) for phase, rows in _DATA["learning"].items()}


def drawn(
    axis: RoundAxis | StepAxis, charts: Iterable[ChartOf], extra: Mapping[str, ChartLine] | None = None
) -> list[Markup]:
    """The charts that have values. `extra`: title of a chart -> one more line."""
    return [_chart(axis, of, [extra[of.title]] if extra and of.title in extra else []) for of in charts]


def _chart(axis: RoundAxis | StepAxis, of: ChartOf, more: Sequence[ChartLine]) -> Markup:
    looks = [line.split() for line in of.lines.split(",") if line.strip()]
    lines = [axis.line(metric, metric_display(metric).label, *look) for metric, *look in looks]
    style = of.style or metric_display(looks[0][0]).style
    return line_chart(of.title, [*lines, *more], axis.across(), style, zero=of.zero, references=of.at, whole=of.whole)


# --- learning ----------------------------------------------------------------------------------------------------


def rounds_section(summary: RunSummary) -> PageSection:
    """The table of rounds, and its metrics as charts."""
    body: list[object] = [rounds_table(summary.rounds)] if summary.rounds else []
    if any("verifier_auc" in metrics for metrics in summary.rounds.values()):
        body.append(elements.note(_DATA["reading"]))
    if len(summary.rounds) > 1:
        rounds = {number: dict(metrics) for number, metrics in summary.rounds.items()}
        for phase in summary.phases:
            if phase.phase == VERIFIER and phase.round in rounds and "verifier_auc" in phase.metrics:
                rounds[phase.round]["verifier_auc_minted"] = phase.metrics["verifier_auc"]
        body.append(elements.grid(drawn(RoundAxis(rounds), BY_ROUND)))
    lead = (
        "At the end of each round: fresh samples on problems that no model trained on.",
        *outcome(summary.rounds),
        *judgements(summary),
    )
    return PageSection("rounds", "Rounds", body, " ".join(lead))


def learning_section(summary: RunSummary) -> PageSection:
    prover, verifier = StepAxis(summary.steps, PROVER), StepAxis(summary.steps, VERIFIER)
    thresholds = {p.round: p.metrics["threshold"] for p in summary.phases if "threshold" in p.metrics}
    levels = {"Mean score by kind": prover.level(thresholds, "threshold", "verifier")}
    charts = [*drawn(prover, LEARNING[PROVER], levels), *drawn(verifier, LEARNING[VERIFIER]), *_warmup_charts(summary)]
    others = [elements.grid(_other_charts(axis)) for axis in (prover, verifier)]
    body = [elements.grid(charts), elements.details("All other metrics of the steps", others)]
    lead = f"By optimizer step, on training problems. Faint: each point. Strong: the mean over {WINDOW} points."
    return PageSection("learning", "Learning", body, lead)


def _warmup_charts(summary: RunSummary) -> list[Markup]:
    """The loss of the warm start by step, and the losses of held-out demonstrations before and after it."""
    steps = StepAxis(summary.steps, WARMUP)
    measured = next((phase.metrics for phase in summary.phases if phase.phase == WARMUP), {})
    ends = ((0.0, "held_out_loss_before"), (float(steps.total), "held_out_loss_after"))
    held_out = [[(x, measured[name])] for x, name in ends if name in measured]
    title = "Warm start: loss of the demonstrations"
    chart = ChartOf(title, "loss helpful", zero=True)
    line = ChartLine("held out, before and after", held_out, "ink", "dotted", dots=True)
    return drawn(steps, [chart], {title: line}) if steps else []


def _other_charts(steps: StepAxis) -> list[Markup]:
    """One chart for each metric of the steps that no other chart shows."""
    elsewhere = {line.split()[0] for of in LEARNING[steps.phase] for line in of.lines.split(",")}
    names = {name for found in steps.rounds.values() for step in found for name in step.metrics}
    colour, unit = ("ink", "prover") if steps.phase == PROVER else ("verifier", "verifier")
    return [
        line_chart(shown.label, [steps.line(name, shown.label, colour)], steps.across(), shown.style, unit=unit)
        for name, shown in ((name, metric_display(name)) for name in sorted(names - elsewhere))
    ]


def scores_section(scores: list[RoundScores]) -> PageSection:
    """One histogram per round, all with the same range of scores and of counts."""
    if not scores:
        return PageSection("scores", "Scores", [])
    everything = np.concatenate([kind for found in scores for kind in found.kinds.values()])
    thresholds = [found.threshold for found in scores if found.threshold is not None]
    low, high = np.percentile(everything, [1.0, 99.5])
    pad = 0.05 * ((high - low) or 1.0)
    edges = np.linspace(min([low, *thresholds]) - pad, max([high, *thresholds]) + pad, BINS + 1)
    counts = [
        {name: np.histogram(np.clip(kind, edges[0], edges[-1]), edges)[0] for name, kind in found.kinds.items()}
        for found in scores
    ]
    most = max(int((found[a] + found[b]).max()) for found in counts for a, b in HALVES.values())
    charts = []
    for found, by_kind in zip(scores, counts, strict=True):
        title, note = f"Round {found.round}", _accepted(found)
        title += "" if found.fresh else ", unfinished: scores from training"
        charts.append(
            mirrored_histogram(title, edges.tolist(), by_kind, threshold=found.threshold, most=most, note=note)
        )
    lead = "Scores of each round's verifier for its prover's solutions. It accepts scores to the right of the line."
    return PageSection("scores", "Scores", [elements.grid(charts)], lead)


def _accepted(found: RoundScores) -> str:
    kinds = {kind: found.accepted(kind) for kind in ("helpful correct", "sneaky flaw")}
    names = {"helpful correct": "correct helpful solutions", "sneaky flaw": "flaws"}
    words = [f"{percent(share)} of {len(found.kinds[k])} {names[k]}" for k, share in kinds.items() if share is not None]
    return f"Accepted: {', '.join(words)}." if words else ""


# --- machine -----------------------------------------------------------------------------------------------------


def machine_parts(summary: RunSummary) -> list[Markup]:
    """Facts of the device, of the workers and of event-loop lag, and each change of the number of workers and its
    reason; of many, the last ones."""
    began = summary.began or summary.scaling[0].time if summary.scaling else 0.0
    changes = [
        (f"after {duration(change.time - began)}", f"{change.why}; {counted(change.workers, 'worker')} now")
        for change in summary.scaling[-MOST_CHANGES:]
    ]
    return [elements.facts(machine_facts(summary)), elements.notes(changes)]
