"""`diagnose`: from logs to the signatures that are in them, with the numbers they were read from.

found = diagnose(["runs/first/events.log"])
for finding in found.findings: print(finding.signature, finding.says)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pvg.config.sections import Telemetry
from pvg.reporting.diagnosis.signatures import LEAST_PAIRS, SIGNATURES, Finding, LagLimits
from pvg.reporting.diagnosis.sketches import RELATIVE_ERROR, Related
from pvg.reporting.diagnosis.tally import Tally, read_logs

QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Timing:
    """A quantity over the log, milliseconds. Quantiles are exact, or within 1% (sketches.RELATIVE_ERROR)."""

    n: int
    p50: float
    p95: float
    p99: float
    max: float
    total: float
    exact: bool


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`findings` by cost, dearest first; `not_seen`: by signature, what the log would have to hold to tell."""

    sources: tuple[str, ...]
    seconds: float
    findings: tuple[Finding, ...]
    not_seen: dict[str, str]
    timings: dict[str, Timing]
    load: dict[str, Related]
    phases: dict[str, dict[str, float]]
    tally: Tally
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
            "relative_error": RELATIVE_ERROR,
            "with_load": {name: asdict(related) for name, related in self.load.items()},
            "steps_ms": self.phases,
            "updates": asdict(halves),
            "notes": list(self.notes),
        }


def diagnose(sources: Sequence[str | Path], telemetry: Telemetry | None = None) -> Diagnosis:
    """Read the logs once and look for every signature. `telemetry`: the run's own, for its warning levels.

    Raises UsageError for a log that cannot be read.
    """
    tally = read_logs(sources)
    limits = LagLimits.of(telemetry or Telemetry())
    looked = {name: look(tally, limits) for name, look in SIGNATURES.items()}
    findings = [found for found in looked.values() if isinstance(found, Finding)]
    related = {name: relation.related(LEAST_PAIRS) for name, relation in tally.relations.items()}
    return Diagnosis(
        sources=tally.sources,
        seconds=tally.elapsed_s,
        findings=tuple(sorted(findings, key=lambda finding: -finding.cost_s)),
        not_seen={name: found for name, found in looked.items() if isinstance(found, str)},
        timings={name: _timing(tally, name) for name in tally.sketches},
        load={name: found for name, found in related.items() if found is not None} if tally.load_known else {},
        phases=tally.phases,
        tally=tally,
        notes=tuple(_notes(tally)),
    )


def _timing(tally: Tally, name: str) -> Timing:
    sketch = tally.sketch(name)
    quantiles = {label: sketch.quantile(share) for label, share in QUANTILES.items()}
    return Timing(n=sketch.n, **quantiles, max=sketch.largest, total=sketch.total, exact=sketch.exact)


def _notes(tally: Tally) -> list[str]:
    """What a reader should know about the log itself."""
    lines, halves, offset = tally.lines, tally.pairing.halves, tally.pairing.offset
    notes = []
    if lines.malformed:
        notes.append(f"{lines.malformed:,} of {lines.read:,} lines cannot be read; the first: {lines.example}")
    if lines.other:
        notes.append(f"{lines.other:,} lines are not ours and were passed over.")
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
