"""What `pvg compare` shows, on the terminal and as Markdown: the same tables. The most important metrics come first.

Each verdict is a word, so the table can be read without colours. It fits in 80 columns.
"""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.text import Text

from pvg.bench.compare import (
    CONFIDENCE,
    LEAST_SAMPLES,
    VERDICTS,
    MetricComparison,
    RatioInterval,
    ReportComparison,
    ReportSide,
    word,
)
from pvg.errors import shortened
from pvg.reporting.formats import peak_memory_texts
from pvg.reporting.table import Column, Table, TableCell
from pvg.reporting.terminal import QUIET, section
from pvg_cli.bench_tables import number

STYLES = {"worse": "badge bad", "better": "badge good", "too few samples": "badge warn", "no difference seen": ""}
MOST_CHARACTERS = 44  # per value
MARKDOWN_MARK = b"# pvg compare:"  # how the Markdown begins
CODE = ("pvg", "git_commit", "git_dirty")  # the fields of the environment that describe the code


def comparison_text(comparison: ReportComparison) -> Group:
    """The whole comparison for the terminal."""
    parts: list[RenderableType] = [Text.assemble((comparison.name, "bold"), f"  {_counts(comparison)}")]
    parts += [Text(f"{letter}  {_side(side)}", overflow="fold") for letter, side in _sides(comparison)]
    for title, table in _differences(comparison).items():
        parts += section(title, table)
    parts += [Text(), metrics_table(comparison), Text(), Text(_method(comparison), style=QUIET)]
    return Group(*parts, *map(Text, notes(comparison)))


def markdown_text(comparison: ReportComparison) -> str:
    """The whole comparison as a Markdown document."""
    lines = [f"{MARKDOWN_MARK.decode()} {comparison.name}", ""]
    lines += [f"- {letter}: {_side(side)}, `{side.command}`" for letter, side in _sides(comparison)]
    for title, table in _differences(comparison).items():
        lines += ["", f"{title}:", "", table.to_markdown()]
    lines += ["", metrics_table(comparison).to_markdown(), "", _method(comparison), ""]
    return "\n".join([*lines, *(f"- {note}" for note in notes(comparison))]) + "\n"


def _sides(comparison: ReportComparison) -> tuple[tuple[str, ReportSide], ...]:
    return ("A", comparison.a), ("B", comparison.b)


def _side(side: ReportSide) -> str:
    return f"{side.path}, {side.created[:16].replace('T', ' ')}, {side.code}"


def _counts(comparison: ReportComparison) -> str:
    found = {verdict: len(comparison.with_verdict(verdict)) for verdict in VERDICTS}
    return ", ".join(f"{count} {verdict}" for verdict, count in found.items() if count)


def _differences(comparison: ReportComparison) -> dict[str, Table]:
    """Title -> the differences of the machines and packages, and of the settings; without empty tables."""
    found = {"The environments differ": comparison.environment, "The settings differ": comparison.settings}
    columns = [Column("key", wrap=False), Column("A"), Column("B")]
    return {
        title: Table(columns, [(each.key, _short(each.a), _short(each.b)) for each in differences], narrow=True)
        for title, differences in found.items()
        if differences
    }


def _short(value: object) -> str:
    return shortened(word(value), MOST_CHARACTERS)


def metrics_table(comparison: ReportComparison) -> Table:
    """All metrics, by verdict."""
    varied = any(metric.variant for metric in comparison.metrics)
    table = Table(
        [
            Column("verdict", once=True, max_width=12),
            Column("metric"),
            *([Column("variant", style="quiet")] if varied else []),
            Column("A", "right", wrap=False),
            Column("B", "right", wrap=False),
            Column("unit", style="quiet", wrap=False),
            Column("B/A", "right", "strong", wrap=False),
            Column("interval", wrap=False),
            Column("p", "right", on="pages"),  # in Markdown only: no room at 80 columns
        ],
        narrow=True,
    )
    for metric in comparison.metrics:
        table.add(
            _verdict(metric, comparison.fail_above),
            metric.name,
            *([metric.variant] if varied else []),
            number(metric.median_a),
            number(metric.median_b),
            "" if metric.unit == "1" else metric.unit,
            "" if metric.ratio is None else _bound(metric.ratio.ratio),
            interval(metric.ratio),
            "<0.001" if metric.p < 0.001 else f"{metric.p:.3f}",
        )
    return table


def _verdict(metric: MetricComparison, fail_above: float | None) -> TableCell:
    """The verdict; of a metric that fails the check, with the threshold."""
    beyond = f", > {share(fail_above)}" if metric.beyond and fail_above is not None else ""
    return TableCell(f"{metric.verdict}{beyond}", STYLES[metric.verdict])


def share(value: float) -> str:
    return f"{100 * value:.3g} %"


def interval(ratio: RatioInterval | None) -> str:
    return "no ratio" if ratio is None else f"{_bound(ratio.low)}–{_bound(ratio.high)}"


def _bound(value: float) -> str:
    if math.isinf(value) or value >= 1e6:
        return "∞" if math.isinf(value) else f"{value:.0e}"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _method(comparison: ReportComparison) -> str:
    return (
        "A, B: medians. B/A: their ratio; whether lower or higher is better depends on the metric. Interval: "
        f"bootstrap, {CONFIDENCE:.0%} for all {comparison.tested} together ({comparison.confidence:.4g} each). "
        "p (Markdown and JSON): Mann-Whitney rank test, not adjusted."
    )


def notes(comparison: ReportComparison) -> list[str]:
    """Sentences that a reader needs to interpret this comparison."""
    found = ["A and B are the same report, so nothing differs and every ratio is 1."] if comparison.same else []
    if comparison.failing:
        found.append(failure_line(comparison))
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
        if any(each.key not in CODE for each in comparison.environment):
            found.append("The environments differ, so the code need not be the reason for a difference.")
        found.append(
            "The intervals cover the variation within a run. The speed of a machine also changes between runs: measure "
            "A and B again before you rely on a small difference."
        )
    return found


def failure_line(comparison: ReportComparison) -> str:
    """The message of a failed check."""
    assert comparison.fail_above is not None
    names = ", ".join(f"{metric.name} {metric.variant}".strip() for metric in comparison.failing)
    return f"Worse by more than {share(comparison.fail_above)}, with the whole interval: {names}."
