"""`diagnose` finds known problems (signatures) in logs, with the numbers that show them.

found = diagnose(["runs/first/events.log"])
for finding in found.findings: print(finding.signature, finding.says)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from pvg.reporting.diagnosis.signatures import LEAST_PAIRS, SIGNATURES, Finding, milliseconds, percent
from pvg.reporting.diagnosis.tally import LoadCorrelation, LogTally, read_logs
from pvg.reporting.formats import duration
from pvg.reporting.table import Column, Table
from pvg.reporting.terminal import HEADING, QUIET
from pvg.telemetry.waits import LAG_LIMITS, LagLimits

QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class TimingSummary:
    """A quantity over the log, milliseconds."""

    n: int
    p50: float
    p95: float
    p99: float
    max: float
    total: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`findings` are sorted by cost, highest first. `not_seen`: signature -> what the log lacks to check it."""

    sources: tuple[str, ...]
    seconds: float
    findings: tuple[Finding, ...]
    not_seen: dict[str, str]
    timings: dict[str, TimingSummary]
    load: dict[str, LoadCorrelation]
    phases: dict[str, dict[str, float]]
    tally: LogTally
    notes: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        lines, halves = self.tally.lines, self.tally.pairing.halves
        return {
            "sources": list(self.sources),
            "seconds": self.seconds,
            "lines": asdict(lines),
            "findings": [asdict(finding) for finding in self.findings],
            "nothing_stands_out": not self.findings,
            "not_seen": self.not_seen,
            "timings_ms": {name: asdict(timing) for name, timing in self.timings.items()},
            "with_load": {name: asdict(related) for name, related in self.load.items()},
            "steps_ms": self.phases,
            "updates": asdict(halves),
            "notes": list(self.notes),
        }


def diagnose(sources: Sequence[str | Path], limits: LagLimits = LAG_LIMITS) -> Diagnosis:
    """Read the logs once and look for every signature. Raises UsageError for a log that cannot be read."""
    tally = read_logs(sources)
    looked = {name: look(tally, limits) for name, look in SIGNATURES.items()}
    findings = [found for found in looked.values() if isinstance(found, Finding)]
    related = {name: relation.related(LEAST_PAIRS) for name, relation in tally.relations.items()}
    return Diagnosis(
        sources=tally.sources,
        seconds=tally.elapsed_s,
        findings=tuple(sorted(findings, key=lambda finding: -finding.cost_s)),
        not_seen={name: found for name, found in looked.items() if isinstance(found, str)},
        timings={name: _timing(tally, name) for name in tally.quantities},
        load={name: found for name, found in related.items() if found is not None} if tally.load_known else {},
        phases=tally.phases,
        tally=tally,
        notes=tuple(_notes(tally)),
    )


def _timing(tally: LogTally, name: str) -> TimingSummary:
    found = tally.quantity(name)
    quantiles = {label: found.quantile(share) for label, share in QUANTILES.items()}
    return TimingSummary(n=found.n, **quantiles, max=found.largest, total=found.total)


def _notes(tally: LogTally) -> list[str]:
    """What a reader should know about the log itself."""
    lines, halves, offset = tally.lines, tally.pairing.halves, tally.pairing.offset
    notes = []
    if lines.malformed:
        notes.append(f"{lines.malformed:,} of {lines.read:,} lines cannot be read; the first: {lines.example}")
    if lines.other:
        notes.append(f"{lines.other:,} lines are not from pvg and were skipped.")
    notes += [f"{name} is compressed and ends in the middle; all up to there was read." for name in lines.cut_short]
    if halves.unfinished:
        notes.append(f"{halves.unfinished:,} weight updates were sent and never finished.")
    if halves.server_only:
        notes.append(f"{halves.server_only:,} weight updates have the server's lines only: their wall time is unknown.")
    if halves.client_only and halves.paired:
        notes.append(f"{halves.client_only:,} weight updates have the client's lines only.")
    if halves.evicted:
        notes.append(f"{halves.evicted:,} weight updates stayed open for too long and were given up.")
    if halves.untraced:
        notes.append(f"{halves.untraced:,} [weights] lines have no trace id.")
    if halves.failed:
        times = "Once" if halves.failed == 1 else f"{halves.failed:,} times"
        notes.append(f"{times} an engine did not get new weights: it was away, refused them, or failed to load them.")
    if offset.known and not offset.same_clock:
        notes.append(f"Client and server have different clocks ({_difference(offset.at_least, offset.at_most)}).")
    return notes


def _difference(at_least: float, at_most: float) -> str:
    if at_least > at_most:
        return "more than one server clock"
    bounds = [f"{bound:+,.3f} s" for bound in (at_least, at_most) if abs(bound) != float("inf")]
    return f"server less client: between {bounds[0]} and {bounds[1]}" if len(bounds) == 2 else f"about {bounds[0]}"


# The diagnosis on the terminal: findings first, then the timings.
#
# Texts come from logs and are printed as plain text, never as markup.


# The rows of the timings table: short, so that the table fits into 80 columns.
TIMINGS = {
    "wall_ms": "update",
    "queue_ms": "  queued",
    "in_server_ms": "  in the server",
    "rpc_ms": "  loading (rpc)",
    "write_ms": "checkpoint write",
    "wait_ms": "checkpoint wait",
    "step.wall_ms": "step",
    "step.train_ms": "  training",
    "step.idle_ms": "  idle",
    "dur_ms": "batch",
    "longest_ms": "  longest request",
    "group_p50_ms": "  middle group",
    "group_max_ms": "  slowest group",
    "lag.p90_ms": "loop lag, p90",
    "lag.p99_ms": "  p99",
    "lag.max_ms": "  max",
}


def rendered(found: Diagnosis) -> Group:
    """Everything that `pvg diagnose` prints, in order, without empty parts."""
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
    body = RichTable.grid(padding=(0, 2))
    body.add_column(style=QUIET, no_wrap=True)
    body.add_column(overflow="fold")
    body.add_row("seen", Text(finding.says))
    measured, threshold = _figure(finding.measured, finding), _figure(finding.threshold, finding)
    body.add_row("criterion", Text(f"{finding.criterion}: {measured} (threshold {threshold})"))
    if finding.settings:
        body.add_row("change", Text(", ".join(finding.settings), style="cyan"))
    body.add_row("" if finding.settings else "advice", Text(finding.remedy))
    for place, evidence in enumerate(finding.evidence):
        line = Text.assemble((evidence.where, "bold"), (f"  {evidence.text}", QUIET), overflow="fold")
        body.add_row("evidence" if place == 0 else "", line)
    return Group(head, Padding(body, (0, 0, 0, 3)))


def _figure(value: float, finding: Finding) -> str:
    """A share as a percentage, a ratio as a number."""
    return percent(value) if finding.threshold < 1.0 else f"{value:.2g}"


def _timings_table(found: Diagnosis) -> Table:
    table = _table("n", "p50", "p95", "p99", "max", "in all")
    for name, label in TIMINGS.items():
        if timing := found.timings.get(name):
            values = (timing.p50, timing.p95, timing.p99, timing.max)
            in_all = "" if name.startswith("lag.") else milliseconds(timing.total)  # percentiles of windows have no sum
            table.add(label, f"{timing.n:,}", *(milliseconds(value) for value in values), in_all)
    return table


def _load_table(found: Diagnosis) -> Table:
    table = _table("n", "correlation", "in flight", "median", "in flight", "median")
    for name, label in TIMINGS.items():
        if related := found.load.get(name):
            numbers = (f"{related.n:,}", f"{related.correlation:+.2f}")
            idle = (f"{related.idle_load:g}", milliseconds(related.idle))
            busy = (f"{related.busy_load:g}", milliseconds(related.busy))
            table.add(label.strip(), *numbers, *idle, *busy)
    table.caption = "rank correlation; then the idler and the busier half"
    return table


def _table(*titles: str) -> Table:
    return Table([Column(wrap=False), *(Column(title, "right", wrap=False) for title in titles)], narrow=True)


def _pairs(rows: Iterable[tuple[str, str]]) -> RichTable:
    table = RichTable.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(style=QUIET, overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text))
    return table
