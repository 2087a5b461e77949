"""The page of a study: results, curves over rounds, comparisons, trends, seeds, games, and how to reproduce it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import cast

from markupsafe import Markup

from pvg.reporting.charts import ChartLine, ReferenceLine, dot_strips, line_chart, round_axis
from pvg.reporting.formats import ABSENT, NumberStyle, duration
from pvg.reporting.several_page import COLOURS, DASHES
from pvg.reporting.table import Column, LegendKey, PageSection, Table, TableCell, chart, elements, page
from pvg.study.results import CellRecord, MeasureRecord, MeasureResult, StudyResults
from pvg.study.text import (
    cautions,
    comparisons_table,
    middle_text,
    range_text,
    spread_text,
    threads_each,
    trends_table,
)

STATUS = {"complete": "good", "played": "warn", "unfinished": "warn", "new": "warn", "damaged": "bad", "failed": "bad"}


def study_page(results: StudyResults) -> str:
    keys = _keys(results)
    status = "complete" if results.complete == len(results.cells) else "failed" if results.failed else "unfinished"
    header = [
        elements.title(results.name, results.about, status, STATUS[status]),
        _facts(results),
        elements.notes(cautions(results)),
    ]
    sections = [
        _means(results, keys),
        _curves(results, keys),
        _comparisons(results, keys),
        _trends(results, keys),
        _seeds(results, keys),
        _arms(results, keys),
        _games(results),
        _made_by(results),
    ]
    return page(f"{results.name}: pvg study", header, sections)


def _keys(results: StudyResults) -> dict[str, LegendKey]:
    """The colour and dash of every arm on this page."""
    return {
        arm.name: LegendKey(arm.name, f"run-{place % COLOURS}", DASHES[place // COLOURS % len(DASHES)])
        for place, arm in enumerate(results.arms)
    }


def _facts(results: StudyResults) -> Markup:
    return elements.facts(
        [
            ("arms", str(len(results.arms))),
            ("seeds", str(len(results.seeds))),
            ("games complete", f"{results.complete} of {len(results.cells)}"),
            ("compared with", results.reference),
            ("time of all games", duration(sum(cell.seconds or 0.0 for cell in results.cells))),
            ("machine", f"{results.cpu or ABSENT}, {results.cores} cores, {threads_each(results.threads)}"),
            ("pvg", results.pvg),
        ]
    )


# --- tables ------------------------------------------------------------------------------------------------------


def _means(results: StudyResults, keys: dict[str, LegendKey]) -> PageSection:
    """Arms down, measures across: each mean over its interval."""
    measures = [Column(measure.label, "right", hint=measure.meaning) for measure in results.measures]
    table = Table([Column("arm"), *measures])
    for arm in results.arms:
        means = (_mean(measure, results, arm.name) for measure in results.measures)
        table.add(TableCell(arm.name, key=keys[arm.name]), *means)
    lead = (
        "After the last round: the mean over seeds; below it the 95 % interval (Student's t), or the range of two "
        "seeds in parentheses."
    )
    return PageSection("table", "Results", [table], lead)


def _mean(measure: MeasureRecord, results: StudyResults, arm: str) -> TableCell:
    found = results.result(arm, measure.name).summary
    below = spread_text(measure, found)
    if found.n > 1 and found.low is None and not found.censored:
        below = f"({range_text(measure, found)})"
    of = "" if found.n == len(results.seeds) else f"({found.n} of {len(results.seeds)})"
    hint = f"range {range_text(measure, found)}"
    return TableCell(middle_text(measure, found), "strong", note=of, below=below, hint=hint)


def _comparisons(results: StudyResults, keys: dict[str, LegendKey]) -> PageSection:
    lead = (
        f"Each arm minus {results.reference}, paired by seed. p: exact permutation test, the share of all exchanges "
        "within seeds with a difference at least as large."
    )
    return PageSection("comparisons", "Comparisons", [comparisons_table(results, keys)], lead)


def _trends(results: StudyResults, keys: dict[str, LegendKey]) -> PageSection:
    lead = (
        "The last round minus the first. Kendall's tau is 1 if every round is above those before it, and −1 if every "
        "round is below; the mean over seeds. p: test of no trend, with seeds as units."
    )
    return PageSection("trends", "Over the rounds", [trends_table(results, keys)], lead)


# --- charts ------------------------------------------------------------------------------------------------------


def _curves(results: StudyResults, keys: dict[str, LegendKey]) -> PageSection:
    charts = [_curve(measure, results, keys) for measure in results.measures if measure.by_round]
    if not any(charts):
        return PageSection("curves", "Curves", [])
    body = [chart.legend(list(keys.values())), elements.grid(charts)]
    lead = (
        "The mean over seeds after each round; the band is its 95 % interval, or with fewer than three seeds the range."
    )
    return PageSection("curves", "Curves", body, lead)


def _curve(measure: MeasureRecord, results: StudyResults, keys: dict[str, LegendKey]) -> Markup:
    found = [results.result(arm.name, measure.name) for arm in results.arms]
    last = max((len(result.rounds) for result in found), default=0) - 1
    if last < 1:
        return Markup()
    across = round_axis(range(last + 1), margin=0.15)
    limit = _limit(found)
    lines = [_line(result, keys[result.arm], limit) for result in found]
    title = measure.label[0].upper() + measure.label[1:]
    if limit is None:
        return line_chart(title, lines, across, cast(NumberStyle, measure.style))
    note = "Rounds with values that were not found show the median. A median that was not found is drawn at the limit."
    references = [ReferenceLine(limit, "limit")]
    return line_chart(title, lines, across, cast(NumberStyle, measure.style), references=references, note=note)


def _limit(results: Sequence[MeasureResult]) -> float | None:
    """The largest limit of a censored value; None if no value is censored."""
    values = [value for result in results for series in result.series.values() for value in series]
    return max((value.number for value in values if value is not None and value.censored), default=None)


def _line(result: MeasureResult, key: LegendKey, limit: float | None) -> ChartLine:
    """A round with censored values shows its median, without a band; at the limit if the median is censored too."""
    points, spread = [], []
    for place, found in enumerate(result.rounds):
        middle = found.median if found.censored else found.mean
        if middle is None and found.censored:
            middle = limit
        if middle is None:
            continue
        points.append((float(place), middle))
        low, high = (found.low, found.high) if found.low is not None else (found.minimum, found.maximum)
        if low is not None and high is not None and not found.censored:
            spread.append((float(place), low, high))
    return ChartLine(key.label, [points], key.style, key.dash, dots=True, spread=spread)


def _seeds(results: StudyResults, keys: dict[str, LegendKey]) -> PageSection:
    """Every seed as a dot."""
    charts = []
    for measure in results.measures:
        rows, hidden = [], 0
        for arm in results.arms:
            values = results.result(arm.name, measure.name).values.values()
            hidden += sum(value.censored for value in values)
            if known := [value.number for value in values if not value.censored]:
                rows.append((arm.name, known, keys[arm.name].style))
        if rows:
            note = f"{hidden} values were not found within their limit and are not shown." if hidden else ""
            charts.append(
                dot_strips(measure.label, rows, cast(NumberStyle, measure.style), unit="a dot per seed", note=note)
            )
    return PageSection("seeds", "Seeds", charts, "One dot per seed, after its last round. The mark is the median.")


# --- what made it ------------------------------------------------------------------------------------------------


def _arms(results: StudyResults, keys: dict[str, LegendKey]) -> PageSection:
    titles = ("arm", "experiment", "optimizer steps", "settings")
    table = Table([Column(title) for title in titles], look="settings")
    for arm in results.arms:
        settings = ", ".join(f"{key} = {value}" for key, value in arm.settings.items())
        last = TableCell(settings, "code") if settings else TableCell(ABSENT)
        table.add(TableCell(arm.name, key=keys[arm.name]), arm.experiment, f"{arm.steps:,}", last)
    return PageSection("arms", "Arms", [table])


def _games(results: StudyResults) -> PageSection:
    table = Table([Column(title) for title in ("game", "", "time in phases", "run")], look="runs")
    for cell in results.cells:
        status = "failed" if cell.reason else cell.status
        table.add(
            _game(cell),
            TableCell(status, f"badge {STATUS[status]}"),
            duration(cell.seconds),
            TableCell(cell.run, "code"),
        )
    failed = elements.notes([(_game(cell), cell.reason) for cell in results.failed])
    return PageSection("games", "Games", [failed, elements.details("All games", [table])])


def _game(cell: CellRecord) -> str:
    return f"{cell.arm}, seed {cell.seed}"


def _made_by(results: StudyResults) -> PageSection:
    versions = sorted({cell.code_version for cell in results.cells if cell.code_version})
    machines = sorted({cell.machine for cell in results.cells if cell.machine})
    done: Sequence[CellRecord] = [cell for cell in results.cells if cell.status == "complete"]
    lines = [(results.command, "play missing games and write this page")]
    if done:
        lines.append((f"pvg report {shlex.quote(done[0].run)}", "the report of a single game"))
    body = [
        elements.commands(lines),
        elements.facts([("games played by", ", ".join(versions)), ("on", "; ".join(machines)), ("file", results.file)]),
        elements.note(f"Settings changed on the command line: {', '.join(results.overrides)}")
        if results.overrides
        else None,
        elements.toml(results.toml),
    ]
    return PageSection("made", "How to reproduce it", body)
