"""A study's results as short text and Markdown: figures, and sentences about their limits.

The terminal, Markdown and the page share them.

    markdown_text(results)                     # the tables
    placed(document, results.name, tables)     # a document with the tables between its marks, otherwise unchanged
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from pvg.reporting.figures import ABSENT, Style, styled
from pvg.study.results import CellRecord, MeasureRecord, StudyResults
from pvg.study.statistics import LEAST_FOR_INTERVAL, LEVEL, Comparison, Summary, Trend, least_p, seeds_needed


def value_text(measure: MeasureRecord, value: float | None) -> str:
    return styled(cast(Style, measure.style), value)


def change_text(measure: MeasureRecord, value: float | None) -> str:
    """A difference with its sign; differences of shares are in percentage points."""
    if value is None:
        return ABSENT
    if measure.style == "share":
        return f"{100 * value + 0.0:+.1f} pp"
    if measure.style in ("auc", "score", "number"):
        return f"{value + 0.0:+.{3 if measure.style == 'auc' else 2}f}"
    return f"{'+' if value >= 0 else '-'}{value_text(measure, abs(value))}"


def middle_text(measure: MeasureRecord, summary: Summary) -> str:
    """The mean; with censored values the median, which may itself be censored."""
    if not summary.censored:
        return value_text(measure, summary.mean)
    return f"median {value_text(measure, summary.median)}" if summary.median is not None else "median not found"


def spread_text(measure: MeasureRecord, summary: Summary) -> str:
    """The 95 % interval of the mean, or its replacement if there is none."""
    if summary.n == 0:
        return "no value"
    if summary.censored:
        return f"{100 * summary.censored:.0f} % not found"
    if summary.low is not None and summary.high is not None:
        return _from_to(value_text(measure, summary.low), value_text(measure, summary.high))
    return ABSENT


def range_text(measure: MeasureRecord, summary: Summary) -> str:
    if summary.n == 0:
        return ABSENT
    low = "not found" if summary.minimum is None else value_text(measure, summary.minimum)
    high = "not found" if summary.maximum is None else value_text(measure, summary.maximum)
    return low if low == high else _from_to(low, high)


def _from_to(low: str, high: str) -> str:
    """A range of two figures with the unit written once."""
    for unit in (" %", " pp", " s"):
        if low.endswith(unit) and high.endswith(unit):
            return f"{low.removesuffix(unit)} to {high}"
    return f"{low} to {high}"


def rounds_text(measure: MeasureRecord, rounds: Sequence[Summary]) -> str:
    """The mean or median of every round, as many as fit."""
    if len(rounds) < 2:
        return ""
    told = [middle_text(measure, summary).replace(" %", "").replace("median ", "") for summary in rounds]
    if len(told) > 6:
        told = [*told[:2], "…", *told[-2:]]
    return " → ".join(told)


def interval_text(measure: MeasureRecord, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ABSENT
    return _from_to(change_text(measure, low), change_text(measure, high))


def signs_text(up: int, down: int, equal: int) -> str:
    """Numbers of seeds that are higher, lower, equal."""
    return f"{up}↑ {down}↓" + (f" {equal}=" if equal else "")


def p_text(p: float | None) -> str:
    if p is None:
        return ABSENT
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1g}"


def comparison_cells(measure: MeasureRecord, found: Comparison) -> list[str]:
    """Difference, interval, signs, p, adjusted p."""
    if not found.n:
        return [ABSENT] * 5
    difference = "by rank" if found.test == "signed ranks" else change_text(measure, found.difference)
    return [
        difference,
        interval_text(measure, found.low, found.high),
        signs_text(found.up, found.down, found.equal),
        p_text(found.p),
        p_text(found.p_adjusted),
    ]


def trend_cells(measure: MeasureRecord, found: Trend) -> list[str]:
    """Last less first, its interval, signs, tau, p."""
    if not found.n:
        return [ABSENT] * 5
    return [
        change_text(measure, found.change),
        interval_text(measure, found.low, found.high),
        signs_text(found.up, found.down, found.flat),
        ABSENT if found.tau is None else f"{found.tau:+.2f}",
        p_text(found.p),
    ]


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def threads_each(threads: int) -> str:
    """The threads of each game; `threads` is its `models.threads`."""
    return f"{counted(threads, 'thread')} each" if threads else "threads by the size of the model"


def cell_text(cell: CellRecord) -> str:
    return f"{cell.arm} seed {cell.seed}"


def cautions(results: StudyResults) -> list[str]:
    """What a reader must know before trusting a figure, one sentence each."""
    found = []
    missing = [cell for cell in results.cells if cell.status not in ("played", "complete")]
    unevaluated = [cell for cell in results.cells if cell.status == "played"]
    for cells, what, which in (
        (missing, "not there", "every figure"),
        (unevaluated, "not evaluated", "what an evaluation measures"),
    ):
        if cells:
            names = ", ".join(cell_text(cell) for cell in cells[:4]) + (" and others" if len(cells) > 4 else "")
            found.append(f"{len(cells)} of {len(results.cells)} games are {what} ({names}): {which} is of the rest.")
    most = max((result.summary.n for result in results.results), default=0)
    if 0 < most < LEAST_FOR_INTERVAL:
        found.append(
            f"With {counted(most, 'seed')} there is no useful interval. "
            "An interval needs three seeds, and a convincing table five or more."
        )
    if any(result.summary.censored for result in results.results):
        found.append(
            "Values that were not found within their limit count as larger than all others: they are part of "
            "medians and ranks, but not of means."
        )
    found += _on_p_values(results)
    machines = {cell.machine for cell in results.cells if cell.machine}
    versions = {cell.code_version for cell in results.cells if cell.code_version}
    if len(machines) > 1:
        found.append(f"The games were played on different machines or threads ({'; '.join(sorted(machines))}).")
    if len(versions) > 1:
        found.append(f"The games were played by different versions of pvg: {', '.join(sorted(versions))}.")
    return found


def _on_p_values(results: StudyResults) -> list[str]:
    pairs = max((found.comparison.n for found in results.comparisons), default=0)
    if not pairs or not results.family:
        return []
    least, family = least_p(pairs), results.family
    said = f"With {counted(pairs, 'pair')} no p value can be below {least:.3g}"
    if least > LEVEL:
        said += f": no difference can be significant at {LEVEL}, however large"
    elif min(1.0, least * family) > LEVEL:
        said += f": after Holm's adjustment over {family} comparisons none can reach {LEVEL}"
    else:
        return []
    needed = f"{seeds_needed(1)} seeds could for one comparison"
    if family > 1:
        needed += f", {seeds_needed(family)} for the {family} of this table"
    return [f"{said}. {needed}. Read the differences and the signs."]


# --- Markdown ---------------------------------------------------------------------------------------------------------


def marks(name: str) -> tuple[str, str]:
    """The marks before and after the part of a document that the tables of study `name` replace."""
    return f"<!-- study {name} -->", f"<!-- end of study {name} -->"


def placed(document: str, name: str, tables: str) -> str:
    """`document` with `tables` between the marks of study `name`. A document that is empty, or has only tables of this
    study, is replaced completely.

    Raises ValueError for any other document without the marks, with only one of them, or with repeated or nested marks.
    """
    begin, end = marks(name)
    count = (document.count(begin), document.count(end))
    if count == (0, 0) and (not document.strip() or document.startswith(f"## {name}\n")):
        return tables
    if count == (0, 0):
        raise ValueError(f"it is not a table of the study, and has no marks {begin} and {end}")
    if count != (1, 1) or document.index(begin) > document.index(end):
        raise ValueError(f"the marks {begin} and {end} must occur once each, in this order")
    before, rest = document.split(begin)
    older, after = rest.split(end)
    if "<!-- " in older:
        raise ValueError(f"there are other marks between {begin} and {end}")
    return f"{before}{begin}\n\n{tables}\n{end}{after}"


def markdown_text(results: StudyResults) -> str:
    """Means, comparisons, trends, cautions, and where they come from."""
    parts = [f"## {results.name}"]
    if results.about:
        parts.append(_escaped(results.about))
    parts += ["### Measures after the last round", _means(results)]
    if rounds := _rounds(results):
        parts += [
            "### After each round",
            "The mean, or of censored values the median, and the range over seeds.",
            rounds,
        ]
    if results.comparisons:
        parts += [f"### Against {results.reference}, paired by seed", _comparisons(results)]
    if trends := _trends(results):
        parts += ["### Over the rounds", trends]
    if told := cautions(results):
        parts.append("\n".join(f"- {_escaped(sentence)}" for sentence in told))
    played = sorted({cell.code_version for cell in results.cells if cell.status == "complete"})
    parts.append(
        f"`{results.command}`, seeds {', '.join(map(str, results.seeds))}, played by pvg "
        f"{', '.join(played) or results.pvg}, {results.cpu}, "
        f"{threads_each(results.threads)}, {results.created}."
    )
    return "\n\n".join(parts) + "\n"


def _means(results: StudyResults) -> str:
    head = ["measure", "arm", "n", "mean", "95 % interval", "range"]
    rows = []
    for measure in results.measures:
        for arm in results.arms:
            found = results.result(arm.name, measure.name).summary
            told = [middle_text(measure, found), spread_text(measure, found), range_text(measure, found)]
            rows.append([measure.label, arm.name, f"{found.n} of {len(results.seeds)}", *told])
    return _table(head, rows)


def _rounds(results: StudyResults) -> str:
    by_round = [measure for measure in results.measures if measure.by_round]
    found = [(m, arm.name, results.result(arm.name, m.name).rounds) for m in by_round for arm in results.arms]
    count = max((len(rounds) for *_, rounds in found), default=0)
    if count < 2:
        return ""
    rows = []
    for measure, arm, rounds in found:
        cells = [middle_text(measure, summary) for summary in rounds]
        ranges = [range_text(measure, summary) for summary in rounds]
        told = [
            cell if cell.endswith(range_) else f"{cell} ({range_})" for cell, range_ in zip(cells, ranges, strict=True)
        ]
        rows.append([measure.label, arm, *told, *[ABSENT] * (count - len(told))])
    return _table(["measure", "arm", *(f"round {number}" for number in range(count))], rows)


def _comparisons(results: StudyResults) -> str:
    measures = {measure.name: measure for measure in results.measures}
    head = ["measure", "arm", "difference", "95 % interval", "seeds", "p", f"Holm's p of {results.family}"]
    rows = [
        [measures[found.measure].label, found.arm, *comparison_cells(measures[found.measure], found.comparison)]
        for found in results.comparisons
    ]
    return _table(head, rows)


def _trends(results: StudyResults) -> str:
    head = ["measure", "arm", "last - first", "95 % interval", "seeds", "tau", "p"]
    rows = [
        [measure.label, arm.name, *trend_cells(measure, found)]
        for measure in results.measures
        for arm in results.arms
        if (found := results.result(arm.name, measure.name).trend) is not None and found.n
    ]
    return _table(head, rows) if rows else ""


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    first = [_escaped(cell) for cell in head]
    lines = [first, ["---"] * len(first), *([_escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
