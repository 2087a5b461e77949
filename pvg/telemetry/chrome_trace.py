"""Converts spans to a Chrome trace: the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.

    events = trace_events(spans, read_json_lines(run.metrics), name="my run")
    write_trace(Path("timeline.json.gz"), events)

`spans` are lines of a spans.jsonl, or a tracer's spans converted by `placed`. Each track becomes a group of lanes.
Spans nest within a lane; overlapping tasks (track "loop") get further lanes. The lane above shows the phases and steps
of the driver's spans. Below are the device samples and the event loop's lag as counters, and alerts as marks.

Invariant: spans that overlap without nesting lie in different lanes, so the viewer shows every span with its true start
and end (in microseconds since the first).

The format is Google's "Trace Event Format": complete events (X), counters (C), instants (i) and metadata (M).
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from pvg.telemetry.spans import DRIVER, Span

PROCESS = 1
GAME_LANE = 1  # thread number of the lane of phases and steps; tracks follow
ROUNDING_S = 2e-6  # precision of seconds since 1970 as floats; a child may seem to end after its parent
LEAST_UNIX_S = 1e8  # 1973; smaller times come from old runs, whose spans count from the start of their process
PLACE = ("round", "phase", "step")

# Counters of metrics.jsonl: the counter track, the factor of the unit, and the name of the line.
DEVICE_COUNTERS = {
    "cpu": ("CPU, % of the machine", 100.0, "all"),
    "process_cpu": ("CPU, cores used", 1.0, "this process"),
    "rss_bytes": ("memory, GB", 1e-9, "this process"),
    "memory_used_bytes": ("memory, GB", 1e-9, "machine"),
}
GPU_COUNTERS = {
    "utilisation": ("GPU {i}, %", 100.0, "utilisation"),
    "sm_activity": ("GPU {i}, %", 100.0, "SM activity"),
    "memory_bytes": ("GPU {i} memory, GB", 1e-9, "used"),
    "power_w": ("GPU {i} power, W", 1.0, "power"),
}
LOOP_COUNTERS = {
    "lag_p90_s": ("event loop lag, ms", 1e3, "p90"),
    "lag_p99_s": ("event loop lag, ms", 1e3, "p99"),
    "lag_max_s": ("event loop lag, ms", 1e3, "max"),
}

Event = dict[str, Any]


@dataclass(slots=True)
class _Lane:
    number: int
    open: list[tuple[float, int]] = field(default_factory=list)  # ends and depths of the enclosing spans

    def room_for(self, start_s: float, end_s: float, depth: int) -> int | None:
        """The number of spans that would enclose it; None if it would overlap one of them, or lie too deep."""
        while self.open and self.open[-1][0] <= start_s + ROUNDING_S:
            self.open.pop()
        if not self.open:
            return 0
        around_s, around_depth = self.open[-1]
        return len(self.open) if around_depth < depth and end_s <= around_s + ROUNDING_S else None


def placed(spans: Iterable[Span], **place: Any) -> Iterator[dict[str, Any]]:
    """A tracer's spans as lines of spans.jsonl. `place`: their round, phase and step."""
    for span in spans:
        record = asdict(span)
        if span.device_s is None:
            del record["device_s"]
        yield record | place


def trace_events(
    spans: Iterable[Mapping[str, Any]], metrics: Iterable[Mapping[str, Any]] = (), *, name: str = "pvg"
) -> Iterator[Event]:
    """The events of the trace. `metrics`: lines of a metrics.jsonl; lines without a counter or an alert are skipped."""
    ordered = sorted(spans, key=lambda span: (span["start_s"], span["depth"], -span["end_s"]))
    if ordered and ordered[0]["start_s"] < LEAST_UNIX_S:
        metrics = ()
    samples = [record for record in metrics if record.get("kind") in ("device", "loop", "alert") and "time" in record]
    first_s = min([span["start_s"] for span in ordered[:1]] + [record["time"] for record in samples], default=0.0)
    yield _named("process_name", name, 0)
    yield from _game(ordered, first_s)
    yield from _tracks(ordered, first_s)
    for record in samples:
        yield from _sampled(record, first_s)


def write_trace(path: Path, events: Iterable[Event]) -> int:
    """Write the events, compressed if `path` ends in .gz; returns their number."""
    count = 0
    compressed = path.suffix == ".gz"
    with gzip.open(path, "wb", compresslevel=6) if compressed else open(path, "wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for count, event in enumerate(events, start=1):
            file.write((b",\n" if count > 1 else b"") + orjson.dumps(event))
        file.write(b"\n]}\n")
    return count


# --- lanes -----------------------------------------------------------------------------------------------------------


def _tracks(ordered: list[Mapping[str, Any]], first_s: float) -> Iterator[Event]:
    lanes: dict[str, list[_Lane]] = {}
    tracks = dict.fromkeys(span.get("track", DRIVER) for span in ordered)
    names = sorted(tracks, key=lambda track: (track != DRIVER, track != "loop", track))
    block = 1000  # lanes of one track have adjacent numbers, so that the viewer groups them
    start = {track: GAME_LANE + 1 + block * place for place, track in enumerate(names)}
    for span in ordered:
        track = span.get("track", DRIVER)
        lanes_of_track = lanes.setdefault(track, [])
        lane = _fitting(lanes_of_track, span)
        if lane is None:
            lane = _Lane(start[track] + len(lanes_of_track))
            lanes_of_track.append(lane)
            yield from _lane_named(
                lane.number, track if len(lanes_of_track) == 1 else f"{track} ({len(lanes_of_track)})"
            )
        start_s, end_s = span["start_s"], span["end_s"]
        if lane.open:  # clip a rounding error beyond the enclosing span
            end_s = min(end_s, lane.open[-1][0])
        lane.open.append((end_s, span["depth"]))
        arguments = {key: span[key] for key in (*PLACE, "device_s") if key in span}
        yield _complete(span["name"], start_s, end_s, first_s, lane.number, arguments)


def _fitting(lanes: list[_Lane], span: Mapping[str, Any]) -> _Lane | None:
    """The lane in which the span lies deepest, or the first of equals; this is the lane of its parent."""
    best, most = None, -1
    for lane in lanes:
        around = lane.room_for(span["start_s"], span["end_s"], span["depth"])
        if around is not None and around > most:
            best, most = lane, around
    return best


def _game(ordered: list[Mapping[str, Any]], first_s: float) -> Iterator[Event]:
    """A lane of phases with their steps. Each lasts as long as its driver's spans follow one another."""
    driven = [span for span in ordered if span.get("track", DRIVER) == DRIVER and "phase" in span]
    if not driven:
        return
    yield from _lane_named(GAME_LANE, "game")
    for keys, label in ((PLACE[:2], "round {round} {phase}"), (PLACE, "step {step}")):
        for values, stretch in groupby(driven, partial(_values, keys)):
            lasting = list(stretch)
            if None not in values:
                place = dict(zip(keys, values, strict=True))
                end_s = max(span["end_s"] for span in lasting)
                yield _complete(label.format(**place), lasting[0]["start_s"], end_s, first_s, GAME_LANE, place)


def _values(keys: Sequence[str], span: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(span.get(key) for key in keys)


# --- samples ---------------------------------------------------------------------------------------------------------


def _sampled(record: Mapping[str, Any], first_s: float) -> Iterator[Event]:
    at_us = _microseconds(record["time"] - first_s)
    if record["kind"] == "alert":
        text = f"{record.get('name')}: {record.get('message')}"
        yield {"ph": "i", "name": text, "ts": at_us, "pid": PROCESS, "tid": GAME_LANE, "s": "p"}
        return
    counters: dict[str, dict[str, float]] = {}
    for metric, value in record.get("metrics", {}).items():
        shown = LOOP_COUNTERS.get(metric) if record["kind"] == "loop" else _device_counter(metric)
        if shown is not None and value is not None:
            track, factor, line = shown
            counters.setdefault(track, {})[line] = value * factor
    for track, lines in counters.items():
        yield {"ph": "C", "name": track, "ts": at_us, "pid": PROCESS, "args": lines}


def _device_counter(metric: str) -> tuple[str, float, str] | None:
    if metric in DEVICE_COUNTERS:
        return DEVICE_COUNTERS[metric]
    gpu, _, quantity = metric.partition("_")
    if not gpu.startswith("gpu") or quantity not in GPU_COUNTERS:
        return None
    track, factor, line = GPU_COUNTERS[quantity]
    return track.format(i=gpu.removeprefix("gpu")), factor, line


# --- events ----------------------------------------------------------------------------------------------------------


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
