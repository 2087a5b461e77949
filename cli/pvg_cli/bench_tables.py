"""The tables of `pvg bench` and of `pvg report` for benchmarks: the samples of one variant, or several variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from pvg.bench.compare import RatioInterval, beside_text, gains, headline_of, median
from pvg.bench.report import BenchReport, Samples, Variant
from pvg.bench.workloads import WALL
from pvg.errors import counted
from pvg.reporting.formats import duration, sparkline
from pvg.reporting.table import Column, Table, TableCell
from pvg.reporting.terminal import QUIET, parts_table, section
from pvg_cli.output import next_commands

BETTER = {"lower": "↓", "higher": "↑"}
SAMPLE_BARS = 7


def report_text(report: BenchReport, path: Path, commands: Mapping[str, str]) -> Group:
    """The result of a benchmark: numbers, time budget, the path of the report, and the next commands."""
    parts: list[RenderableType] = [headline_text(report)]
    if report.kind == "bench":
        parts += one_variant(report.variants[0])
    else:
        parts += section("Gain of each switch" if report.kind == "ablation" else "Values", variants_table(report))
        failed = [variant for variant in report.variants if variant.status == "failed"]
        parts += [Text(f"{variant.label} failed: {variant.reason}", style="red") for variant in failed]
    written = Text.assemble(("Written to ", QUIET), str(path), (". Next:", QUIET), overflow="fold")
    return Group(*parts, Text(), written, *next_commands(commands))


def headline_text(report: BenchReport) -> Text:
    seconds = sum(variant.budget.wall_s for variant in report.variants if variant.budget is not None)
    variants = "" if report.kind == "bench" else f"  {counted(len(report.variants), 'variant')}"
    interleaved = "  samples taken in turn" if report.config.get("interleave") else ""
    beside = f"  {beside_text(report)}" if beside_text(report) else ""
    return Text.assemble(
        (report.name, "bold"),
        (f"  {report.kind}{variants}  {report.warmup} + {report.repeats} samples{interleaved}{beside}", QUIET),
        (f"  {duration(seconds)} measured  " if seconds else "  ", QUIET),
        (report.status, "green" if report.status == "ok" else "red"),
    )


def one_variant(variant: Variant) -> list[RenderableType]:
    if variant.status == "failed":
        return [Text(), Text(f"Failed without a measurement: {variant.reason}", style="red")]
    parts = section("Measured", samples_table(variant))
    assert variant.budget is not None
    each = {part: seconds / variant.budget.steps for part, seconds in variant.budget.exposed.items()}
    parts += section("Time budget of a sample", parts_table(each, {}, {}))
    if variant.derived:
        columns = [Column(), Column("", "right", "strong")]
        rows = [(name, number(value)) for name, value in variant.derived.items()]
        parts += section("Derived", Table(columns, list(rows), narrow=True))
    return parts


def samples_table(variant: Variant) -> Table:
    table = Table(
        [
            Column("measure", wrap=False),
            Column("median", "right", "strong", wrap=False),
            Column("lowest .. highest", "right", wrap=False),
            Column("unit", wrap=False),
            Column(style="quiet", wrap=False),
            Column("samples", style="verifier", wrap=False),
        ]
    )
    for name, samples in variant.samples.items():
        unit = "" if samples.unit == "1" else samples.unit
        curve = sparkline(samples.values, SAMPLE_BARS)
        table.add(name, number(median(samples.values)), reach(samples.values), unit, BETTER[samples.better], curve)
    return table


def variants_table(report: BenchReport) -> Table:
    """A row per variant of an ablation or a sweep: the main measure, and how many times better it is. A sweep also has
    the wall time, if that is not the main measure."""
    ladder, headline = report.kind == "ablation", headline_of(report)
    measured = next((variant.samples for variant in report.variants if variant.samples), {})
    others = [name for name in (WALL,) if not ladder and name != headline and name in measured]
    label = "turned on, one by one" if ladder else report.variants[0].label.partition("=")[0]
    titles = ("gain", "total") if ladder else ("lowest .. highest", "vs. the first")
    table = Table(
        [
            Column(label),
            Column(_heading(headline, measured), "right", "strong", wrap=False),
            *(Column(title, wrap=False) for title in titles),
            *(Column(_heading(name, measured), "right", wrap=False) for name in others),
        ]
    )
    for gain in gains(report):
        name, samples = gain.variant.label, gain.variant.samples
        first = TableCell(name, below=gain.says) if ladder else TableCell(name.partition("=")[2])
        if not samples:
            table.add(first, TableCell("failed", "badge bad"), *[""] * (len(table.columns) - 2))
            continue
        values = samples[headline].values
        compared = [times(gain.step), times(gain.whole)] if ladder else [reach(values), times(gain.whole)]
        table.add(first, number(median(values)), *compared, *(number(median(samples[each].values)) for each in others))
    return table


def times(interval: RatioInterval | None) -> TableCell:
    """`1.42x  1.38 .. 1.47`, green or red if the interval excludes 1."""
    if interval is None:
        return TableCell()
    style = "better" if interval.low > 1 else "badge bad" if interval.high < 1 else "quiet"
    return TableCell(f"{interval.ratio:.2f}x", style, note=f" {interval.low:.2f} .. {interval.high:.2f}")


def _heading(name: str, measured: Mapping[str, Samples]) -> str:
    unit = measured[name].unit if name in measured else ""
    return name if unit in ("", "1") or name.endswith(f"_{unit}") else f"{name}\n{unit}"


def reach(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return number(low) if low == high else f"{number(low)} .. {number(high)}"


def number(value: float) -> str:
    """Four significant digits (three below 1), with thousands separators: 0.0123, 12.34, 12,345."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1 else f"{value:.3g}"
