"""What `pvg bench` prints: its profiles, the samples of one variant, and the tables over several."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cli.bench_sync import has_updates, update_tables
from cli.output import quiet_table
from pvg.bench.compare import VariantGain, gains, headline_of
from pvg.bench.profile import Profile
from pvg.bench.report import BenchReport, Samples, Variant
from pvg.bench.runner import WALL
from pvg.bench.statistics import RatioInterval, median
from pvg.reporting.formats import duration, sparkline
from pvg.reporting.terminal import HEADING, QUIET, VERIFIER, BudgetBar, section

BETTER = {"lower": "↓", "higher": "↑"}
SAMPLE_BARS = 7
GAIN_BAR = 5  # cells


def profiles_table(profiles: Mapping[str, Profile]) -> Group:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, profile in profiles.items():
        table.add_row(name, profile.about)
    hint = Text.assemble(("Run one with: ", QUIET), ("pvg bench --profile NAME", "bold cyan"))
    return Group(table, Text(), hint)


def report_text(report: BenchReport, path: Path, commands: Mapping[str, str]) -> Group:
    """Everything that stands at the end: the figures, the budget, where the report lies, and what to type next."""
    parts: list[RenderableType] = [headline_text(report)]
    if has_updates(report):
        parts += update_tables(report)
    if report.kind == "bench":
        parts += one_variant(report.variants[0])
    else:
        title = "What each switch bought" if report.kind == "ablation" else "The values"
        table = ladder_table(report) if report.kind == "ablation" else sweep_table(report)
        parts += section(title, table)
        parts += failures(report)
    parts += [Text(), Text.assemble(("Written to ", QUIET), str(path), (". Next:", QUIET), overflow="fold")]
    for command, what in commands.items():  # on two lines: with the paths of two reports a command is long
        parts.append(Text.assemble("  ", (command, "bold cyan"), (f"\n      {what}", QUIET), overflow="fold"))
    return Group(*parts)


def headline_text(report: BenchReport) -> Text:
    seconds = sum(variant.budget.wall_s for variant in report.variants if variant.budget is not None)
    variants = "" if report.kind == "bench" else f"  {len(report.variants)} variants"
    interleaved = "  samples taken in turn" if report.config.get("interleave") else ""
    return Text.assemble(
        (report.name, "bold"),
        (f"  {report.kind}{variants}  {report.warmup} + {report.repeats} samples{interleaved}", QUIET),
        (f"  {duration(seconds)} measured  " if seconds else "  ", QUIET),
        (report.status, "green" if report.status == "ok" else "red"),
    )


def one_variant(variant: Variant) -> list[RenderableType]:
    if variant.status == "failed":
        return [Text(), Text(f"Failed, and measured nothing: {variant.reason}", style="red")]
    parts = section("Measured", samples_table(variant))
    assert variant.budget is not None
    each = variant.budget.wall_s / variant.budget.steps
    parts += section("Time budget", BudgetBar(variant.budget.exposed, f"{duration(each)} per sample"))
    if variant.derived:
        parts += section("Derived", derived_table(variant.derived))
    return parts


def samples_table(variant: Variant) -> Table:
    table = quiet_table()
    table.add_column("measure", no_wrap=True)
    table.add_column("median", justify="right", style="bold", no_wrap=True)
    table.add_column("lowest .. highest", justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    table.add_column("", style=QUIET, no_wrap=True)
    table.add_column("samples", style=VERIFIER, no_wrap=True)
    for name, samples in variant.samples.items():
        table.add_row(
            name,
            number(median(samples.values)),
            reach(min(samples.values), max(samples.values)),
            "" if samples.unit == "1" else samples.unit,
            BETTER[samples.better],
            sparkline(samples.values, SAMPLE_BARS),
        )
    return table


def derived_table(derived: Mapping[str, float]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", style="bold")
    for name, value in derived.items():
        table.add_row(name, number(value))
    return table


def sweep_table(report: BenchReport) -> Table:
    """One line for each value; beside the headline measure the wall time, unless that is the headline."""
    headline = headline_of(report)
    measured = next((variant.samples for variant in report.variants if variant.samples), {})
    others = [name for name in (WALL,) if name != headline and name in measured]
    table = quiet_table()
    table.add_column(report.variants[0].label.partition("=")[0], overflow="fold")
    table.add_column(_heading(headline, measured), justify="right", style="bold", no_wrap=True)
    table.add_column("lowest .. highest", justify="right", no_wrap=True)
    table.add_column("against the first", no_wrap=True)
    for name in others:
        table.add_column(_heading(name, measured), justify="right", no_wrap=True)
    for gain in gains(report):
        value = gain.variant.label.partition("=")[2]
        samples = gain.variant.samples
        if not samples:
            table.add_row(value, Text("failed", style="red"))
            continue
        table.add_row(
            value,
            number(median(samples[headline].values)),
            reach(min(samples[headline].values), max(samples[headline].values)),
            times(gain.whole),
            *(number(median(samples[name].values)) for name in others),
        )
    return table


def ladder_table(report: BenchReport) -> Table:
    headline, rungs = headline_of(report), gains(report)
    measured = next((variant.samples for variant in report.variants if variant.samples), {})
    table = quiet_table()
    table.add_column("switched to fast, one by one", overflow="fold", min_width=27)
    table.add_column(_heading(headline, measured), justify="right", style="bold", no_wrap=True)
    table.add_column("bought", no_wrap=True)
    table.add_column("in all", no_wrap=True)
    table.add_column("", no_wrap=True, style=VERIFIER)
    top = max((gain.whole.ratio for gain in rungs if gain.whole is not None), default=1.0)
    for gain in rungs:
        label = Text.assemble(gain.variant.label, (f"\n{gain.says}" if gain.says else "", QUIET))
        if not gain.variant.samples:
            table.add_row(label, Text("failed", style="red"))
            continue
        value = number(median(gain.variant.samples[headline].values))
        table.add_row(label, value, times(gain.step), _ratio(gain.whole), _bar(gain, top))
    return table


def failures(report: BenchReport) -> list[RenderableType]:
    failed = [variant for variant in report.variants if variant.status == "failed"]
    if not failed:
        return []
    lines = Text("\n").join(Text.assemble((f"{variant.label}  ", HEADING), variant.reason) for variant in failed)
    return [Text(), Text("Failed", style="red"), Padding(lines, (0, 0, 0, 2))]


def times(interval: RatioInterval | None) -> Text:
    """`1.42x  1.38 .. 1.47`: green or red where the interval excludes 1."""
    if interval is None:
        return Text("")
    colour = "green" if interval.low > 1 else "red" if interval.high < 1 else QUIET
    return Text.assemble((f"{interval.ratio:.2f}x", colour), (f"  {interval.low:.2f} .. {interval.high:.2f}", QUIET))


def _ratio(interval: RatioInterval | None) -> Text:
    return Text("" if interval is None else f"{interval.ratio:.2f}x")


def _bar(gain: VariantGain, top: float) -> str:
    ratio = 1.0 if gain.whole is None else gain.whole.ratio
    return "━" * max(1, round(GAIN_BAR * ratio / max(top, 1.0)))


def _heading(name: str, measured: Mapping[str, Samples]) -> str:
    unit = measured[name].unit if name in measured else ""
    return name if unit in ("", "1") or name.endswith(f"_{unit}") else f"{name}\n{unit}"


def reach(low: float, high: float) -> str:
    return number(low) if low == high else f"{number(low)} .. {number(high)}"


def number(value: float) -> str:
    """Four significant digits, three below 1, thousands apart: 0.0123, 12.34, 12,345."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1 else f"{value:.3g}"
