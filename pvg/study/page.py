"""The page of a study, in the look of `pvg report`: the table, curves over rounds, seeds as dots, comparisons, trends,
the games, and what made them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import cast

from pvg.reporting.axes import Across, Key, legend, swatch
from pvg.reporting.charts import Line, Reference, dot_strips, line_chart
from pvg.reporting.formats import ABSENT, Style, duration
from pvg.reporting.html import (
    Html,
    Piece,
    Section,
    badge,
    command,
    details,
    document,
    facts,
    grid,
    join,
    span,
    table,
    tag,
)
from pvg.reporting.run_page import footer
from pvg.reporting.several_page import COLOURS, DASHES
from pvg.study.results import CellRecord, MeasureRecord, Result, StudyResults
from pvg.study.text import (
    cautions,
    comparison_cells,
    middle_text,
    range_text,
    spread_text,
    threads_each,
    trend_cells,
)

STATUS = {"complete": "good", "played": "warn", "unfinished": "warn", "new": "warn", "damaged": "bad", "failed": "bad"}


def study_page(results: StudyResults) -> str:
    keys = _keys(results)
    header = [_title(results), _facts(results), _cautions(results)]
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
    return document(f"{results.name}: pvg study", header, sections, footer())


def _keys(results: StudyResults) -> dict[str, Key]:
    """Every arm's colour and dash on this page."""
    return {
        arm.name: Key(arm.name, f"run-{place % COLOURS}", DASHES[place // COLOURS % len(DASHES)])
        for place, arm in enumerate(results.arms)
    }


def _title(results: StudyResults) -> Html:
    whole = results.complete == len(results.cells)
    word = "complete" if whole else "failed" if results.failed else "unfinished"
    return tag("h1", results.name, badge(word, STATUS[word]), span("sub", results.about))


def _facts(results: StudyResults) -> Html:
    return facts(
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


def _cautions(results: StudyResults) -> Html | None:
    told = cautions(results)
    return tag("ul", *(tag("li", sentence) for sentence in told), class_="notes") if told else None


# --- tables ------------------------------------------------------------------------------------------------------


LEFT = "text-align:left"  # of a column that holds no figures


def _arm(key: Key) -> Html:
    return tag("th", swatch(key), " ", key.label, style=LEFT)


def _means(results: StudyResults, keys: dict[str, Key]) -> Section:
    """Arms down, measures across: each mean over its interval."""
    head: list[Piece] = ["arm", *(tag("th", measure.label, title=measure.meaning) for measure in results.measures)]
    rows: list[list[Piece]] = [
        [_arm(keys[arm.name]), *(_mean(measure, results, arm.name) for measure in results.measures)]
        for arm in results.arms
    ]
    lead = (
        "After the last round: the mean over seeds; below it its 95 % interval (Student's t), of two seeds (the range)."
    )
    return Section("table", "Results", [table(head, rows, "figures")], lead)


def _mean(measure: MeasureRecord, results: StudyResults, arm: str) -> Html:
    found = results.result(arm, measure.name).summary
    below = spread_text(measure, found)
    if found.n > 1 and found.low is None and not found.censored:
        below = f"({range_text(measure, found)})"
    of = "" if found.n == len(results.seeds) else f" ({found.n} of {len(results.seeds)})"
    return tag(
        "td",
        tag("strong", middle_text(measure, found)),
        span("quiet", of) if of else None,
        tag("br"),
        span("quiet", below),
        title=f"range {range_text(measure, found)}",
    )


def _comparisons(results: StudyResults, keys: dict[str, Key]) -> Section:
    measures = {measure.name: measure for measure in results.measures}
    head = [
        "measure",
        tag("th", "arm", style=LEFT),
        "difference",
        "95 % interval",
        "seeds",
        "p",
        f"Holm's p of {results.family}",
    ]
    rows: list[list[Piece]] = []
    before = ""
    for found in results.comparisons:
        measure = measures[found.measure]
        label = measure.label if found.measure != before else ""
        before = found.measure
        rows.append([label, _arm(keys[found.arm]), *comparison_cells(measure, found.comparison)])
    lead = (
        f"Each arm less {results.reference}, seed by seed. p: the share of all ways to exchange the two within seeds "
        "that lie as far apart (exact); Holm's is adjusted over all comparisons of this table."
    )
    return Section("comparisons", "Comparisons", [table(head, rows, "figures")] if rows else [], lead)


def _trends(results: StudyResults, keys: dict[str, Key]) -> Section:
    head = ["measure", tag("th", "arm", style=LEFT), "last − first", "95 % interval", "seeds", "Kendall's tau", "p"]
    rows: list[list[Piece]] = []
    for measure in results.measures:
        label = measure.label
        for arm in results.arms:
            found = results.result(arm.name, measure.name).trend
            if found is not None and found.n:
                rows.append([label, _arm(keys[arm.name]), *trend_cells(measure, found)])
                label = ""
    lead = (
        "Does it rise or fall with the rounds? tau is 1 where every round is above the ones before it, −1 where every "
        "one is below; its mean over seeds, and p against no trend with seeds as the units."
    )
    return Section("trends", "Over the rounds", [table(head, rows, "figures")] if rows else [], lead)


# --- charts ------------------------------------------------------------------------------------------------------


def _curves(results: StudyResults, keys: dict[str, Key]) -> Section:
    charts = [_curve(measure, results, keys) for measure in results.measures if measure.by_round]
    if not any(charts):
        return Section("curves", "Curves", [])
    body = [legend(keys.values()), grid(*charts)]
    lead = (
        "The mean over seeds after each round; the band is its 95 % interval, or with fewer than three seeds the range."
    )
    return Section("curves", "Curves", body, lead)


def _curve(measure: MeasureRecord, results: StudyResults, keys: dict[str, Key]) -> Html | None:
    found = [results.result(arm.name, measure.name) for arm in results.arms]
    last = max((len(result.rounds) for result in found), default=0) - 1
    if last < 1:
        return None
    every = -(-(last + 1) // 12)
    across = Across(-0.15, last + 0.15, "round", tuple((float(n), str(n)) for n in range(last + 1) if n % every == 0))
    limit = _limit(found)
    lines = [_line(result, keys[result.arm], limit) for result in found]
    title = measure.label[0].upper() + measure.label[1:]
    if limit is None:
        return line_chart(title, lines, across, cast(Style, measure.style), keyed=False)
    note = "Medians, where a seed's was not found. At the limit: nor was the median."
    references = [Reference(limit, "limit")]
    return line_chart(title, lines, across, cast(Style, measure.style), keyed=False, references=references, note=note)


def _limit(results: Sequence[Result]) -> float | None:
    """The largest number that a value was not found within; None where all were found."""
    values = [value for result in results for series in result.series.values() for value in series]
    return max((value.number for value in values if value is not None and value.censored), default=None)


def _line(result: Result, key: Key, limit: float | None) -> Line:
    """Rounds with censored values have a median, which may not be found either; there the line has no band."""
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
    return Line(key.label, [points], key.style, key.dash, dots=True, spread=spread)


def _seeds(results: StudyResults, keys: dict[str, Key]) -> Section:
    """Every seed as a dot: what a mean hides."""
    charts = []
    for measure in results.measures:
        rows, hidden = [], 0
        for arm in results.arms:
            values = results.result(arm.name, measure.name).values.values()
            hidden += sum(value.censored for value in values)
            if known := [value.number for value in values if not value.censored]:
                rows.append((arm.name, known, keys[arm.name].style))
        if rows:
            note = f"{hidden} values were not found within their limit and have no dot." if hidden else ""
            charts.append(dot_strips(measure.label, rows, cast(Style, measure.style), unit="a dot per seed", note=note))
    return Section("seeds", "Seeds", charts, "Each seed after its last round; the mark is the median.")


# --- what made it ------------------------------------------------------------------------------------------------


def _arms(results: StudyResults, keys: dict[str, Key]) -> Section:
    rows: list[list[Piece]] = [
        [
            _arm(keys[arm.name]),
            arm.experiment,
            f"{arm.steps:,}",
            join([tag("code", f"{key} = {value}") for key, value in arm.settings.items()], "  ") or ABSENT,
        ]
        for arm in results.arms
    ]
    return Section("arms", "Arms", [table(["arm", "experiment", "optimizer steps", "settings"], rows, "settings")])


def _games(results: StudyResults) -> Section:
    rows: list[list[Piece]] = [
        [_game(cell), _status(cell), duration(cell.seconds), _where(cell)] for cell in results.cells
    ]
    failed = [tag("li", tag("strong", _game(cell)), f": {cell.reason}") for cell in results.failed]
    whole = details("All games", table(["game", "", "time in phases", "run"], rows, "runs"))
    return Section("games", "Games", [tag("ul", *failed, class_="notes") if failed else None, whole])


def _game(cell: CellRecord) -> str:
    return f"{cell.arm}, seed {cell.seed}"


def _status(cell: CellRecord) -> Html:
    word = "failed" if cell.reason else cell.status
    return tag("td", badge(word, STATUS[word]))


def _where(cell: CellRecord) -> Html:
    return tag("td", tag("code", cell.run))


def _made_by(results: StudyResults) -> Section:
    versions = sorted({cell.code_version for cell in results.cells if cell.code_version})
    machines = sorted({cell.machine for cell in results.cells if cell.machine})
    done: Sequence[CellRecord] = [cell for cell in results.cells if cell.status == "complete"]
    lines = [command(results.command, "makes this page, and plays what is missing")]
    if done:
        lines.append(command(f"pvg report {shlex.quote(done[0].run)}", "one of the games by itself"))
    body = [
        tag("ul", *lines, class_="commands"),
        facts([("games played by", ", ".join(versions)), ("on", "; ".join(machines)), ("file", results.file)]),
        tag("p", f"Settings changed on the command line: {', '.join(results.overrides)}")
        if results.overrides
        else None,
        tag("pre", results.toml, class_="toml"),
    ]
    return Section("made", "What made it", body)
