"""A diagnosis on a terminal: what stands out first, then the timings it was read from.

The texts come from logs, so they are shown as plain text, never as markup.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pvg.reporting.diagnosis.diagnosis import Diagnosis
from pvg.reporting.diagnosis.signatures import Finding, milliseconds, percent
from pvg.reporting.figures import duration
from pvg.reporting.terminal import HEADING, QUIET

# The quantities of the timings table, in its order, by the part of the system they tell of.
TIMINGS = {
    "weight updates": {
        "wall_ms": "wall",
        "queue_ms": "waiting (queue)",
        "in_server_ms": "of it in the server",
        "rpc_ms": "loading (rpc)",
    },
    "checkpoints": {"write_ms": "writing", "wait_ms": "waited for"},
    "steps": {"step.wall_ms": "wall", "step.train_ms": "training", "step.idle_ms": "idle"},
    "generation": {
        "dur_ms": "batch",
        "longest_ms": "longest request",
        "group_p50_ms": "middle group's wait",
        "group_max_ms": "slowest group's wait",
    },
    "event loop": {"lag.p90_ms": "lag, p90 of a window", "lag.p99_ms": "p99", "lag.max_ms": "max"},
}
LOADED = {"queue_ms": "waiting (queue)", "rpc_ms": "loading (rpc)", "write_ms": "writing", "wait_ms": "waited for"}


def rendered(found: Diagnosis) -> Group:
    """Everything `pvg diagnose` prints, in order; a part with nothing to show is left out."""
    blocks: list[list[RenderableType]] = [[_headline(found)]]
    blocks += [[_finding(number, finding)] for number, finding in enumerate(found.findings, start=1)]
    if not found.findings and found.tally.lines.events:
        blocks.append([Text(f"Nothing stands out{' in what the log tells' if found.not_seen else ''}.", "green")])
    if found.timings:
        blocks.append(_titled("Timings", _timings_table(found)))
    if found.load:
        blocks.append(_titled("With the load of generation", _load_table(found)))
    if found.not_seen:
        blocks.append(_titled("Not in the log", _pairs(found.not_seen.items())))
    if found.notes:
        notes = (Text(note, "yellow", overflow="fold") for note in found.notes)
        blocks.append(_titled("Notes", Group(*notes)))
    return Group(*(part for block in blocks for part in (*block, Text())))


def _titled(title: str, body: RenderableType) -> list[RenderableType]:
    return [Text(title, style=HEADING), Padding(body, (0, 0, 0, 2))]


def _headline(found: Diagnosis) -> Text:
    lines = found.tally.lines
    unread = f", {lines.malformed:,} cannot be read" if lines.malformed else ""
    return Text.assemble(
        (", ".join(found.sources), "bold"),
        (f"  {lines.read:,} lines, {lines.events:,} events{unread}", QUIET),
        (f"  {duration(found.seconds)}" if found.seconds else "", QUIET),
        overflow="fold",
    )


def _finding(number: int, finding: Finding) -> Group:
    lost = duration(finding.cost_s)
    cost = f"{percent(finding.share)} of the time, {lost}" if finding.share is not None else lost
    head = Text.assemble((f"{number}  {finding.signature}", "bold yellow"), (f"   {cost}", HEADING))
    body = Table.grid(padding=(0, 2))
    body.add_column(style=QUIET, no_wrap=True)
    body.add_column(overflow="fold")
    body.add_row("seen", Text(finding.says))
    measured, threshold = _figure(finding.measured, finding), _figure(finding.threshold, finding)
    body.add_row("criterion", Text(f"{finding.criterion}: {measured}, named from {threshold}"))
    body.add_row("change", Text(", ".join(finding.settings), style="cyan"))
    body.add_row("", Text(finding.remedy))
    for place, evidence in enumerate(finding.evidence):
        line = Text.assemble((evidence.where, "bold"), (f"  {evidence.text}", QUIET), overflow="fold")
        body.add_row("evidence" if place == 0 else "", line)
    return Group(head, Padding(body, (0, 0, 0, 3)))


def _figure(value: float, finding: Finding) -> str:
    """A share as a percentage, a ratio as a number."""
    return percent(value) if finding.threshold < 1.0 else f"{value:.2g}"


def _timings_table(found: Diagnosis) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style=QUIET, border_style=QUIET)
    table.add_column("", style=QUIET, no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in ("n", "p50", "p95", "p99", "max", "in all"):
        table.add_column(heading, justify="right", no_wrap=True)
    for part, names in TIMINGS.items():
        label = part
        for name, shown in names.items():
            timing = found.timings.get(name)
            if timing is None:
                continue
            values = (timing.p50, timing.p95, timing.p99, timing.max)
            in_all = "" if name.startswith("lag.") else duration(timing.total / 1e3)
            table.add_row(label, shown, f"{timing.n:,}", *(milliseconds(value) for value in values), in_all)
            label = ""
    if not all(timing.exact for timing in found.timings.values()):
        table.caption = "percentiles of more than 4,096 values are within 1%"
        table.caption_justify, table.caption_style = "left", QUIET
    return table


def _load_table(found: Diagnosis) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style=QUIET, border_style=QUIET)
    table.add_column("", no_wrap=True)
    for heading in (
        "n",
        "rank\ncorrelation",
        "idler half:\nin flight",
        "\nmedian",
        "busier half:\nin flight",
        "\nmedian",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, shown in LOADED.items():
        if related := found.load.get(name):
            table.add_row(
                shown,
                f"{related.n:,}",
                f"{related.correlation:+.2f}",
                f"{related.idle_load:g}",
                milliseconds(related.idle),
                f"{related.busy_load:g}",
                milliseconds(related.busy),
            )
    return table


def _pairs(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(style=QUIET, overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text))
    return table
