"""The tables of a study as Markdown, for documents and papers.

markdown_text(results)                     # the tables
placed(document, results.name, tables)     # a document with the tables between its marks, the rest as it was
"""

from __future__ import annotations

from collections.abc import Iterable

from pvg.reporting.figures import ABSENT
from pvg.study.results import StudyResults
from pvg.study.words import (
    cautions,
    comparison_cells,
    middle_text,
    range_text,
    spread_text,
    threads_each,
    trend_cells,
)


def marks(name: str) -> tuple[str, str]:
    """What begins and ends the part of a document that the tables of study `name` replace."""
    return f"<!-- study {name} -->", f"<!-- end of study {name} -->"


def placed(document: str, name: str, tables: str) -> str:
    """`document` with `tables` between the marks of study `name`. What holds nothing, or tables of this study alone, is
    replaced as a whole.

    Raises ValueError for any other document without the marks, for a mark without the other, and for marks that are
    there twice or around other marks.
    """
    begin, end = marks(name)
    count = (document.count(begin), document.count(end))
    if count == (0, 0) and (not document.strip() or document.startswith(f"## {name}\n")):
        return tables
    if count == (0, 0):
        raise ValueError(f"it is no table of the study, and has no marks {begin} and {end} for them")
    if count != (1, 1) or document.index(begin) > document.index(end):
        raise ValueError(f"the marks {begin} and {end} are not there once each, in this order")
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
