"""The page of one or more benchmark reports: every sample as a dot, what each switch or value bought, where the time
went, and on which machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pvg.bench.compare import Gain, gains
from pvg.bench.report import BenchReport, Variant
from pvg.bench.statistics import RatioInterval, median
from pvg.reporting.axes import SPAN, Key, figure, legend, nice_axis, svg
from pvg.reporting.budget_parts import in_order
from pvg.reporting.charts import dot_strips, stacked_row
from pvg.reporting.formats import ABSENT, Style, compact, duration, styled, total_budget
from pvg.reporting.html import (
    Html,
    Piece,
    Section,
    badge,
    details,
    div,
    document,
    facts,
    join,
    number,
    span,
    subheading,
    table,
    tag,
)
from pvg.reporting.run_page import flat, footer
from pvg.reporting.time_sections import parts_table

COLOURS = 6
STYLES: dict[str, Style] = {"s": "seconds", "B": "bytes", "share": "share"}
KIND = {"bench": "one way of doing it", "sweep": "a sweep", "ablation": "an ablation"}


def bench_page(paths: Sequence[Path], reports: Sequence[BenchReport]) -> str:
    """All reports of one profile are drawn together; each report has its own figures and environment below."""
    profiles = list(dict.fromkeys(report.profile for report in reports))
    title = ", ".join(dict.fromkeys(report.name for report in reports))
    words = f"{len(reports)} benchmark reports" if len(reports) > 1 else f"benchmark, {KIND[reports[0].kind]}"
    header = [tag("h1", title, span("sub", words)), _reports_table(paths, reports)]
    names = names_of(paths, reports)
    sections: list[Section] = []
    for profile in profiles:
        own = [(name, report) for name, report in zip(names, reports, strict=True) if report.profile == profile]
        heading = "Samples" if len(profiles) == 1 else f"Samples: {profile}"
        sections.append(
            Section(f"samples-{profile}", heading, _strips(own), "Each dot is one sample, each bar the median.")
        )
    for place, (name, report) in enumerate(zip(names, reports, strict=True)):
        prefix = f"{name}: " if len(reports) > 1 else ""
        if report.kind != "bench":
            heading = "What each switch bought" if report.kind == "ablation" else "The values"
            sections.append(Section(f"gains-{place}", f"{prefix}{heading}", _gains(report), _gains_lead(report)))
        sections.append(
            Section(f"time-{place}", f"{prefix}Time", _budgets(report), "Exposed seconds by part, per sample.")
        )
    sections.append(Section("environment", "Environment", [_environments(names, reports)], _same_environment(reports)))
    sections.append(
        Section("work", "Work and settings", [_work(name, report) for name, report in zip(names, reports, strict=True)])
    )
    return document(f"{title}: pvg report", header, sections, footer())


def names_of(paths: Sequence[Path], reports: Sequence[BenchReport]) -> list[str]:
    """Short names that tell the reports apart: the profile's, the file's, or the whole path."""
    candidates = [
        [report.name for report in reports],
        [path.stem for path in paths],
        [str(path) for path in paths],
    ]
    return next((names for names in candidates if len(set(names)) == len(names)), candidates[-1])


def _reports_table(paths: Sequence[Path], reports: Sequence[BenchReport]) -> Html:
    rows: list[list[Piece]] = []
    for path, report in zip(paths, reports, strict=True):
        seconds = sum(variant.budget.wall_s for variant in report.variants if variant.budget is not None)
        commit = (report.environment.git_commit or ABSENT)[:10] + (
            " with changes" if report.environment.git_dirty else ""
        )
        rows.append(
            [
                tag("th", tag("strong", report.name)),
                tag("td", badge(report.status, "good" if report.status == "ok" else "bad")),
                f"{report.warmup} + {report.repeats}",
                duration(seconds),
                report.created.replace("T", " ")[:16],
                commit,
                tag("td", tag("code", str(path))),
            ]
        )
    failed = [report.reason for report in reports if report.reason]
    notes = tag("ul", *(tag("li", reason) for reason in failed), class_="notes") if failed else None
    return join([table(["report", "", "samples", "measured", "made", "commit", "file"], rows, "runs"), notes])


# --- samples -----------------------------------------------------------------------------------------------------


def _strips(reports: Sequence[tuple[str, BenchReport]]) -> list[Html | None]:
    """A chart per measure; the headline first. A report's variants have one colour: rows tell them apart."""
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
    charts: list[Html | None] = []
    for measure in order:
        unit, better = units[measure]
        written = "" if unit in ("1", "s") else f"{unit}, "
        charts.append(
            dot_strips(measure.replace("_", " "), rows[measure], style_of(unit), unit=f"{written}{better} is better")
        )
    if not charts:
        charts.append(tag("p", "Nothing was measured.", class_="empty"))
    return [*charts[:1], details(f"{len(charts) - 1} more measures", *charts[1:])] if len(charts) > 4 else charts


def style_of(unit: str) -> Style:
    return STYLES.get(unit, "number")


def headline_of(report: BenchReport) -> str:
    """The measure to look at first: the profile's, or in a report by another hand the first one."""
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
            "All switches slow, then one after the other fast. "
            f"How many times better {headline} became, with the interval at 95 %."
        )
    return f"How many times better {headline} is than with {first}, with the interval at 95 %."


def _gains(report: BenchReport) -> list[Html | None]:
    if not isinstance(report.config.get("profile"), dict):
        return [tag("p", "The report does not say by which profile it was made.", class_="empty")]
    found = gains(report)
    headline = headline_of(report)
    head: list[Piece] = ["variant", headline.replace("_", " "), "against the one before", "against the first", ""]
    rows: list[list[Piece]] = []
    for gain in found:
        samples = gain.variant.samples.get(headline)
        value = styled(style_of(samples.unit), median(samples.values)) if samples else ABSENT
        said: Piece = gain.says
        if gain.variant.status == "failed":
            said = join([badge("failed", "bad"), " ", gain.variant.reason])
        rows.append(
            [
                gain.variant.label or "all slow",
                value,
                _ratio(gain.step),
                _ratio(gain.whole),
                tag("td", said, class_="words"),
            ]
        )
    return [_ladder_chart(report, found), table(head, rows, "figures gains")]


def _ratio(interval: RatioInterval | None) -> Html:
    if interval is None:
        return tag("td", ABSENT)
    sure = "better" if interval.low > 1 else "worse" if interval.high < 1 else None
    return tag(
        "td", f"{interval.ratio:.3g}×", span("quiet", f" {interval.low:.3g} to {interval.high:.3g}"), class_=sure
    )


def _ladder_chart(report: BenchReport, found: Sequence[Gain]) -> Html | None:
    """Bars: times better than the first variant, with whiskers for the interval."""
    ratios = [(gain, gain.whole) for gain in found if gain.whole is not None]
    if not ratios:
        return None
    x = nice_axis([0.0, *(interval.high for _, interval in ratios)], zero=True, most_ticks=6)
    rows = []
    for gain, interval in ratios:
        low, high = x.x(interval.low), x.x(interval.high)
        reach = f"{interval.ratio:.3g} times as good, {interval.low:.3g} to {interval.high:.3g}"
        words = f"{gain.variant.label or 'the first'}: {reach}"
        one = number(x.x(1.0))
        drawing = [
            *(tag("path", d=f"M{number(x.x(tick))} 0V{number(SPAN)}", class_="grid") for tick in x.ticks),
            tag(
                "rect",
                tag("title", words),
                x=0,
                y=180,
                width=x.x(interval.ratio),
                height=640,
                class_="fill run-0 light",
            ),
            tag(
                "path",
                d=f"M{number(low)} 500H{number(high)}M{number(low)} 330V670M{number(high)} 330V670",
                class_="line run-0",
            ),
            tag("path", d=f"M{one} 0V{number(SPAN)}", class_="reference"),
        ]
        label = gain.variant.label or ("all slow" if report.kind == "ablation" else "the first")
        area = div("area", svg(*drawing, label=words))
        rows.append(div("strip", span("strip-name", label), area, span("strip-value", f"{interval.ratio:.3g}×")))
    ticks = div("xs", *(tag("span", label, style=f"left:{number(100 * share)}%") for share, label in x.labels()))
    axis = div("strip", span("strip-name"), ticks, span("strip-value"))
    return figure(
        "Times better than the first",
        div("strips", *rows, axis),
        unit=headline_of(report).replace("_", " "),
        class_="wide",
    )


# --- time --------------------------------------------------------------------------------------------------------


def _budgets(report: BenchReport) -> list[Html | None]:
    """Bars of all variants on one scale, then the table of the only one or of the last (the fastest rung)."""
    timed = [variant for variant in report.variants if variant.budget is not None and variant.budget.steps]
    if not timed:
        return [tag("p", "No variant finished, so there is no budget.", class_="empty")]
    each = {variant.label: _per_sample(variant) for variant in timed}
    longest = max(sum(budget.values()) for budget in each.values())
    rows = [
        div(
            "phase-row run-row",
            span("phase-name", label or report.name),
            stacked_row(budget, longest, f"{label or report.name}: {styled('seconds', sum(budget.values()))}"),
            span("phase-time", styled("seconds", sum(budget.values()))),
        )
        for label, budget in each.items()
    ]
    keys = legend(Key(part.label, part.style, shape="box") for part in in_order(total_budget(each.values())))
    shown = timed[-1]
    assert shown.budget is not None
    steps = shown.budget.steps
    budget = each[shown.label]
    busy = {part: seconds / steps for part, seconds in shown.budget.busy.items()}
    heading = subheading(shown.label) if len(timed) > 1 else None
    return [keys, div("phases", *rows), heading, parts_table(budget, busy, budget), *_derived(timed)]


def _per_sample(variant: Variant) -> dict[str, float]:
    assert variant.budget is not None
    return total_budget([{part: seconds / variant.budget.steps for part, seconds in variant.budget.exposed.items()}])


def _derived(variants: Sequence[Variant]) -> list[Html | None]:
    names = list(dict.fromkeys(name for variant in variants for name in variant.derived))
    if not names:
        return []
    head: list[Piece] = ["", *(variant.label or "value" for variant in variants)]
    rows: list[list[Piece]] = [
        [name.replace("_", " "), *(_figure(variant.derived.get(name)) for variant in variants)] for name in names
    ]
    return [subheading("Derived figures"), table(head, rows, "figures")]


def _figure(value: float | None) -> str:
    return ABSENT if value is None else compact(value) if abs(value) >= 1000 else f"{value:.4g}"


# --- where and what ----------------------------------------------------------------------------------------------


def _environments(names: Sequence[str], reports: Sequence[BenchReport]) -> Html:
    plains = [report.environment.model_dump() for report in reports]
    if len(reports) == 1:
        return facts([(key.replace("_", " "), str(value)) for key, value in plains[0].items() if value is not None])
    rows: list[list[Piece]] = []
    for key in plains[0]:
        values = ["" if plain[key] is None else str(plain[key]) for plain in plains]
        if any(values):
            differs = len(set(values)) > 1
            rows.append(
                [key.replace("_", " "), *(tag("td", value, class_="worse" if differs else None) for value in values)]
            )
    return table(["", *names], rows)


def _same_environment(reports: Sequence[BenchReport]) -> str:
    if len(reports) < 2:
        return ""
    same = all(report.environment == reports[0].environment for report in reports)
    return "The same for all reports." if same else "Coloured where the reports differ: mind it when comparing them."


def _work(name: str, report: BenchReport) -> Html:
    rows: list[list[Piece]] = [
        [tag("th", tag("code", key)), tag("code", value)] for key, value in flat(report.work).items()
    ]
    settings: list[list[Piece]] = [
        [tag("th", tag("code", key)), tag("code", value)] for key, value in flat(report.config).items()
    ]
    return join(
        [
            subheading(name),
            tag("ul", tag("li", tag("code", report.command)), class_="commands"),
            table(["work of every sample", ""], rows, "settings") if rows else None,
            details("All settings", table(["setting", ""], settings, "settings")),
        ]
    )
