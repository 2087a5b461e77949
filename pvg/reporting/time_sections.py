"""Where the time went: by phase, by part, by step, and a few steps as they ran."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from markupsafe import Markup

from pvg.errors import counted
from pvg.reporting.charts import PROVER, VERIFIER, Mark, StepAxis, StripRow, budget_marks, stacked_chart
from pvg.reporting.formats import (
    MEANING,
    BudgetPart,
    by_family,
    duration,
    in_order,
    percent,
    phase_label,
    short_seconds,
    total_budget,
    value_text,
)
from pvg.reporting.run_summary import PhaseSummary, RunSummary, StepRecord
from pvg.reporting.table import Column, LegendKey, PageSection, Table, TableCell, chart, elements
from pvg.telemetry.spans import DRIVER, UNACCOUNTED

NOTEWORTHY = 2e-3  # share of the time; less overlap than this gets no columns
MOST_PHASES = 24  # rows of the chart by phase; longer games show each phase summed over rounds


def time_section(summary: RunSummary) -> PageSection:
    budget = whole_budget(summary)
    if not budget:
        return PageSection("time", "Time", [])
    body = [
        chart.marks(budget_marks(budget, sum(budget.values()))),
        _families(budget),
        parts_table(budget, summary.busy, summary.budget),
        elements.subheading("By phase"),
        _phases(summary),
        *_step_charts(summary),
    ]
    return PageSection("time", "Time", body, _lead(summary, budget))


def whole_budget(summary: RunSummary) -> dict[str, float]:
    """Exposed seconds by part: all steps, and the time of the phases outside of their steps."""
    return total_budget([summary.budget, *(phase.budget for phase in summary.phases)])


def _lead(summary: RunSummary, budget: dict[str, float]) -> str:
    total = sum(budget.values())
    words = [
        f"{duration(total)} in steps and phases, {percent(budget.get(UNACCOUNTED, 0.0) / total)} of it unaccounted."
    ]
    with_budget = [process for process in summary.processes if process.budget]
    if with_budget:
        whole = total_budget(process.budget for process in with_budget)
        seconds = sum(whole.values())
        count = "its process" if len(with_budget) == 1 else f"its {len(with_budget)} processes that ended normally"
        words.append(
            f"All time of {count}, with start and end: {duration(seconds)}, "
            f"{percent(whole.get(UNACCOUNTED, 0.0) / seconds)} unaccounted."
        )
    return " ".join(words)


def _families(budget: dict[str, float]) -> Markup:
    total = sum(budget.values())
    return chart.legend(
        [
            LegendKey(family, f"part-{family}-0", shape="box", detail=f"{percent(seconds / total)}, {MEANING[family]}")
            for family, seconds in by_family(budget).items()
        ]
    )


def box_key(part: BudgetPart) -> LegendKey:
    """A part of a budget in a legend."""
    return LegendKey(part.label, part.style, shape="box")


def parts_table(budget: dict[str, float], busy: dict[str, float], steps: dict[str, float]) -> Table:
    """Exposed seconds by part. If work overlapped, also the busy and the hidden seconds.

    `busy` covers the steps only, whose exposed time is `steps`. Time outside of the steps has no overlap.
    """
    total = sum(budget.values())
    over = {part: max(0.0, seconds - steps.get(part, 0.0)) for part, seconds in busy.items()}
    hidden = sum(over.values())
    largest = max(budget.values(), default=0.0)
    titles = ["", "exposed", "share", "busy", "hidden"] if hidden > NOTEWORTHY * total else ["", "exposed", "share"]
    table = Table([Column("part"), *(Column(title, "right") for title in titles)], look="parts")

    def add(first: TableCell, bar: TableCell, exposed: float, covered: float) -> None:
        numbers = [value_text("seconds", exposed), percent(exposed / total), value_text("seconds", exposed + covered)]
        last = value_text("seconds", covered) if covered > 1e-4 * total else ""
        table.add(first, bar, *[*numbers, last][: len(titles) - 1])

    for part in in_order({**budget, **busy}):
        exposed = budget.get(part.name, 0.0)
        bar = TableCell(style=part.style, bar=exposed / largest if largest > 0 else 0.0)
        add(TableCell(part.label, key=box_key(part)), bar, exposed, over.get(part.name, 0.0))
    add(TableCell("all"), TableCell(), total, hidden)
    table.caption = "Exposed: the time that the run waited for a part."
    if len(titles) > 3:
        table.caption += " Hidden: the part overlapped with other work. Busy: the sum of both."
    return table


def _phases(summary: RunSummary) -> Markup:
    """Every phase as a bar of its parts, all on one scale; in long games the sum over the rounds."""
    found = [(f"round {p.round}, ", p, _phase_budget(p, summary.steps)) for p in summary.phases]
    bars = {
        f"{round_}{phase_label(p.phase)}": (budget, "" if p.finished else "unfinished") for round_, p, budget in found
    }
    if len(found) > MOST_PHASES:
        bars = {}
        for _, p, budget in found:
            before, _ = bars.get(phase_label(p.phase), ({}, ""))
            bars[phase_label(p.phase)] = total_budget([before, budget]), ""
    return budget_rows(bars)


def budget_rows(bars: Mapping[str, tuple[Mapping[str, float], str]]) -> Markup:
    """Budgets as bars on one scale: name -> (seconds by part, remark)."""
    longest = max((sum(budget.values()) for budget, _ in bars.values()), default=0.0)
    return chart.strips(
        [
            StripRow(name, budget_marks(budget, longest), duration(sum(budget.values())), remark=remark)
            for name, (budget, remark) in bars.items()
        ]
    )


def _phase_budget(phase: PhaseSummary, steps: list[StepRecord]) -> dict[str, float]:
    own = [step.budget for step in steps if (step.round, step.phase) == (phase.round, phase.phase)]
    return total_budget([*own, phase.budget])


def _step_charts(summary: RunSummary) -> list[Markup]:
    """Only phases whose steps are optimizer steps: their bars can be compared with each other."""
    charts = []
    for phase, title in ((PROVER, "Time per prover step"), (VERIFIER, "Time per verifier step")):
        steps = StepAxis(summary.steps, phase)
        if steps:
            charts.append(stacked_chart(title, steps.columns(), steps.across(), unit="exposed seconds per step"))
    return charts


def overlap_section(windows: list[StepWindow], damaged: int, *, has_steps: bool) -> PageSection:
    """The timelines."""
    body = [timeline(window) for window in windows]
    if not windows and has_steps:
        body = [elements.empty("spans.jsonl holds no spans of these steps.")]
    if damaged:
        body.append(elements.empty(f"{counted(damaged, 'line')} of spans.jsonl could not be read."))
    lead = (
        "A few steps from the middle of each phase. Each lane is a task or thread, with nested spans below each other."
    )
    return PageSection("gantt", "Timeline of some steps", body, lead)


# A few steps of a run as they ran: the spans of a window of steps, laid out in lanes.
#
#     for window in read_windows(run.spans, choose_windows(summary.steps)): ...
#
# spans.jsonl may hold hundreds of megabytes: it is read once, line by line, and only the spans of the chosen steps
# are kept.

STEPS_SHOWN = 3
MOST_SPANS = 20_000  # kept of one window
MOST_ROWS = 12  # per lane; more concurrent spans are counted instead of drawn
# Short neighbours of one name are merged if each span, and the gap between them, is below this share of the window.
SHORT, CLOSE = 4e-3, 1e-3

Place = tuple[int, str]  # round and phase


@dataclass(frozen=True, slots=True)
class ChosenSteps:
    """The steps to show: neighbours in the middle of a phase."""

    round: int
    phase: str
    steps: tuple[int, ...]


@dataclass(slots=True)
class SpanBlock:
    """One span in its lane, or `count` short neighbours of one name. Seconds since the window began; `worked_s` is
    the spans' own sum."""

    name: str
    row: int
    start_s: float
    end_s: float
    worked_s: float
    count: int = 1


@dataclass(slots=True)
class SpanLane:
    """The spans of one track. Nested and concurrent spans are in rows below each other."""

    track: str
    rows: int = 0
    blocks: list[SpanBlock] = field(default_factory=list)
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The spans of a choice. `starts` says when each step's first span began, in seconds since the window began."""

    choice: ChosenSteps
    seconds: float
    starts: tuple[tuple[int, float], ...]
    lanes: tuple[SpanLane, ...]


def choose_windows(steps: Sequence[StepRecord]) -> list[ChosenSteps]:
    """For every kind of phase STEPS_SHOWN neighbouring steps from the middle of the middle one of its rounds."""
    played: dict[str, dict[int, list[int]]] = {}
    for step in steps:
        played.setdefault(step.phase, {}).setdefault(step.round, []).append(step.step)
    choices = []
    for phase, rounds in played.items():
        most = max(len(numbers) for numbers in rounds.values())
        full = [round_ for round_, numbers in rounds.items() if len(numbers) * 2 >= most]
        round_ = full[len(full) // 2]
        numbers = rounds[round_]
        first = max(0, (len(numbers) - STEPS_SHOWN) // 2)
        choices.append(ChosenSteps(round_, phase, tuple(numbers[first : first + STEPS_SHOWN])))
    return choices


def read_windows(path: Path, choices: Sequence[ChosenSteps]) -> tuple[list[StepWindow], int]:
    """The windows that have spans in the file, in the order of `choices`, and the number of unreadable lines."""
    wanted = {(choice.round, choice.phase, step): choice for choice in choices for step in choice.steps}
    kept: dict[Place, list[dict[str, Any]]] = {}
    damaged = 0
    if not wanted or not path.is_file():
        return [], 0
    # Most lines are of other steps and are skipped without being parsed.
    steps = "|".join(str(step) for step in sorted({step for _, _, step in wanted}))
    likely = re.compile(rf'"step": ?(?:{steps})\b'.encode())
    with open(path, "rb") as file:
        for line in file:
            if likely.search(line) is None:
                continue
            row = _row(line)
            if row is None:
                damaged += line.endswith(b"\n")  # an incomplete last line is normal
            elif (row["round"], row["phase"], row["step"]) in wanted:
                rows = kept.setdefault((row["round"], row["phase"]), [])
                if len(rows) < MOST_SPANS:
                    rows.append(row)
    found = [
        _window(choice, kept[choice.round, choice.phase]) for choice in choices if (choice.round, choice.phase) in kept
    ]
    return found, damaged


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    fields: dict[str, Any] = {
        "name": str,
        "start_s": (int, float),
        "end_s": (int, float),
        "round": int,
        "phase": str,
        "step": int,
    }
    if isinstance(row, dict) and all(isinstance(row.get(key), kind) for key, kind in fields.items()):
        return row
    return None


def _window(choice: ChosenSteps, rows: list[dict[str, Any]]) -> StepWindow:
    # A span that began long before (such as a checkpoint in the background) is cut off where the steps begin.
    driver = [row for row in rows if row.get("track", DRIVER) == DRIVER] or rows
    begin, end = min(row["start_s"] for row in driver), max(row["end_s"] for row in driver)
    seconds = max(end - begin, 1e-9)
    starts: dict[int, float] = {}
    for row in driver:
        at = row["start_s"] - begin
        starts[row["step"]] = min(starts.get(row["step"], at), at)
    tracks: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        tracks.setdefault(str(row.get("track", DRIVER)), []).append(row)
    order = sorted(tracks, key=lambda track: (track != DRIVER, track != "loop", track))
    lanes = tuple(_lane(track, tracks[track], begin, seconds) for track in order)
    return StepWindow(choice, seconds, tuple(sorted(starts.items(), key=lambda pair: pair[1])), lanes)


def _lane(track: str, rows: Iterable[dict[str, Any]], begin: float, seconds: float) -> SpanLane:
    """Each span goes to the first free row, so nested and concurrent spans are below each other."""
    lane = SpanLane(track)
    free: list[float] = []  # when each row's last span ends
    last: dict[int, SpanBlock] = {}
    for row in sorted(rows, key=lambda row: (row["start_s"], -row["end_s"])):
        start, end = max(0.0, row["start_s"] - begin), min(seconds, row["end_s"] - begin)
        if end <= start and row["end_s"] > row["start_s"]:
            continue  # outside of the window
        place = next((place for place, until in enumerate(free) if until <= start + 1e-9), len(free))
        if place >= MOST_ROWS:
            lane.left_out += 1
            continue
        if place == len(free):
            free.append(end)
        free[place] = end
        before = last.get(place)
        if before is not None and _one_of_many(before, str(row["name"]), start, end, seconds):
            before.end_s, before.count, before.worked_s = end, before.count + 1, before.worked_s + end - start
        else:
            last[place] = SpanBlock(str(row["name"]), place, start, end, end - start)
            lane.blocks.append(last[place])
    lane.rows = len(free)
    return lane


def _one_of_many(before: SpanBlock, name: str, start: float, end: float, seconds: float) -> bool:
    short = before.worked_s / before.count < SHORT * seconds and end - start < SHORT * seconds
    return before.name == name and short and start - before.end_s < CLOSE * seconds


# The timeline: spans of a few steps as blocks, one row per track.

LETTERS = 0.0075  # of the chart's width, roughly, that one letter takes


def timeline(window: StepWindow) -> Markup:
    """The lanes of a window over one time axis, with the steps above them."""
    parts = {part.name: part for part in in_order({block.name for lane in window.lanes for block in lane.blocks})}
    steps = [Mark("step", "", at / window.seconds, text=f"step {step}") for step, at in window.starts]
    rows = [StripRow("", steps)]
    for lane in window.lanes:
        marks = [_block_mark(block, parts[block.name], window.seconds) for block in lane.blocks]
        rows.append(StripRow(lane.track, marks, lines=max(1, lane.rows)))
    chosen, missing = window.choice, sum(lane.left_out for lane in window.lanes)
    return chart.figure(
        f"{phase_label(chosen.phase).capitalize()}, round {chosen.round}",
        chart.strips(rows, ("0 s", value_text("seconds", window.seconds))),
        keys=[box_key(part) for part in parts.values()],
        note=f"{missing} spans are not drawn: too many ran at the same time." if missing else "",
        look="wide",
    )


def _block_mark(block: SpanBlock, part: BudgetPart, seconds: float) -> Mark:
    width = (block.end_s - block.start_s) / seconds
    many, together = (f"{block.count} × ", " in all") if block.count > 1 else ("", "")
    hint = f"{many}{part.label}: {short_seconds(block.worked_s)}{together}"
    text = part.label if width > LETTERS * (len(part.label) + 1) else ""
    return Mark("bar", part.style, block.start_s / seconds, width, hint, text, block.row)
