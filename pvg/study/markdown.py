"""The tables of a study as Markdown, for documents and papers."""

from __future__ import annotations

from collections.abc import Iterable

from pvg.study.results import StudyResults
from pvg.study.words import cautions, comparison_cells, counted, middle_text, range_text, spread_text, trend_cells


def markdown_text(results: StudyResults) -> str:
    """Means, comparisons, trends, cautions, and where they come from."""
    parts = [f"## {results.name}"]
    if results.about:
        parts.append(_escaped(results.about))
    parts += ["### Measures after the last round", _means(results)]
    if results.comparisons:
        parts += [f"### Against {results.reference}, paired by seed", _comparisons(results)]
    if trends := _trends(results):
        parts += ["### Over the rounds", trends]
    if told := cautions(results):
        parts.append("\n".join(f"- {_escaped(sentence)}" for sentence in told))
    parts.append(
        f"`{results.command}`, seeds {', '.join(map(str, results.seeds))}, pvg {results.pvg}, {results.cpu}, "
        f"{counted(results.threads, 'thread')} each, {results.created}."
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
