"""The tables and the page of `pvg measure`: measures of one or two sources, and traces as a reader sees them."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from pvg.evaluation.report import SourceRecord
from pvg.evaluation.trace_report import LABELS, MeasureReport
from pvg.reporting.charts import ChartLine, XAxis, line_chart
from pvg.reporting.evaluation import estimate_text
from pvg.reporting.formats import ABSENT
from pvg.reporting.table import Column, PageSection, Table, TableCell, TemplateMacros, elements, page
from pvg.traces.measures import DECORATIVE, MeasuredTrace, contributions
from pvg.verifier.intervals import Estimate

markup = TemplateMacros("measure.html.j2")
SHOWN_TRACES = 40  # of a page, half of them with the least and half with the most important reasoning
LONGEST_SHOWN = 4000  # units of a trace
SIGNIFICANT = 0.05


def measures_table(report: MeasureReport) -> Table:
    """A row per measure, with its interval; of two sources also their difference and Holm's p value."""
    two = len(report.sources) == 2
    names = [source.name for source in report.sources]
    columns = [Column("measure", style="strong"), *(Column(name, "right") for name in names)]
    if two:
        columns += [Column("difference", "right"), Column("Holm's p", "right", wrap=False)]
    table = Table([*columns, Column("meaning", style="quiet", on="pages" if two else "everywhere")], narrow=True)
    rows = [source.measures for source in report.sources]
    compared = {found.name: found for found in report.comparison}
    for name, (label, about, form) in LABELS.items():
        cells = [_cell(row.get(name), form, two) for row in rows]
        if two:
            found = compared.get(name)
            cells.append(_cell(found.difference if found else None, "pp" if form == "%" else form, two))
            p = found.p_adjusted if found else None
            cells.append(TableCell(ABSENT if p is None else f"{p:.3f}" if p >= 0.001 else "<0.001"))
        if any(name in row for row in rows):
            table.add(label, *cells, about)
    return table


def _cell(value: Estimate | None, form: str, two: bool) -> TableCell:
    """An estimate; with two sources its interval is below it, because three in a line are too wide."""
    text, bracket, interval = estimate_text(value, form).partition(" [")
    return TableCell(text, below=f"{bracket}{interval}".strip()) if two else TableCell(f"{text}{bracket}{interval}")


def notes_of(report: MeasureReport) -> list[str]:
    """What a reader of the numbers should know."""
    found = list(dict.fromkeys(note for source in report.sources for note in source.said))
    for source in report.sources:
        if source.change is not None and source.change[1] < SIGNIFICANT:
            step, p = source.change
            found.append(f"{source.name}: the judge's MCC changes at step {step} (p = {p:.3f}).")
    return found


def measure_page(report: MeasureReport, measured: Sequence[tuple[str, Sequence[MeasuredTrace]]]) -> str:
    """The whole page. `measured`: by source, the traces of the report."""
    reader = f"read by {report.reader}" if report.reader else "without a reader"
    names = " and ".join(source.name for source in report.sources)
    counts = [(source.name, f"{source.traces:,} traces, {source.problems:,} problems") for source in report.sources]
    sections = [
        PageSection("measures", "Measures", [measures_table(report)], "Means with 95 % intervals over problems."),
        PageSection("judge", "The judge over steps", list(filter(None, map(_judge, report.sources)))),
    ]
    for number, (name, rows) in enumerate(measured):
        shown = chosen(rows)
        lead = markup.lead(len(shown), len(rows), any(row.chances for row in rows), DECORATIVE)
        body = [markup.trace(*_shown(each)) for each in shown]
        sections.append(PageSection(f"traces-{number}", f"Traces of {name}", body, lead, style="measure.css"))
    header = [elements.title(names, reader), elements.facts(counts), elements.notes(notes_of(report))]
    return page(f"pvg measure: {names}", header, sections)


def _judge(source: SourceRecord) -> Markup:
    points = [(float(each.step), each.mcc) for each in source.judge if each.mcc is not None]
    if len(points) < 2:
        return Markup()
    marks = [(float(source.change[0]), f"change, p = {source.change[1]:.3f}")] if source.change else []
    x = XAxis(points[0][0], points[-1][0], "step", marks=marks)
    return line_chart(f"MCC, {source.name}", [ChartLine("MCC", [points], "verifier", dots=True)], x, "number")


def chosen(rows: Sequence[MeasuredTrace]) -> list[MeasuredTrace]:
    """The traces to show: those with the lowest and those with the highest CIR; without one, the first."""
    ranked = sorted((row for row in rows if row.chances), key=lambda row: row.values().get("cir", 0.0))
    ranked = ranked or list(rows)
    half = SHOWN_TRACES // 2
    return ranked if len(ranked) <= SHOWN_TRACES else [*ranked[:half], *ranked[-half:]]


def _shown(row: MeasuredTrace) -> tuple[object, ...]:
    """The arguments of the template: question, units (text, strength, hint), rest, steps, facts, and the place."""
    trace, parts, values = row.trace, row.trace.parts, row.values()
    question = "\n\n".join(content for _, content in trace.problem)
    if row.chances and parts is not None:
        gains = contributions(row.chances)
        units = [
            (text, gain, f"P(answer) {before:.3f} → {after:.3f}")
            for text, gain, before, after in zip(row.units, gains, row.chances, row.chances[1:], strict=False)
        ][:LONGEST_SHOWN]
        rest = trace.text[len(parts.reasoning) :] if len(row.units) <= LONGEST_SHOWN else " …"
    else:
        units, rest = [], trace.text
    grade = {True: "correct", False: "wrong", None: ""}[trace.correct]
    facts = [
        ("stated answer", parts.answer.strip() if parts is not None else "none"),
        ("true answer", trace.truth or ""),
        ("P(answer) before, after reasoning", f"{row.chances[0]:.3f}, {row.chances[-1]:.3f}" if row.chances else ""),
        ("CIR", f"{values['cir']:.3f}" if "cir" in values else ""),
        ("read without the question", (row.read["sr"] or "nothing") if "sr" in row.read else ""),
        ("answers after 0, 10, 25, 50, 75, 90 %", ", ".join(str(v) for k, v in row.read.items() if k != "sr")),
    ]
    steps = [(text.strip(), score, score < DECORATIVE) for text, score in row.steps]
    return question, units, rest, steps, facts, grade, trace.place
