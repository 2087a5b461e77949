"""The page of one or more benchmark reports: samples, the gain of each switch or value, time budgets, machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from pvg.bench.compare import RatioInterval, VariantGain, gains, median
from pvg.bench.report import BenchReport, Variant
from pvg.reporting.charts import Mark, StripRow, budget_marks, dot_strips
from pvg.reporting.formats import ABSENT, NumberStyle, compact, duration, in_order, total_budget, value_text
from pvg.reporting.run_page import flat_settings
from pvg.reporting.table import Column, PageSection, Table, TableCell, chart, elements, page
from pvg.reporting.time_sections import box_key, parts_table

COLOURS = 6
STYLES: dict[str, NumberStyle] = {"s": "sample_s", "B": "bytes", "share": "share"}
KIND = {"bench": "one way of doing it", "sweep": "a sweep", "ablation": "an ablation"}


def bench_page(paths: Sequence[Path], reports: Sequence[BenchReport]) -> str:
    """Reports of one profile share their charts of samples. Gains, time and environment follow per report."""
    profiles = list(dict.fromkeys(report.profile for report in reports))
    title = ", ".join(dict.fromkeys(report.name for report in reports))
    words = f"{len(reports)} benchmark reports" if len(reports) > 1 else f"benchmark, {KIND[reports[0].kind]}"
    header = [
        elements.title(title, words),
        _reports_table(paths, reports),
        elements.notes([report.reason for report in reports if report.reason]),
    ]
    names = names_of(paths, reports)
    sections: list[PageSection] = []
    for profile in profiles:
        own = [(name, report) for name, report in zip(names, reports, strict=True) if report.profile == profile]
        heading = "Samples" if len(profiles) == 1 else f"Samples: {profile}"
        sections.append(
            PageSection(f"samples-{profile}", heading, _strips(own), "Each dot is one sample, each bar the median.")
        )
    for place, (name, report) in enumerate(zip(names, reports, strict=True)):
        prefix = f"{name}: " if len(reports) > 1 else ""
        if report.kind != "bench":
            heading = "Gain of each switch" if report.kind == "ablation" else "Gain of each value"
            sections.append(PageSection(f"gains-{place}", f"{prefix}{heading}", _gains(report), _gains_lead(report)))
        sections.append(
            PageSection(f"time-{place}", f"{prefix}Time", _budgets(report), "Exposed seconds by part, per sample.")
        )
    sections.append(
        PageSection("environment", "Environment", [_environments(names, reports)], _same_environment(reports))
    )
    work = [piece for name, report in zip(names, reports, strict=True) for piece in _work(name, report)]
    sections.append(PageSection("work", "Work and settings", work))
    return page(f"{title}: pvg report", header, sections)


def names_of(paths: Sequence[Path], reports: Sequence[BenchReport]) -> list[str]:
    """The shortest unique names of the reports: profile names, file names, or whole paths."""
    candidates = [
        [report.name for report in reports],
        [path.stem for path in paths],
        [str(path) for path in paths],
    ]
    return next((names for names in candidates if len(set(names)) == len(names)), candidates[-1])


def _reports_table(paths: Sequence[Path], reports: Sequence[BenchReport]) -> Table:
    titles = ("report", "", "samples", "measured", "created", "commit", "file")
    table = Table([Column(title) for title in titles], look="runs")
    for path, report in zip(paths, reports, strict=True):
        seconds = sum(variant.budget.wall_s for variant in report.variants if variant.budget is not None)
        changed = " with changes" if report.environment.git_dirty else ""
        table.add(
            TableCell(report.name, "strong"),
            TableCell(report.status, "badge good" if report.status == "ok" else "badge bad"),
            f"{report.warmup} + {report.repeats}",
            duration(seconds),
            report.created.replace("T", " ")[:16],
            (report.environment.git_commit or ABSENT)[:10] + changed,
            TableCell(str(path), "code"),
        )
    return table


# --- samples -----------------------------------------------------------------------------------------------------


def _strips(reports: Sequence[tuple[str, BenchReport]]) -> list[object]:
    """One chart per measure, the headline first. All variants of a report have the same colour."""
    rows: dict[str, list[tuple[str, Sequence[float], str]]] = {}
    units: dict[str, tuple[str, str]] = {}
    for colour, (name, report) in enumerate(reports):
        for variant in report.variants:
            label = ": ".join(word for word in (name if len(reports) > 1 else "", variant.label) if word) or report.name
            for measure, samples in variant.samples.items():
                rows.setdefault(measure, []).append((label, samples.values, f"run-{colour % COLOURS}"))
                units.setdefault(measure, (samples.unit, samples.better))
    headlines = {headline_of(report) for _, report in reports}
    order = sorted(rows, key=lambda measure: (measure not in headlines, list(rows).index(measure)))
    charts: list[Markup] = []
    for measure in order:
        unit, better = units[measure]
        written = "" if unit in ("1", "s") else f"{unit}, "
        charts.append(
            dot_strips(measure.replace("_", " "), rows[measure], style_of(unit), unit=f"{written}{better} is better")
        )
    if not charts:
        return [elements.empty("Nothing was measured.")]
    if len(charts) <= 4:
        return list(charts)
    return [charts[0], elements.details(f"{len(charts) - 1} more measures", charts[1:])]


def style_of(unit: str) -> NumberStyle:
    return STYLES.get(unit, "number")


def headline_of(report: BenchReport) -> str:
    """The headline of the report's profile. A report without a profile: its first measure."""
    profile = report.config.get("profile")
    named = profile.get("headline") if isinstance(profile, dict) else None
    measured = [name for variant in report.variants for name in variant.samples]
    return str(named) if named else (measured or ["wall_s"])[0]


# --- ladder and sweep --------------------------------------------------------------------------------------------


def _gains_lead(report: BenchReport) -> str:
    headline = headline_of(report)
    first = report.variants[0].label or "the first"
    if report.kind == "ablation":
        return (
            "All switches slow, then fast one after the other. "
            f"The factor by which {headline} improved, with its 95 % interval."
        )
    return f"The factor by which {headline} is better than with {first}, with its 95 % interval."


def _gains(report: BenchReport) -> list[object]:
    if not isinstance(report.config.get("profile"), dict):
        return [elements.empty("The report does not name its profile.")]
    found = gains(report)
    headline = headline_of(report)
    titles = (headline.replace("_", " "), "against the one before", "against the first")
    table = Table([Column("variant"), *(Column(title, "right") for title in titles), Column()], look="gains")
    for gain in found:
        samples = gain.variant.samples.get(headline)
        value = value_text(style_of(samples.unit), median(samples.values)) if samples else ABSENT
        failed = gain.variant.status == "failed"
        said = TableCell("failed", "badge bad", gain.variant.reason) if failed else TableCell(gain.says)
        table.add(gain.variant.label or "all slow", value, _ratio(gain.step), _ratio(gain.whole), said)
    return [_ladder_chart(report, found), table]


def _ratio(interval: RatioInterval | None) -> TableCell:
    if interval is None:
        return TableCell(ABSENT)
    sure = "better" if interval.low > 1 else "worse" if interval.high < 1 else ""
    return TableCell(f"{interval.ratio:.3g}×", sure, f"{interval.low:.3g} to {interval.high:.3g}")


def _ladder_chart(report: BenchReport, found: Sequence[VariantGain]) -> Markup:
    """How many times better each variant is than the first, with the interval as a line."""
    ratios = [(gain, gain.whole) for gain in found if gain.whole is not None]
    if not ratios:
        return Markup()
    most = max(interval.high for _, interval in ratios)
    rows = []
    for gain, interval in ratios:
        hint = f"{interval.ratio:.3g} times as good, {interval.low:.3g} to {interval.high:.3g}"
        bar = Mark("bar light", "run-0", 0.0, interval.ratio / most, hint)
        whisker = Mark("whisker", "run-0", interval.low / most, (interval.high - interval.low) / most, hint)
        label = gain.variant.label or ("all slow" if report.kind == "ablation" else "the first")
        rows.append(StripRow(label, [bar, whisker, Mark("reference", "ink", 1 / most)], f"{interval.ratio:.3g}×"))
    unit = headline_of(report).replace("_", " ")
    return chart.figure("Improvement over the first variant", chart.strips(rows), unit=unit, look="wide")


# --- time --------------------------------------------------------------------------------------------------------


def _budgets(report: BenchReport) -> list[object]:
    """The budgets of all variants as bars on one scale, then the table of the last variant (a ladder's fastest)."""
    timed = [variant for variant in report.variants if variant.budget is not None and variant.budget.steps]
    if not timed:
        return [elements.empty("No variant finished, so there is no time budget.")]
    each = {variant.label: _per_sample(variant) for variant in timed}
    longest = max(sum(budget.values()) for budget in each.values())
    rows = []
    for label, budget in each.items():
        name, seconds = label or report.name, value_text("seconds", sum(budget.values()))
        rows.append(StripRow(name, budget_marks(budget, longest), seconds))
    keys = chart.legend([box_key(part) for part in in_order(total_budget(each.values()))])
    shown = timed[-1]
    assert shown.budget is not None
    steps = shown.budget.steps
    budget = each[shown.label]
    busy = {part: seconds / steps for part, seconds in shown.budget.busy.items()}
    heading = elements.subheading(shown.label) if len(timed) > 1 else None
    return [keys, chart.strips(rows), heading, parts_table(budget, busy, budget), *_derived(timed)]


def _per_sample(variant: Variant) -> dict[str, float]:
    assert variant.budget is not None
    return total_budget([{part: seconds / variant.budget.steps for part, seconds in variant.budget.exposed.items()}])


def _derived(variants: Sequence[Variant]) -> list[object]:
    names = list(dict.fromkeys(name for variant in variants for name in variant.derived))
    if not names:
        return []
    table = Table([Column(), *(Column(variant.label or "value", "right") for variant in variants)])
    for name in names:
        table.add(name.replace("_", " "), *(_figure(variant.derived.get(name)) for variant in variants))
    return [elements.subheading("Derived figures"), table]


def _figure(value: float | None) -> str:
    return ABSENT if value is None else compact(value) if abs(value) >= 1000 else f"{value:.4g}"


# --- where and what ----------------------------------------------------------------------------------------------


def _environments(names: Sequence[str], reports: Sequence[BenchReport]) -> Markup | Table:
    plains = [report.environment.model_dump() for report in reports]
    if len(reports) == 1:
        pairs = [(key.replace("_", " "), str(value)) for key, value in plains[0].items() if value is not None]
        return elements.facts(pairs)
    table = Table([Column(title) for title in ("", *names)])
    for key in plains[0]:
        values = ["" if plain[key] is None else str(plain[key]) for plain in plains]
        if any(values):
            style = "worse" if len(set(values)) > 1 else ""
            table.add(key.replace("_", " "), *(TableCell(value, style) for value in values))
    return table


def _same_environment(reports: Sequence[BenchReport]) -> str:
    if len(reports) < 2:
        return ""
    same = all(report.environment == reports[0].environment for report in reports)
    return "The same for all reports." if same else "Coloured where the reports differ."


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
