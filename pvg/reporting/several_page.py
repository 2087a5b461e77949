"""The page of several runs: curves over each other, one colour per run, and what differs between them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from pvg.errors import counted
from pvg.reporting.charts import PROVER, VERIFIER, WINDOW, RoundAxis, StepAxis, line_chart, round_axis
from pvg.reporting.follow import RunState, state_of, state_word
from pvg.reporting.formats import (
    ABSENT,
    duration,
    in_order,
    metric_display,
    metric_text,
    total_budget,
    value_text,
)
from pvg.reporting.run_page import box_key, budget_rows, setting_cell, setting_differences, when, whole_budget
from pvg.reporting.run_summary import RunSummary
from pvg.reporting.table import Column, LegendKey, PageSection, Table, TableCell, elements, page
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.catalogue import METRICS

COLOURS = 6
DASHES = ("", "dashed", "dotted")

BY_STEP = {
    PROVER: ["helpful_accuracy", "sneaky_error_rate", "fooled_rate", "score_gap", "reward_mean", "kl", "tokens_per_s"],
    VERIFIER: ["pair_accuracy", "pairs_per_s"],
}
BY_ROUND = (
    *("helpful_accuracy", "sneaky_error_rate", "fooled_rate", "fooled_rate_previous", "fooled_rate_base"),
    *("accepted_helpful", "verifier_auc", "score_gap", "malformed"),
)


class ComparedRun:
    """A run with its name, colour and dash on this page."""

    def __init__(self, name: str, summary: RunSummary, place: int, state: RunState) -> None:
        self.name = name
        self.summary = summary
        self.state = state
        self.style = f"run-{place % COLOURS}"
        self.dash = DASHES[place // COLOURS % len(DASHES)]

    @property
    def key(self) -> LegendKey:
        return LegendKey(self.name, self.style, self.dash)


def several_page(directories: Sequence[RunDirectory], summaries: Sequence[RunSummary]) -> str:
    names = distinct_names(directories)
    runs = [
        ComparedRun(name, summary, place, state_of(directory))
        for place, (name, summary, directory) in enumerate(zip(names, summaries, directories, strict=True))
    ]
    header = [elements.title(f"{len(runs)} runs", "side by side"), _runs_table(runs)]
    sections = [
        _rounds(runs),
        PageSection(
            "learning",
            "Learning",
            [elements.grid(_step_charts(runs))],
            f"Step by step. Each line is the mean over {WINDOW} points.",
        ),
        _final(runs),
        _time(runs),
        _settings([directory.experiment().plain() for directory in directories], runs),
        _notes(runs),
    ]
    return page(f"{', '.join(names)}: pvg report", header, sections)


def distinct_names(directories: Sequence[RunDirectory]) -> list[str]:
    """Each run's name, or its path where two have the same name."""
    names = [directory.name for directory in directories]
    return [
        name if names.count(name) == 1 else str(directory.path)
        for name, directory in zip(names, directories, strict=True)
    ]


def _runs_table(runs: Sequence[ComparedRun]) -> Table:
    titles = ("run", "", "rounds", "time in phases", "started", "pvg", "machine")
    table = Table([Column(title) for title in titles], look="runs")
    for run in runs:
        found = run.summary
        word, kind = state_word(run.state, found.status, found.damaged)
        table.add(
            TableCell(run.name, "strong", key=run.key),
            TableCell(word, f"badge {kind}"),
            f"{len(found.rounds)} of {found.rounds_planned}",
            duration(found.seconds),
            when(found.began) or ABSENT,
            found.code_version or ABSENT,
            found.machine or ABSENT,
        )
    return table


def _columns(first: str, runs: Sequence[ComparedRun]) -> list[Column]:
    """A column of names, and one of numbers per run."""
    return [Column(first), *(Column(run.name, "right", key=run.key) for run in runs)]


# --- curves ------------------------------------------------------------------------------------------------------


def _step_charts(runs: Sequence[ComparedRun]) -> list[Markup]:
    charts = []
    for phase, metrics in BY_STEP.items():
        lengths: dict[int, int] = {}
        for run in runs:
            for round_, length in StepAxis(run.summary.steps, phase).lengths.items():
                lengths[round_] = max(length, lengths.get(round_, 0))
        axes = [(StepAxis(run.summary.steps, phase, lengths), run) for run in runs]
        for metric in metrics:
            lines = [axis.line(metric, run.name, run.style, run.dash, bare=True) for axis, run in axes]
            charts.append(
                line_chart(metric_display(metric).label, lines, axes[0][0].across(), metric_display(metric).style)
            )
    return charts


def _rounds(runs: Sequence[ComparedRun]) -> PageSection:
    numbers = sorted({number for run in runs for number in run.summary.rounds})
    axes = [RoundAxis(run.summary.rounds) for run in runs]
    x = round_axis(numbers, base=any(axis.base for axis in axes))
    charts = []
    for metric in BY_ROUND if len(numbers) > 1 else ():
        lines = [axis.line(metric, run.name, run.style, run.dash) for axis, run in zip(axes, runs, strict=True)]
        charts.append(line_chart(metric_display(metric).label, lines, x, metric_display(metric).style))
    lead = "At the end of each round, on problems that no model trained on."
    return PageSection("rounds", "Rounds", [elements.grid(charts)], lead)


# --- differences -------------------------------------------------------------------------------------------------


def final_metrics(summary: RunSummary) -> dict[str, float]:
    """The metrics of the last round, the time in phases, and the medians of rates and step times."""
    metrics = dict(summary.rounds[max(summary.rounds)]) if summary.rounds else {}
    for name, phase in (("tokens_per_s", PROVER), ("pairs_per_s", VERIFIER)):
        values = summary.series(name, phase)
        if values:
            metrics[name] = statistics.median(values)
    for phase, label in ((PROVER, "prover_step_s"), (VERIFIER, "verifier_step_s")):
        walls = [sum(step.budget.values()) for step in summary.steps if step.phase == phase and step.budget]
        if walls:
            metrics[label] = statistics.median(walls)
    if summary.seconds:
        metrics["time_in_phases_s"] = summary.seconds
    return metrics


def final_names(finals: Sequence[Mapping[str, float]]) -> list[str]:
    """The metrics of all runs in the order of the catalogue, then the others; without those of the base prover."""
    order = {metric.short: place for place, metric in enumerate(METRICS.values())}
    names = dict.fromkeys(name for metrics in finals for name in metrics if not name.startswith("base_"))
    return sorted(names, key=lambda name: order.get(name, len(order)))


def _final(runs: Sequence[ComparedRun]) -> PageSection:
    """Final metrics side by side, each with the difference to the first run."""
    finals = [final_metrics(run.summary) for run in runs]
    table = Table(_columns("", runs))
    for name in final_names(finals):
        first = finals[0].get(name)
        others = (_difference(name, metrics.get(name), first) for metrics in finals[1:])
        table.add(metric_display(name).label, metric_text(name, first), *others)
    last = ", ".join(f"{run.name}: {max(run.summary.rounds)}" for run in runs if run.summary.rounds)
    lead = f"After each run's last finished round ({last}); differences to {runs[0].name}."
    return PageSection("final", "Final metrics", [table], lead)


def _difference(name: str, value: float | None, first: float | None) -> TableCell:
    """The value and its difference to the first run; a percentage for rates and times. Coloured if one direction is
    better."""
    text = metric_text(name, value)
    if value is None or first is None:
        return TableCell(text)
    change, shown = value - first, metric_display(name)
    if shown.style in ("seconds", "rate") and first:
        note, noteworthy = f"{100 * change / first:+.1f} %", abs(change / first) > 0.02
    elif shown.style == "share":
        note, noteworthy = f"{100 * change:+.1f} pp", abs(change) > 0.01
    else:
        note, noteworthy = f"{change:+.{3 if shown.style == 'auc' else 2}f}", abs(change) > 0.01
    verdict = "better" if (change > 0) == shown.higher_is_better else "worse"
    return TableCell(text, verdict if noteworthy and shown.higher_is_better is not None else "", note=note)


def _time(runs: Sequence[ComparedRun]) -> PageSection:
    budgets = [whole_budget(run.summary) for run in runs]
    if not any(budgets):
        return PageSection("time", "Time", [])
    rows = budget_rows({run.name: (budget, "") for run, budget in zip(runs, budgets, strict=True)})
    table = Table(_columns("part", runs))
    for part in in_order(total_budget(budgets)):
        seconds_each = (value_text("seconds", budget.get(part.name)) for budget in budgets)
        table.add(TableCell(part.label, key=box_key(part)), *seconds_each)
    return PageSection("time", "Time", [rows, table], "Exposed seconds by part, over the whole run.")


def _settings(plains: Sequence[dict[str, object]], runs: Sequence[ComparedRun]) -> PageSection:
    columns = [Column("setting"), *(Column(run.name, key=run.key) for run in runs)]
    table = Table(columns, look="settings")
    for key, values in setting_differences(plains).items():
        table.add(TableCell(key, "code"), *(setting_cell(value) for value in values))
    return PageSection(
        "settings", "Settings that differ", [table if table else elements.empty("All settings are the same.")]
    )


def _notes(runs: Sequence[ComparedRun]) -> PageSection:
    alerts = [(run.name, counted(len(run.summary.alerts), "alert")) for run in runs if run.summary.alerts]
    notes = [(run.name, note) for run in runs for note in run.summary.notes]
    return PageSection("remarks", "Remarks", [elements.facts(alerts), elements.notes(notes)])
