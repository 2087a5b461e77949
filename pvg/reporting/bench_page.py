"""The page of one or more benchmark reports: samples, the gain of each switch or value, time budgets, machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pvg.bench.compare import RatioInterval, VariantGain, gains, median
from pvg.bench.report import BenchReport, Variant
from pvg.reporting.charts import Mark, StripRow, budget_legend, dot_strips
from pvg.reporting.formats import ABSENT, NumberStyle, compact, duration, total_budget, value_text
from pvg.reporting.run_page import budget_rows, flat_settings, parts_table
from pvg.reporting.table import Column, PageSection, Table, TableCell, chart, elements, page

COLOURS = 6
STYLES: dict[str, NumberStyle] = {"s": "sample_s", "B": "bytes", "share": "share"}
SHOWN_CHARTS = 4  # of samples; more measures are folded


def bench_page(paths: Sequence[Path], reports: Sequence[BenchReport]) -> str:
    """Reports of one profile share their charts of samples. Gains, time and settings follow per report."""
    title, names = ", ".join(dict.fromkeys(report.name for report in reports)), names_of(paths, reports)
    named = list(zip(names, reports, strict=True))
    header = [
        elements.title(title, "benchmark"),
        _reports_table(paths, reports),
        elements.notes([report.reason for report in reports if report.reason]),
    ]
    sections = []
    for profile in dict.fromkeys(report.profile for report in reports):
        body = _strips([(name, report) for name, report in named if report.profile == profile])
        lead = "Each dot is one sample, each bar the median."
        sections.append(PageSection(f"samples-{profile}", f"Samples: {profile}", body, lead))
    for place, (name, report) in enumerate(named):
        body = _gains(report) if report.kind != "bench" else []
        lead = (
            f"The factor by which {headline_of(report)} is better than with the first variant, with its 95 % interval."
        )
        sections.append(PageSection(f"gains-{place}", f"{name}: gain of each variant", body, lead))
        lead = "Exposed seconds by part, per sample."
        sections.append(PageSection(f"time-{place}", f"{name}: time", _budgets(report), lead))
    lead = "Coloured where the reports differ." if len(reports) > 1 else ""
    sections.append(PageSection("environment", "Environment", [_environments(named)], lead))
    sections.append(PageSection("work", "Work and settings", [part for of in named for part in _work(*of)]))
    return page(f"{title}: pvg report", header, sections)


def names_of(paths: Sequence[Path], reports: Sequence[BenchReport]) -> list[str]:
    """The shortest unique names of the reports: profile names, file names, or whole paths."""
    candidates = ([report.name for report in reports], [path.stem for path in paths], [str(path) for path in paths])
    return next((names for names in candidates if len(set(names)) == len(names)), candidates[-1])


def style_of(unit: str) -> NumberStyle:
    return STYLES.get(unit, "number")


def headline_of(report: BenchReport) -> str:
    """The headline of the report's profile. A report without a profile: its first measure."""
    profile = report.config.get("profile")
    named = profile.get("headline") if isinstance(profile, dict) else None
    return str(named or next((name for variant in report.variants for name in variant.samples), "wall_s"))


def _reports_table(paths: Sequence[Path], reports: Sequence[BenchReport]) -> Table:
    titles = ("report", "", "samples", "measured", "created", "commit", "file")
    table = Table([Column(title) for title in titles], look="runs")
    for path, report in zip(paths, reports, strict=True):
        seconds = sum(variant.budget.wall_s for variant in report.variants if variant.budget is not None)
        table.add(
            TableCell(report.name, "strong"),
            TableCell(report.status, "badge good" if report.status == "ok" else "badge bad"),
            f"{report.warmup} + {report.repeats}",
            duration(seconds),
            report.created.replace("T", " ")[:16],
            (report.environment.git_commit or ABSENT)[:10] + (" with changes" if report.environment.git_dirty else ""),
            TableCell(str(path), "code"),
        )
    return table


def _strips(reports: Sequence[tuple[str, BenchReport]]) -> list[object]:
    """One chart per measure, the headline first. All variants of a report have the same colour."""
    rows: dict[str, list[tuple[str, Sequence[float], str]]] = {}
    units: dict[str, tuple[str, str]] = {}
    for colour, (name, report) in enumerate(reports):
        for variant in report.variants:
            label = f"{name}: {variant.label}" if variant.label else name
            for measure, samples in variant.samples.items():
                rows.setdefault(measure, []).append((label, samples.values, f"run-{colour % COLOURS}"))
                units[measure] = (samples.unit, samples.better)
    headlines = {headline_of(report) for _, report in reports}
    charts = [
        dot_strips(measure.replace("_", " "), rows[measure], style_of(unit), unit=f"{unit}, {better} is better")
        for measure, (unit, better) in sorted(units.items(), key=lambda pair: pair[0] not in headlines)
    ]
    more = elements.details("More measures", charts[SHOWN_CHARTS:])
    return [*charts[:SHOWN_CHARTS], more] if charts else [elements.empty("Nothing was measured.")]


# --- ladder and sweep --------------------------------------------------------------------------------------------


def _gains(report: BenchReport) -> list[object]:
    if not isinstance(report.config.get("profile"), dict):
        return [elements.empty("The report does not name its profile.")]
    found, headline = gains(report), headline_of(report)
    titles = (headline.replace("_", " "), "against the one before", "against the first")
    table = Table([Column("variant"), *(Column(title, "right") for title in titles), Column()], look="gains")
    for gain in found:
        samples = gain.variant.samples.get(headline)
        value = value_text(style_of(samples.unit), median(samples.values)) if samples else ABSENT
        failed = gain.variant.status == "failed"
        said = TableCell("failed", "badge bad", gain.variant.reason) if failed else TableCell(gain.says)
        table.add(gain.variant.label or "the first", value, _ratio(gain.step), _ratio(gain.whole), said)
    return [chart.strips(_ladder(found)), table]


def _ratio(interval: RatioInterval | None) -> TableCell:
    if interval is None:
        return TableCell(ABSENT)
    sure = "better" if interval.low > 1 else "worse" if interval.high < 1 else ""
    return TableCell(f"{interval.ratio:.3g}×", sure, f"{interval.low:.3g} to {interval.high:.3g}")


def _ladder(found: Sequence[VariantGain]) -> list[StripRow]:
    """How many times better each variant is than the first, with the interval as a line."""
    ratios = [(gain, gain.whole) for gain in found if gain.whole is not None]
    most = max((interval.high for _, interval in ratios), default=1.0)
    rows = []
    for gain, interval in ratios:
        hint = f"{interval.ratio:.3g} times as good, {interval.low:.3g} to {interval.high:.3g}"
        bar = Mark("bar light", "run-0", 0.0, interval.ratio / most, hint)
        whisker = Mark("whisker", "run-0", interval.low / most, (interval.high - interval.low) / most, hint)
        marks = [bar, whisker, Mark("reference", "ink", 1 / most)]
        rows.append(StripRow(gain.variant.label or "the first", marks, f"{interval.ratio:.3g}×"))
    return rows


# --- time, environment and settings ------------------------------------------------------------------------------


def _budgets(report: BenchReport) -> list[object]:
    """The budgets of all variants as bars on one scale, then the table of the last variant (a ladder's fastest)."""
    timed = [(variant, variant.budget) for variant in report.variants if variant.budget and variant.budget.steps]
    if not timed:
        return [elements.empty("No variant finished, so there is no time budget.")]
    each = {v.label or report.name: {part: s / b.steps for part, s in b.exposed.items()} for v, b in timed}
    (last, measured), budget = timed[-1], each[timed[-1][0].label or report.name]
    busy = {part: seconds / measured.steps for part, seconds in measured.busy.items()}
    return [
        budget_legend(list(total_budget(each.values()))),
        budget_rows({label: (found, "") for label, found in each.items()}),
        elements.subheading(last.label) if len(timed) > 1 else None,
        parts_table(budget, busy, budget),
        _derived([variant for variant, _ in timed]),
    ]


def _derived(variants: Sequence[Variant]) -> Table:
    table = Table([Column("derived figure"), *(Column(variant.label or "value", "right") for variant in variants)])
    for name in dict.fromkeys(name for variant in variants for name in variant.derived):
        values = [variant.derived.get(name) for variant in variants]
        written = (ABSENT if v is None else compact(v) if abs(v) >= 1000 else f"{v:.4g}" for v in values)
        table.add(name.replace("_", " "), *written)
    return table


def _environments(named: Sequence[tuple[str, BenchReport]]) -> Table:
    plains = [report.environment.model_dump() for _, report in named]
    table = Table([Column(title) for title in ("", *(name for name, _ in named))])
    for key in plains[0]:
        values = ["" if plain[key] is None else str(plain[key]) for plain in plains]
        if any(values):
            table.add(key.replace("_", " "), *(TableCell(v, "worse" if len(set(values)) > 1 else "") for v in values))
    return table


def _work(name: str, report: BenchReport) -> list[object]:
    settings = _code_table("setting", flat_settings(report.config))
    return [
        elements.subheading(name),
        elements.commands([(report.command, "")]),
        _code_table("work of every sample", flat_settings(report.work)),
        elements.details("All settings", [settings]),
    ]


def _code_table(title: str, values: Mapping[str, str]) -> Table:
    rows = [(TableCell(key, "code"), TableCell(value, "code")) for key, value in values.items()]
    return Table([Column(title), Column()], list(rows), look="settings")
