"""A study's results for people: figures as text, sentences about their limits, and the tables."""

from __future__ import annotations

import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from markupsafe import Markup

from pvg.errors import counted, in_percent
from pvg.reporting.charts import ChartLine, ReferenceLine, line_chart, round_axis
from pvg.reporting.formats import ABSENT, NumberStyle, change_text, duration, value_text
from pvg.reporting.run_page import legend_key
from pvg.reporting.table import Column, LegendKey, PageSection, Table, TableCell, chart, elements, escaped, page
from pvg.study.plan import StudyPlan
from pvg.study.results import (
    LEAST_FOR_INTERVAL,
    CellRecord,
    MeasureRecord,
    MeasureResult,
    PairedComparison,
    SeedSummary,
    StudyResults,
    reach,
    shortfall,
)

LONG_NAME = 14  # characters of an arm's name that a terminal of 80 columns has room for
MARKDOWN_MARK = b"## pvg study:"  # how the Markdown begins
DIFFERENCE, TREND = "difference between arms", "trend over the rounds"
# Section -> its title, and how to read its table.
SECTIONS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def measure_text(measure: MeasureRecord, value: float | None) -> str:
    return value_text(cast(NumberStyle, measure.style), value)


def middle_text(measure: MeasureRecord, summary: SeedSummary) -> str:
    """The mean; with censored values the median, which may itself be censored."""
    if not summary.censored:
        return measure_text(measure, summary.mean)
    return f"median {'not found' if summary.median is None else measure_text(measure, summary.median)}"


def spread_text(measure: MeasureRecord, summary: SeedSummary) -> str:
    """The 95 % interval of the mean, or its replacement if there is none."""
    if summary.n == 0:
        return "no value"
    if summary.censored:
        return f"{in_percent(summary.censored)} not found"
    return _from_to(measure_text(measure, summary.low), measure_text(measure, summary.high))


def range_text(measure: MeasureRecord, summary: SeedSummary) -> str:
    ends = (summary.minimum, summary.maximum)
    return _from_to(*("not found" if end is None and summary.n else measure_text(measure, end) for end in ends))


def _from_to(low: str, high: str) -> str:
    """A range of two figures with the unit written once."""
    if low == high:
        return low
    for unit in (" %", " pp", " s"):
        if low.endswith(unit) and high.endswith(unit):
            return f"{low.removesuffix(unit)} to {high}"
    return f"{low} to {high}"


def p_text(p: float | None) -> str:
    if p is None:
        return ABSENT
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1g}"


def threads_each(threads: int) -> str:
    """The threads of each game; `threads` is its `models.threads`."""
    return f"{counted(threads, 'thread')} each" if threads else "threads by the size of the model"


def cell_text(cell: CellRecord) -> str:
    return f"{cell.arm} seed {cell.seed}"


def cautions(results: StudyResults) -> list[str]:
    """Limits that a reader must know before trusting a figure, one sentence each."""
    found = []
    missing = [cell for cell in results.cells if cell.status not in ("played", "complete")]
    unevaluated = [cell for cell in results.cells if cell.status == "played"]
    for cells, what, which in (
        (missing, "missing", "all figures"),
        (unevaluated, "not evaluated", "the measures of the evaluation"),
    ):
        if cells:
            names = ", ".join(cell_text(cell) for cell in cells[:4]) + (" and others" if len(cells) > 4 else "")
            found.append(
                f"{len(cells)} of {counted(len(results.cells), 'game')} {'is' if len(cells) == 1 else 'are'} {what} "
                f"({names}): {which} use only the others."
            )
    most = max((result.summary.n for result in results.results), default=0)
    if 0 < most < LEAST_FOR_INTERVAL:
        found.append(interval_text(most))
    if any(result.summary.censored for result in results.results):
        found.append(
            "Values that were not found within their limit count as larger than all others: they are part of "
            "medians and ranks, but not of means."
        )
    found += [f"{sentence} Read the intervals and the signs." for sentence in _on_p_values(results)]
    machines = sorted({cell.machine for cell in results.cells} - {""})
    versions = sorted({cell.code_version for cell in results.cells} - {""})
    if len(machines) > 1:
        found.append(f"The games were played on different machines or threads ({'; '.join(machines)}).")
    if len(versions) > 1:
        found.append(f"The games were played by different versions of pvg: {', '.join(versions)}.")
    return found


def _on_p_values(results: StudyResults) -> Iterator[str]:
    """What the seeds that were played can show of no measure."""
    compared = [(found.measure, found.comparison.n) for found in results.comparisons if found.comparison.p is not None]
    trends = [(found.measure, found.trend.n) for found in results.results if found.trend and found.trend.p is not None]
    for tests, effect in ((compared, DIFFERENCE), (trends, TREND)):
        families = Counter(measure for measure, _ in tests)
        if families and (said := shortfall(max(n for _, n in tests), min(families.values()), effect)):
            yield said


def plan_cautions(plan: StudyPlan) -> list[str]:
    """What the seeds of a study cannot show, before it is played."""
    differences = len(plan.arms) - 1 if plan.reference and any(measure.compared for measure in plan.measures) else 0
    several_rounds = sum(arm.experiment.game.rounds > 1 for arm in plan.arms)
    trends = several_rounds if any(measure.by_round for measure in plan.measures) else 0
    tests = {DIFFERENCE: differences, TREND: trends}
    return [found for effect, count in tests.items() if (found := shortfall(len(plan.seeds), count, effect))]


def interval_text(seeds: int) -> str:
    """How large a difference must be for its interval of Student's t to leave out 0."""
    if seeds < LEAST_FOR_INTERVAL:
        return f"With {counted(seeds, 'seed')} there is no useful interval. An interval needs three seeds."
    return (
        f"With {seeds} seeds, the 95 % interval of a difference leaves out 0 if the mean difference is above "
        f"{reach(seeds):.2g} standard deviations of the differences by seed."
    )


# --- tables ---------------------------------------------------------------------------------------------------------


def result_sections(results: StudyResults, keys: Mapping[str, LegendKey] | None = None) -> list[PageSection]:
    """The tables that have rows, each with what it shows. `keys`: the arms' swatches on a page."""
    swatches = keys or {}
    tables = {
        "table": means_table(results, swatches),
        "rounds": rounds_table(results),
        "comparisons": pairs_table(results, _comparisons(results), "difference", swatches, taus=False),
        "trends": pairs_table(results, _trends(results), "last - first", swatches, taus=True),
    }
    texts = {name: [text.format(reference=results.reference) for text in SECTIONS[name]] for name in tables}
    return [PageSection(name, texts[name][0], [table], texts[name][1]) for name, table in tables.items() if table]


def markdown_text(results: StudyResults) -> str:
    """The tables, cautions, and the games that they are from."""
    parts = [f"{MARKDOWN_MARK.decode()} {results.name}", *([escaped(results.about)] if results.about else [])]
    for found in result_sections(results):
        table = cast(Table, found.body[0])
        parts += [f"### {found.title}", found.lead, table.to_markdown()]
    if warnings := cautions(results):
        parts.append("\n".join(f"- {escaped(sentence)}" for sentence in warnings))
    played = sorted({cell.code_version for cell in results.cells if cell.status == "complete"})
    parts.append(
        f"`{results.command}`, seeds {', '.join(map(str, results.seeds))}, played by pvg "
        f"{', '.join(played) or results.pvg}, {results.cpu}, {threads_each(results.threads)}, {results.created}."
    )
    return "\n\n".join(parts) + "\n"


MeasuredPairs = Iterator[tuple[MeasureRecord, str, PairedComparison]]


def means_table(results: StudyResults, keys: Mapping[str, LegendKey]) -> Table:
    """The values after the last round."""
    numbers = (Column("n", "right", wrap=False), Column("mean", "right", "strong"), Column("95 % interval", "right"))
    table = Table([*_head(results), *numbers, Column("range", "right")], narrow=True)
    for measure in results.measures:
        for arm in results.arms:
            found, seeds = results.result(arm.name, measure.name).summary, len(results.seeds)
            count = TableCell(f"{found.n} of {seeds}", "" if found.n == seeds else "worse")
            texts = (middle_text(measure, found), spread_text(measure, found), range_text(measure, found))
            table.add(measure.label, TableCell(arm.name, key=keys.get(arm.name)), count, *texts)
    return table


def _head(results: StudyResults) -> list[Column]:
    """Short names of arms stay on one line, so that a narrow terminal does not break them."""
    longest = max(len(arm.name) for arm in results.arms)
    return [Column("measure", once=True), Column("arm", wrap=longest > LONG_NAME)]


def rounds_table(results: StudyResults) -> Table:
    """Mean (or median) and range after each round. Empty for games of one round."""
    by_round = [measure for measure in results.measures if measure.by_round]
    found = [(m, arm.name, results.result(arm.name, m.name).rounds) for m in by_round for arm in results.arms]
    count = max((len(rounds) for *_, rounds in found), default=0)
    columns = (Column(f"round {number}", "right") for number in range(count))
    table = Table([*_head(results), *columns])
    for measure, arm, rounds in found if count > 1 else ():
        cells = []
        for summary in rounds:
            middle, reach = middle_text(measure, summary), range_text(measure, summary)
            cells.append(middle if middle.endswith(reach) else f"{middle} ({reach})")
        table.add(measure.label, arm, *cells, *[ABSENT] * (count - len(cells)))
    return table


def pairs_table(
    results: StudyResults, pairs: MeasuredPairs, title: str, keys: Mapping[str, LegendKey], *, taus: bool
) -> Table:
    """Differences between pairs of values. `title`: of the difference. The correction over all comparisons has no room
    on the terminal."""
    tau, all_ = Column("tau", "right", wrap=False), f"Holm's p of all {results.family}"
    columns = [
        Column(title, "right", short="change" if taus else "differs", wrap=False),
        Column("95 % interval", "right"),
        Column("seeds", "right"),
        *([tau] if taus else []),
        Column("p", "right", wrap=False),
        Column("Holm's p", "right", short="Holm", wrap=False),
        *([] if taus else [Column(all_, "right", on="pages")]),
    ]
    table = Table([*_head(results), *columns], narrow=True)
    for measure, arm, found in pairs:
        if found.n:
            by_rank, style = found.test == "signed ranks", cast(NumberStyle, measure.style)
            table.add(
                measure.label,
                TableCell(arm, key=keys.get(arm)),
                "by rank" if by_rank else change_text(style, found.difference),
                _from_to(change_text(style, found.low), change_text(style, found.high)),
                f"{found.up}↑ {found.down}↓" + (f" {found.equal}=" if found.equal else ""),
                *([f"{found.tau:+.2f}"] if taus else []),
                p_text(found.p),
                p_text(found.p_adjusted_arms),
                *([] if taus else [p_text(found.p_adjusted)]),
            )
    return table


def _comparisons(results: StudyResults) -> MeasuredPairs:
    measures = {measure.name: measure for measure in results.measures}
    for found in results.comparisons:
        yield measures[found.measure], found.arm, found.comparison


def _trends(results: StudyResults) -> MeasuredPairs:
    for measure in results.measures:
        for arm in results.arms:
            if (found := results.result(arm.name, measure.name).trend) is not None:
                yield measure, arm.name, found


# The page of a study: results, curves over rounds, comparisons, trends, seeds, games, and how to reproduce it.

STATUS = {"complete": "good", "played": "warn", "unfinished": "warn", "new": "warn", "damaged": "bad", "failed": "bad"}


def study_page(results: StudyResults) -> str:
    keys = {arm.name: legend_key(arm.name, place) for place, arm in enumerate(results.arms)}
    status = "complete" if results.complete == len(results.cells) else "failed" if results.failed else "unfinished"
    facts = [
        ("arms", str(len(results.arms))),
        ("seeds", str(len(results.seeds))),
        ("games complete", f"{results.complete} of {len(results.cells)}"),
        ("compared with", results.reference),
        ("time of all games", duration(sum(cell.seconds or 0.0 for cell in results.cells))),
        ("machine", f"{results.cpu or ABSENT}, {results.cores} cores, {threads_each(results.threads)}"),
        ("pvg", results.pvg),
    ]
    header = [
        elements.title(results.name, results.about, status, STATUS[status]),
        elements.facts(facts),
        elements.notes(cautions(results)),
    ]
    own = [_curves(results, keys), _arms(results, keys), _games(results), _made_by(results)]
    return page(f"{results.name}: pvg study", header, [*result_sections(results, keys), *own])


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
    values = [value for result in found for series in result.series.values() for value in series]
    limit = max((value.number for value in values if value is not None and value.censored), default=None)
    lines = [_line(result, keys[result.arm], limit) for result in found]
    title, style = measure.label[0].upper() + measure.label[1:], cast(NumberStyle, measure.style)
    if limit is None:
        return line_chart(title, lines, across, style)
    note = "Medians and ranges over the seeds. Values that were not found are larger than the limit, and drawn there."
    references = [ReferenceLine(limit, "limit: not found")]
    return line_chart(title, lines, across, style, references=references, note=note)


def _line(result: MeasureResult, key: LegendKey, limit: float | None) -> ChartLine:
    """Means with their intervals. If a value of the measure is censored, above `limit`: medians with their ranges."""
    points, spread = [], []
    for place, found in enumerate(result.rounds):
        if found.n:
            low, high = (found.low, found.high) if found.low is not None else (found.minimum, found.maximum)
            ends = (low, found.mean, high) if limit is None else (found.minimum, found.median, found.maximum)
            low, middle, high = (cast(float, limit if end is None else end) for end in ends)
            points.append((float(place), middle))
            spread.append((float(place), low, high))
    return ChartLine(key.label, [points], key.style, key.dash, dots=True, spread=spread)


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
            cell_text(cell),
            TableCell(status, f"badge {STATUS[status]}"),
            duration(cell.seconds),
            TableCell(cell.run, "code"),
        )
    failed = elements.notes([(cell_text(cell), cell.reason) for cell in results.failed])
    return PageSection("games", "Games", [failed, elements.details("All games", [table])])


def _made_by(results: StudyResults) -> PageSection:
    played = [cell for cell in results.cells if cell.status == "complete"]
    versions, machines = ({cell.code_version for cell in played} - {""}, {cell.machine for cell in played} - {""})
    lines = [(results.command, "play missing games and write this page")]
    lines += [(f"pvg view {shlex.quote(cell.run)}", "a single game") for cell in played[:1]]
    by, on = ", ".join(sorted(versions)), "; ".join(sorted(machines))
    body = [
        elements.commands(lines),
        elements.facts([("games played by", by), ("on", on), ("file", results.file)]),
        elements.note(f"Settings changed on the command line: {', '.join(results.overrides)}")
        if results.overrides
        else None,
        elements.toml(results.toml),
    ]
    return PageSection("made", "How to reproduce it", body)
