"""Where the time went: by phase, by part, by step, and a few steps as they ran."""

from __future__ import annotations

from pvg.reporting.figures import duration, percent, phase_label, styled, total_budget
from pvg.reporting.page.charts import stacked_chart, stacked_row
from pvg.reporting.page.document import Section, empty, subheading
from pvg.reporting.page.frame import Key, legend, swatch
from pvg.reporting.page.gantt import gantt
from pvg.reporting.page.markup import Html, Piece, div, join, span, table, tag
from pvg.reporting.page.steps import PROVER, VERIFIER, Steps
from pvg.reporting.parts import MEANING, by_family, in_order
from pvg.reporting.run_summary import PhaseSummary, RunSummary, StepRecord
from pvg.reporting.timeline import Window
from pvg.telemetry.spans import UNACCOUNTED

NOTEWORTHY = 2e-3  # of the time: less overlap than this needs no columns
MOST_PHASES = 24  # rows of the chart by phase; of longer games the rounds' phases are summed


def time_section(summary: RunSummary) -> Section:
    budget = whole_budget(summary)
    if not budget:
        return Section("time", "Time", [])
    body: list[Html | None] = [
        stacked_row(budget, sum(budget.values()), "The whole time by part"),
        _families(budget),
        parts_table(budget, summary.busy, summary.budget),
        subheading("By phase"),
        _phases(summary),
        *_step_charts(summary),
    ]
    return Section("time", "Time", body, _lead(summary, budget))


def whole_budget(summary: RunSummary) -> dict[str, float]:
    """Exposed seconds by part: all steps, and what the phases spent outside of them."""
    return total_budget([summary.budget, *(phase.budget for phase in summary.phases)])


def _lead(summary: RunSummary, budget: dict[str, float]) -> str:
    total = sum(budget.values())
    words = [
        f"{duration(total)} in steps and phases, {percent(budget.get(UNACCOUNTED, 0.0) / total)} of it unaccounted for."
    ]
    told = [process for process in summary.processes if process.budget]
    if told:
        whole = total_budget(process.budget for process in told)
        seconds = sum(whole.values())
        count = "its process" if len(told) == 1 else f"its {len(told)} processes that ended in order"
        words.append(
            f"All of {count}, starting and closing included: {duration(seconds)}, "
            f"{percent(whole.get(UNACCOUNTED, 0.0) / seconds)} unaccounted for."
        )
    return " ".join(words)


def _families(budget: dict[str, float]) -> Html | None:
    total = sum(budget.values())
    return legend(
        Key(family, f"part-{family}-0", shape="box", detail=f"{percent(seconds / total)}, {MEANING[family]}")
        for family, seconds in by_family(budget).items()
    )


def parts_table(budget: dict[str, float], busy: dict[str, float], steps: dict[str, float]) -> Html:
    """Exposed seconds by part; where work overlapped, also what was worked in all and what of it was hidden.

    `busy` is known of the steps (whose exposed time is `steps`); what lies outside of them overlaps with nothing.
    """
    total = sum(budget.values())
    over = {part: max(0.0, seconds - steps.get(part, 0.0)) for part, seconds in busy.items()}
    overlapped = sum(over.values()) > NOTEWORTHY * total
    rows: list[list[Piece]] = []
    largest = max(budget.values(), default=0.0)
    for part in in_order({**budget, **busy}):
        exposed = budget.get(part.name, 0.0)
        row: list[Piece] = [
            tag("th", swatch(Key(part.label, part.style, shape="box")), part.label),
            _in_cell_bar(exposed, largest, part.style),
            styled("seconds", exposed),
            percent(exposed / total),
        ]
        if overlapped:
            hidden = over.get(part.name, 0.0)
            row += [styled("seconds", exposed + hidden), styled("seconds", hidden) if hidden > 1e-4 * total else ""]
        rows.append(row)
    head: list[Piece] = ["part", "", "exposed", "share"]
    sums: list[Piece] = [tag("th", "all"), "", styled("seconds", total), "100 %"]
    note = None
    if overlapped:
        hidden = sum(over.values())
        head += ["busy", "hidden"]
        sums += [styled("seconds", total + hidden), styled("seconds", hidden)]
        note = tag(
            "p",
            "Exposed: the run waited for it. Hidden: it ran while the run did something else; busy is both.",
            class_="note",
        )
    rows.append(sums)
    return join([table(head, rows, "figures parts"), note])


def _in_cell_bar(value: float, largest: float, style: str) -> Html:
    width = 100 * value / largest if largest > 0 else 0.0
    return tag("td", div("cell-bar", span(f"fill-box {style}", style=f"width:{width:.2f}%")), class_="wide-cell")


def _phases(summary: RunSummary) -> Html:
    """Every phase as a bar of its parts, all on one scale."""
    rows = [(f"round {p.round}", phase_label(p.phase), _phase_budget(p, summary.steps), p) for p in summary.phases]
    if len(rows) > MOST_PHASES:
        kinds: dict[str, dict[str, float]] = {}
        for _, label, budget, _ in rows:
            kinds[label] = total_budget([kinds.get(label, {}), budget])
        drawn = [("all rounds", label, budget, "") for label, budget in kinds.items()]
    else:
        drawn = [(round_, label, budget, "" if p.finished else "unfinished") for round_, label, budget, p in rows]
    longest = max((sum(budget.values()) for _, _, budget, _ in drawn), default=0.0)
    before, lines = "", []
    for round_, label, budget, remark in drawn:
        seconds = sum(budget.values())
        lines.append(
            div(
                "phase-row" if round_ == before else "phase-row first",
                span("phase-round", round_ if round_ != before else ""),
                span("phase-name", label),
                stacked_row(budget, longest, f"{round_} {label}: {duration(seconds)}"),
                span("phase-time", duration(seconds), span("badge warn", remark) if remark else None),
            )
        )
        before = round_
    return div("phases", *lines)


def _phase_budget(phase: PhaseSummary, steps: list[StepRecord]) -> dict[str, float]:
    own = [step.budget for step in steps if (step.round, step.phase) == (phase.round, phase.phase)]
    return total_budget([*own, phase.budget])


def _step_charts(summary: RunSummary) -> list[Html | None]:
    """Only phases whose steps are optimizer steps: their bars can be compared with each other."""
    charts = []
    for phase, title in ((PROVER, "One prover step after the other"), (VERIFIER, "One verifier step after the other")):
        steps = Steps(summary.steps, phase)
        if steps:
            charts.append(stacked_chart(title, steps.columns(), steps.across(), unit="exposed seconds per step"))
    return charts


def overlap_section(windows: list[Window], damaged: int, *, has_steps: bool) -> Section:
    """The Gantt charts."""
    body: list[Html | None] = [gantt(window) for window in windows]
    if not windows and has_steps:
        body = [empty("spans.jsonl holds no spans of these steps.")]
    if damaged:
        body.append(empty(f"{damaged} lines of spans.jsonl could not be read."))
    lead = (
        "A few steps from the middle of each phase, as they ran. Spans nest downwards; each lane is one task or thread."
    )
    return Section("gantt", "Steps as they ran", body, lead)
