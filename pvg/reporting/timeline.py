"""`pvg report RUN --timeline FILE`: what ran when, in Google's "Trace Event Format", for Perfetto (ui.perfetto.dev) and
chrome://tracing.

    count = write_timeline(run, Path("timeline.json.gz"))

The events are complete ones (X), counters (C), instants (i) and metadata (M). Spans of a lane nest; overlapping tasks
(track "loop") get further lanes. So the viewer shows every span with its true start and end, in microseconds since the
first.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson

from pvg.errors import UsageError
from pvg.store.atomic import DamagedFileError, write_output
from pvg.store.run_directory import RunDirectory
from pvg.store.state import FileStateStore, JsonLinesReader
from pvg.telemetry.spans import DRIVER

PROCESS = 1
GAME_LANE = 1  # thread number of the lane of phases and steps; tracks follow
LANES = 1000  # lanes of one track have adjacent numbers, so that the viewer groups them
SAMPLED = ("device", "loop", "alert")  # kinds of metrics.jsonl
ROUNDING_S = 2e-6  # precision of seconds since 1970 as floats; a child may seem to end after its parent
PLACE = ("round", "phase", "step")

Event = dict[str, Any]


@dataclass(slots=True)
class _Lane:
    number: int
    open: list[tuple[float, int]] = field(default_factory=list)  # ends and depths of the enclosing spans

    def room_for(self, start_s: float, end_s: float, depth: int) -> int:
        """The number of spans that would enclose it; -1 if it would overlap one of them, or lie too deep."""
        while self.open and self.open[-1][0] <= start_s + ROUNDING_S:
            self.open.pop()
        if not self.open:
            return 0
        around_s, around_depth = self.open[-1]
        return len(self.open) if around_depth < depth and end_s <= around_s + ROUNDING_S else -1


def trace_events(
    spans: Iterable[Mapping[str, Any]], metrics: Iterable[Mapping[str, Any]] = (), *, name: str = "pvg"
) -> Iterator[Event]:
    """The events of the trace: phases and steps, spans by track, device samples and loop lag as counters, and alerts.
    `spans`: lines of a spans.jsonl. `metrics`: lines of a metrics.jsonl; other kinds are skipped."""
    ordered = sorted(spans, key=lambda span: (span["start_s"], span["depth"], -span["end_s"]))
    samples = [record for record in metrics if record.get("kind") in SAMPLED and "time" in record]
    first_s = min([span["start_s"] for span in ordered[:1]] + [record["time"] for record in samples], default=0.0)
    yield _named("process_name", name, 0)
    yield from _game(ordered, first_s)
    yield from _tracks(ordered, first_s)
    for record in samples:
        yield from _sample_events(record, first_s)


def write_timeline(run: RunDirectory, path: Path) -> int:
    """Write the timeline of a run from its spans and samples, compressed if `path` ends in .gz; returns the number of
    events. Raises UsageError if the run has no spans, DamagedFileError if the files differ from the commit."""
    if not run.spans.is_file():
        raise UsageError(f"The run {run.name!r} has no {run.spans.name}.", "Wait until it has finished a step.")
    state = next(iter(FileStateStore(run.state).commits()), {})
    for journal in (run.metrics, run.spans):
        run.verify_journal(state, journal)
    metrics = list(JsonLinesReader(run.metrics)) if run.metrics.is_file() else []
    spans = [_span(record, run) for record in JsonLinesReader(run.spans)]
    lines = [orjson.dumps(event) for event in trace_events(spans, metrics, name=f"pvg, {run.name}")]
    text = b'{"displayTimeUnit":"ms","traceEvents":[\n' + b",\n".join(lines) + b"\n]}\n"
    write_output(path, gzip.compress(text, 6) if path.suffix == ".gz" else text)
    return len(lines)


def _span(record: dict[str, Any], run: RunDirectory) -> dict[str, Any]:
    if record.keys() >= {"name", "start_s", "end_s", "depth", "track", *PLACE}:
        return record
    raise DamagedFileError(
        f"{run.spans} has a line that is not a span: {orjson.dumps(record).decode()[:80]}", "Remove it from the file."
    )


def _tracks(ordered: list[Mapping[str, Any]], first_s: float) -> Iterator[Event]:
    lanes: dict[str, list[_Lane]] = {}
    names = sorted({span["track"] for span in ordered}, key=lambda track: (track != DRIVER, track != "loop", track))
    for span in ordered:
        track, start_s, end_s = span["track"], span["start_s"], span["end_s"]
        own = lanes.setdefault(track, [])
        # The lane in which the span lies deepest, or the first of equals, is that of its parent.
        room = {number: lane.room_for(start_s, end_s, span["depth"]) for number, lane in enumerate(own)}
        best = max(room, key=room.__getitem__, default=0)
        if room.get(best, -1) < 0:
            best = len(own)
            own.append(_Lane(GAME_LANE + 1 + LANES * names.index(track) + best))
            yield from _lane_named(own[best].number, track if best == 0 else f"{track} ({best + 1})")
        lane = own[best]
        if lane.open:  # clip a rounding error beyond the enclosing span
            end_s = min(end_s, lane.open[-1][0])
        lane.open.append((end_s, span["depth"]))
        arguments = {key: span[key] for key in (*PLACE, "device_s") if key in span}
        yield _complete(span["name"], start_s, end_s, first_s, lane.number, arguments)


def _game(ordered: list[Mapping[str, Any]], first_s: float) -> Iterator[Event]:
    """A lane of phases with their steps. Each lasts as long as its driver's spans follow one another."""
    driven = [span for span in ordered if span["track"] == DRIVER and "phase" in span]
    if not driven:
        return
    yield from _lane_named(GAME_LANE, "game")
    for keys, label in ((PLACE[:2], "round {round} {phase}"), (PLACE, "step {step}")):
        for values, stretch in groupby(driven, itemgetter(*keys)):
            lasting, place = list(stretch), dict(zip(keys, values, strict=True))
            end_s = max(span["end_s"] for span in lasting)
            yield _complete(label.format(**place), lasting[0]["start_s"], end_s, first_s, GAME_LANE, place)


def _sample_events(record: Mapping[str, Any], first_s: float) -> Iterator[Event]:
    at = {"ts": _microseconds(record["time"] - first_s), "pid": PROCESS}
    if record["kind"] == "alert":
        yield {"ph": "i", "name": f"{record['name']}: {record['message']}", **at, "tid": GAME_LANE, "s": "p"}
        return
    for metric, value in record["metrics"].items():
        yield {"ph": "C", "name": f"{record['kind']}/{metric}", **at, "args": {metric: value}}


def _complete(
    name: str, start_s: float, end_s: float, first_s: float, lane: int, arguments: Mapping[str, Any]
) -> Event:
    start_us = _microseconds(start_s - first_s)
    lasting_us = max(0.0, _microseconds(end_s - first_s) - start_us)
    event: Event = {"ph": "X", "name": name, "ts": start_us, "dur": round(lasting_us, 3), "pid": PROCESS, "tid": lane}
    return event | ({"args": dict(arguments)} if arguments else {})


def _named(kind: str, name: Any, lane: int) -> Event:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": lane, "args": {"name": name}}


def _lane_named(lane: int, name: str) -> Iterator[Event]:
    yield _named("thread_name", name, lane)
    yield {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": lane, "args": {"sort_index": lane}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)
