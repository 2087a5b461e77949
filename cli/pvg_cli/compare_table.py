"""The table of `pvg compare`, for the terminal and as Markdown. Verdicts are headings; the most important comes first.

Each verdict is a word, so the table can be read without colours. It fits in 80 columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from pvg.bench.compare import (
    CONFIDENCE,
    LEAST_SAMPLES,
    VERDICTS,
    FieldDifference,
    MetricComparison,
    RatioInterval,
    ReportComparison,
    ReportSide,
    word,
)
from pvg.reporting.formats import peak_memory_texts
from pvg.reporting.table import Column, Table, TableCell, markdown_lines
from pvg.reporting.terminal import HEADING, QUIET
from pvg_cli.bench_tables import number

MARKS = {"worse": ("✗", "red"), "better": ("✓", "green"), "too few samples": ("?", "yellow")}
UNMARKED = ("·", "")
SECTION_STYLES = {"worse": "badge bad", "better": "badge good", "too few samples": "badge warn"}
MOST_DIFFERENCES = 12  # differences of environment or settings that the terminal shows
MOST_CHARACTERS = 44  # characters per value
CODE = ("pvg", "git_commit", "git_dirty")  # the fields of the environment that describe the code


# --- the terminal ----------------------------------------------------------------------------------------------------


def comparison_text(comparison: ReportComparison) -> Group:
    parts: list[RenderableType] = [_headline(comparison), _side("A", comparison.a), _side("B", comparison.b)]
    if comparison.same:
        parts.append(Text("A and B are the same report, so nothing differs and every ratio is 1.", style="yellow"))
    parts += _differing("The code differs", [each for each in comparison.environment if each.key in CODE], HEADING)
    parts += _differing("The environments differ", _elsewhere(comparison), "yellow")
    parts += _differing("The settings differ", comparison.settings, HEADING)
    parts += [Text(), verdict_table(comparison), Text(), Text(_method(comparison), style=QUIET)]
    parts += [Text(note) for note in notes(comparison)]
    return Group(*parts)


def _headline(comparison: ReportComparison) -> Text:
    text = Text.assemble((comparison.name, "bold"), "  ")
    for place, verdict in enumerate(VERDICTS):
        count = len(comparison.with_verdict(verdict))
        if count or verdict in ("worse", "better"):
            mark, style = MARKS.get(verdict, UNMARKED)
            text.append("   " if place else "")
            text.append(f"{mark} {count} {verdict}", style=style if count else QUIET)
    return text


def _side(letter: str, side: ReportSide) -> Text:
    return Text.assemble((letter, "bold"), f"  {side.path}", (f"  {_day(side)}, {side.code}", QUIET), overflow="fold")


def _day(side: ReportSide) -> str:
    return side.created[:16].replace("T", " ")


def _differing(title: str, found: Sequence[FieldDifference], style: str) -> list[RenderableType]:
    if not found:
        return []
    table = Table([Column(wrap=False), Column()], narrow=True)
    for difference in found[:MOST_DIFFERENCES]:
        table.add(f"  {difference.key}", f"{_short(difference.a)} -> {_short(difference.b)}")
    if len(found) > MOST_DIFFERENCES:
        table.add(f"  and {len(found) - MOST_DIFFERENCES} more", TableCell("--json has all of them", "quiet"))
    return [Text(), Text.assemble((title, style), (" (A -> B)", QUIET)), table]


def _short(value: object) -> str:
    text = word(value)
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"


NUMBERS = (
    Column("A", "right", wrap=False),
    Column("B", "right", wrap=False),
    Column("unit", style="quiet", wrap=False),
    Column("B/A", "right", "strong", wrap=False),
    Column("interval", wrap=False),
    Column("p", "right", wrap=False),
)


def verdict_table(comparison: ReportComparison) -> Table:
    """The metrics by verdict, each verdict below a heading. The names get the width that the numbers leave."""
    table = Table([Column(), *NUMBERS], narrow=True)
    empty = [""] * len(NUMBERS)
    for place, (title, style, metrics) in enumerate(_sections(comparison)):
        if place:
            table.add("", *empty)
        table.add(TableCell(title, style), *empty)
        for metric in metrics:
            table.add(_metric(metric, comparison), *_numbers(metric))
    return table


def _numbers(metric: MetricComparison) -> tuple[str, ...]:
    """The cells of one metric, from the medians to p. The terminal and Markdown show the same."""
    return (
        number(metric.median_a),
        number(metric.median_b),
        "" if metric.unit == "1" else metric.unit,
        _ratio(metric.ratio),
        interval(metric.ratio),
        p_value(metric.p),
    )


def _metric(metric: MetricComparison, comparison: ReportComparison) -> TableCell:
    """The metric and its variant. Only the value of the variant, if all variants are values of one key."""
    name = f"  {metric.name}"
    if not metric.variant:
        return TableCell(name)
    key, _, value = metric.variant.partition("=")
    if key == _one_key(comparison):
        return TableCell(name, note=f"@{value}")
    return TableCell(name, below=f"    {metric.variant}")


def _sections(comparison: ReportComparison) -> Iterator[tuple[str, str, list[MetricComparison]]]:
    """(heading, style, metrics). Metrics that fail the check come first, under a separate heading."""
    failing = list(comparison.failing)
    if failing:
        assert comparison.fail_above is not None
        yield f"✗ Worse in B, > {share(comparison.fail_above)} ({len(failing)})", "badge bad", failing
    for verdict in VERDICTS:
        metrics = [metric for metric in comparison.with_verdict(verdict) if not metric.beyond]
        if metrics:
            mark, _ = MARKS.get(verdict, UNMARKED)
            title = f"{verdict.capitalize()} in B" if verdict in ("worse", "better") else verdict.capitalize()
            yield f"{mark} {title} ({len(metrics)})", SECTION_STYLES.get(verdict, "strong"), metrics


# --- text for the terminal and for Markdown --------------------------------------------------------------------------


def share(value: float) -> str:
    return f"{100 * value:.3g} %"


def p_value(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def interval(ratio: RatioInterval | None) -> str:
    return "no ratio" if ratio is None else f"{_bound(ratio.low)}–{_bound(ratio.high)}"


def _ratio(ratio: RatioInterval | None) -> str:
    return "" if ratio is None else _bound(ratio.ratio)


def _bound(value: float) -> str:
    if math.isinf(value) or value >= 1e6:
        return "∞" if math.isinf(value) else f"{value:.0e}"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _method(comparison: ReportComparison) -> str:
    return (
        "A, B: medians. B/A: their ratio; whether lower or higher is better depends on the metric. Interval: "
        f"bootstrap, {CONFIDENCE:.0%} for all {comparison.tested} together ({comparison.confidence:.4g} each). "
        "p: Mann-Whitney rank test, not adjusted."
    )


def notes(comparison: ReportComparison) -> list[str]:
    """Sentences that a reader needs to interpret this comparison."""
    key = _one_key(comparison)
    found = [f"@: the value of {key}."] if key else []
    of_a, of_b = ({name: pair[side] for name, pair in comparison.peak_memory.items()} for side in (0, 1))
    for (what, one), (_, other) in zip(peak_memory_texts(of_a), peak_memory_texts(of_b), strict=True):
        found.append(f"The {what} over the whole call: {one} in A, {other} in B (one value each, so no verdict).")
    if comparison.left_out:
        found.append(f"Left out: {'; '.join(comparison.left_out)}.")
    if any(metric.ratio is None for metric in comparison.metrics):
        found.append(
            "Metrics with a sample of 0 or less have no ratio. The rank test decides, and no threshold applies."
        )
    if comparison.with_verdict("too few samples"):
        found.append(
            f"Too few samples: fewer than {LEAST_SAMPLES} on a side, or fewer than the rank test needs for this many "
            "metrics. Take more samples: pvg bench -s repeats=10."
        )
    if comparison.with_verdict("worse") or comparison.with_verdict("better"):
        if _elsewhere(comparison):
            found.append("The environments differ, so the code need not be the reason for a difference.")
        found.append(
            "The intervals cover the variation within a run. The speed of a machine also changes between runs: measure "
            "A and B again before you rely on a small difference."
        )
    return found


def _elsewhere(comparison: ReportComparison) -> list[FieldDifference]:
    """The differences of the machine and the packages."""
    return [each for each in comparison.environment if each.key not in CODE]


def _one_key(comparison: ReportComparison) -> str | None:
    """The setting that all variants are values of, as in a sweep; None otherwise."""
    keys = {metric.variant.partition("=")[0] if "=" in metric.variant else "" for metric in comparison.metrics}
    return (keys.pop() or None) if len(keys) == 1 else None


def failure_line(comparison: ReportComparison) -> str:
    """The message of a failed check; empty if the check passes."""
    if not comparison.failing:
        return ""
    assert comparison.fail_above is not None
    names = ", ".join(f"{metric.name} {metric.variant}".strip() for metric in comparison.failing)
    return f"Worse by more than {share(comparison.fail_above)}, with the whole interval: {names}."


# --- Markdown --------------------------------------------------------------------------------------------------------


def markdown_text(comparison: ReportComparison) -> str:
    """The whole comparison as a Markdown document."""
    lines = [f"# pvg compare: {comparison.name}", ""]
    for letter, side in (("A", comparison.a), ("B", comparison.b)):
        lines.append(f"- {letter}: `{side.path}`, {_day(side)}, {side.code}, `{side.command}`")
    if comparison.same:
        lines += ["", "A and B are the same report, so nothing differs and every ratio is 1."]
    for title, found in (("environments", comparison.environment), ("settings", comparison.settings)):
        if found:
            lines += ["", f"The {title} differ:", ""]
            rows = [(each.key, _short(each.a), _short(each.b)) for each in found]
            lines += markdown_lines(("key", "A", "B"), "lll", rows)
    if comparison.failing:
        lines += ["", f"**{failure_line(comparison)}**"]
    lines += ["", _all_metrics(comparison).to_markdown(), "", _method(comparison)]
    lines += ["", *(f"- {note}" for note in notes(comparison) if not note.startswith("@"))]
    return "\n".join(lines) + "\n"


def _all_metrics(comparison: ReportComparison) -> Table:
    variants = any(metric.variant for metric in comparison.metrics)
    table = Table([Column("verdict"), Column("metric"), *([Column("variant")] if variants else []), *NUMBERS])
    for metric in comparison.metrics:
        verdict = f"**{metric.verdict}**" if metric.verdict in ("worse", "better") else metric.verdict
        table.add(verdict, metric.name, *([metric.variant] if variants else []), *_numbers(metric))
    return table
