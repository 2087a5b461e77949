"""The tables of `pvg bench`: the profiles, the samples of one variant, several variants, and weight updates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from pvg.bench.compare import RatioInterval, VariantGain, beside_text, gains, headline_of, median
from pvg.bench.report import BenchReport, Samples, Variant
from pvg.bench.workloads import WALL
from pvg.errors import counted
from pvg.reporting.formats import duration, sample_seconds, sparkline
from pvg.reporting.table import Column, Table, TableCell
from pvg.reporting.terminal import HEADING, QUIET, BudgetBar, section

FAILED = TableCell("failed", "badge bad")
BETTER = {"lower": "↓", "higher": "↑"}
SAMPLE_BARS = 7
GAIN_BAR = 5  # cells


def report_text(report: BenchReport, path: Path, commands: Mapping[str, str]) -> Group:
    """The result of a benchmark: numbers, time budget, the path of the report, and the next commands."""
    parts: list[RenderableType] = [headline_text(report)]
    if report.kind == "bench":
        parts += one_variant(report.variants[0])
    else:
        title = "Gain of each switch" if report.kind == "ablation" else "Values"
        table = ladder_table(report) if report.kind == "ablation" else sweep_table(report)
        parts += section(title, table)
        parts += failures(report)
    parts += [Text(), Text.assemble(("Written to ", QUIET), str(path), (". Next:", QUIET), overflow="fold")]
    for command, what in commands.items():  # on two lines, because two paths make a command long
        parts.append(Text.assemble("  ", (command, "bold cyan"), (f"\n      {what}", QUIET), overflow="fold"))
    return Group(*parts)


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
    each = variant.budget.wall_s / variant.budget.steps
    parts += section("Time budget", BudgetBar(variant.budget.exposed, f"{sample_seconds(each)} per sample"))
    if variant.derived:
        parts += section("Derived", derived_table(variant.derived))
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
        table.add(
            name,
            number(median(samples.values)),
            reach(min(samples.values), max(samples.values)),
            "" if samples.unit == "1" else samples.unit,
            BETTER[samples.better],
            sparkline(samples.values, SAMPLE_BARS),
        )
    return table


def derived_table(derived: Mapping[str, float]) -> Table:
    columns = [Column(), Column("", "right", "strong")]
    return Table(columns, [(name, number(value)) for name, value in derived.items()], narrow=True)


def sweep_table(report: BenchReport) -> Table:
    """A row per value: the main measure, and the wall time if that is not the main measure."""
    headline = headline_of(report)
    measured = next((variant.samples for variant in report.variants if variant.samples), {})
    others = [name for name in (WALL,) if name != headline and name in measured]
    measures = [Column(_heading(name, measured), "right", wrap=False) for name in others]
    value = Column(report.variants[0].label.partition("=")[0])
    main = Column(_heading(headline, measured), "right", "strong", wrap=False)
    reached = Column("lowest .. highest", "right", wrap=False)
    table = Table([value, main, reached, Column("vs. the first", wrap=False), *measures])
    for gain in gains(report):
        label, samples = gain.variant.label.partition("=")[2], gain.variant.samples
        if not samples:
            table.add(label, FAILED, *[""] * (len(table.columns) - 2))
            continue
        table.add(
            label,
            number(median(samples[headline].values)),
            reach(min(samples[headline].values), max(samples[headline].values)),
            times(gain.whole),
            *(number(median(samples[name].values)) for name in others),
        )
    return table


def ladder_table(report: BenchReport) -> Table:
    headline, rungs = headline_of(report), gains(report)
    measured = next((variant.samples for variant in report.variants if variant.samples), {})
    table = Table(
        [
            Column("turned on, one by one"),
            Column(_heading(headline, measured), "right", "strong", wrap=False),
            Column("gain", wrap=False),
            Column("total", wrap=False),
            Column(style="verifier", wrap=False),
        ]
    )
    top = max((gain.whole.ratio for gain in rungs if gain.whole is not None), default=1.0)
    for gain in rungs:
        label = TableCell(gain.variant.label, below=gain.says)
        if not gain.variant.samples:
            table.add(label, FAILED, "", "", "")
            continue
        value = number(median(gain.variant.samples[headline].values))
        table.add(label, value, times(gain.step), _ratio(gain.whole), _bar(gain, top))
    return table


def failures(report: BenchReport) -> list[RenderableType]:
    failed = [variant for variant in report.variants if variant.status == "failed"]
    if not failed:
        return []
    lines = Text("\n").join(Text.assemble((f"{variant.label}  ", HEADING), variant.reason) for variant in failed)
    return [Text(), Text("Failed", style="red"), Padding(lines, (0, 0, 0, 2))]


def times(interval: RatioInterval | None) -> TableCell:
    """`1.42x  1.38 .. 1.47`, green or red if the interval excludes 1."""
    if interval is None:
        return TableCell()
    style = "better" if interval.low > 1 else "badge bad" if interval.high < 1 else "quiet"
    return TableCell(f"{interval.ratio:.2f}x", style, note=f" {interval.low:.2f} .. {interval.high:.2f}")


def _ratio(interval: RatioInterval | None) -> str:
    return "" if interval is None else f"{interval.ratio:.2f}x"


def _bar(gain: VariantGain, top: float) -> str:
    ratio = 1.0 if gain.whole is None else gain.whole.ratio
    return "━" * max(1, round(GAIN_BAR * ratio / max(top, 1.0)))


def _heading(name: str, measured: Mapping[str, Samples]) -> str:
    unit = measured[name].unit if name in measured else ""
    return name if unit in ("", "1") or name.endswith(f"_{unit}") else f"{name}\n{unit}"


def reach(low: float, high: float) -> str:
    return number(low) if low == high else f"{number(low)} .. {number(high)}"


def number(value: float) -> str:
    """Four significant digits (three below 1), with thousands separators: 0.0123, 12.34, 12,345."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1 else f"{value:.3g}"
