"""The Chrome trace: true times, nesting in every lane, lanes for what overlaps, counters, phases and steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvg.bench.profiling import GAME_LANE, Event, trace_events, write_trace

SECOND = 1e6  # microseconds
BASE = 1_700_000_000.0  # seconds since 1970


def told(
    name: str, start_s: float, end_s: float, depth: int = 0, track: str = "driver", **place: Any
) -> dict[str, Any]:
    return {"name": name, "start_s": start_s, "end_s": end_s, "depth": depth, "track": track, **place}


def complete(events: list[Event]) -> dict[str, Event]:
    return {event["name"]: event for event in events if event["ph"] == "X"}


def lane_names(events: list[Event]) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


def check_nesting(events: list[Event]) -> None:
    """What the viewer needs: two spans of a lane are apart, or one lies in the other."""
    lanes: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for lane in lanes.values():
        lane.sort(key=lambda times: (times[0], -times[1]))
        open_until: list[float] = []
        for start, end in lane:
            while open_until and open_until[-1] <= start + 2.1:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.11
            open_until.append(end)


def test_overlapping_tasks_lie_in_lanes_of_their_own() -> None:
    """Two tasks on the loop: the second begins inside the first, and each child stays with its parent."""
    spans = [
        told("a", 0.0, 4.0, 0, "loop"),
        told("b", 1.0, 3.0, 0, "loop"),  # would fit inside a, and is no part of it
        told("a.child", 1.5, 3.9, 1, "loop"),
        told("c", 3.5, 9.0, 0, "loop"),
        told("worker", 0.0, 9.0, 0, "pvg-torch_0"),
        told("driver", 0.0, 9.0),
    ]
    events = list(trace_events(spans))
    named = complete(events)
    lanes = lane_names(events)
    assert named["a"]["tid"] == named["a.child"]["tid"] != named["b"]["tid"]
    assert named["c"]["tid"] == named["b"]["tid"]  # the second lane is free again
    assert list(dict(sorted(lanes.items())).values()) == ["driver", "loop", "loop (2)", "pvg-torch_0"]
    check_nesting(events)


spans_of_tasks = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(0, 3), st.sampled_from(["driver", "loop", "t1"])),
    max_size=40,
)


@given(spans_of_tasks)
def test_any_spans_nest_in_every_lane_and_keep_their_times(drawn: list[tuple[int, int, int, str]]) -> None:
    spans = [
        told(f"s{number}", 1e9 + start, 1e9 + start + lasting, depth, track)
        for number, (start, lasting, depth, track) in enumerate(drawn)
    ]
    events = list(trace_events(spans))
    check_nesting(events)
    first = min((start for start, *_ in drawn), default=0)
    for number, (start, lasting, _, _) in enumerate(drawn):
        event = complete(events)[f"s{number}"]
        assert event["ts"] == pytest.approx((start - first) * SECOND, abs=1.0)
        assert event["dur"] == pytest.approx(lasting * SECOND, abs=2.5)


def test_phases_and_steps_have_a_lane() -> None:
    def step(number: int, start: float) -> list[dict[str, Any]]:
        place = {"round": 0, "phase": "mint", "step": number}
        return [told("x", start, start + 1, **place), told("y", start + 1, start + 2, **place)]

    spans = [*step(1, 0.0), *step(2, 2.0), told("z", 4.0, 5.0, round=0, phase="train_prover", step=1)]
    spans.append(told("elsewhere", 0.0, 99.0, track="loop", round=0, phase="mint", step=1))
    events = [event for event in trace_events(spans) if event.get("tid") == GAME_LANE and event["ph"] == "X"]
    shown = sorted((event["ts"] / SECOND, event["dur"] / SECOND, event["name"]) for event in events)
    assert shown == [
        (0.0, 2.0, "step 1"),
        (0.0, 4.0, "round 0 mint"),
        (2.0, 2.0, "step 2"),
        (4.0, 1.0, "round 0 train_prover"),
        (4.0, 1.0, "step 1"),
    ]


def test_counters_and_alerts() -> None:
    metrics = [
        {"kind": "device", "time": BASE + 10.0, "metrics": {"cpu": 0.5, "gpu0_utilisation": 0.25}},
        {"kind": "loop", "time": BASE + 11.0, "metrics": {"lag_p99_s": 0.004}},
        {"kind": "alert", "time": BASE + 12.0, "name": "collapse", "message": "It fell."},
        {"kind": "step", "time": BASE + 13.0, "metrics": {"cpu": 1.0}},
    ]
    events = list(trace_events([told("a", BASE + 9.0, BASE + 12.0)], metrics))
    counters = [(event["name"], event["ts"], event["args"]) for event in events if event["ph"] == "C"]
    assert counters == [
        ("device/cpu", SECOND, {"cpu": 0.5}),
        ("device/gpu0_utilisation", SECOND, {"gpu0_utilisation": 0.25}),
        ("loop/lag_p99_s", 2 * SECOND, {"lag_p99_s": 0.004}),
    ]
    assert [(event["name"], event["ts"]) for event in events if event["ph"] == "i"] == [
        ("collapse: It fell.", 3 * SECOND)
    ]


def test_the_file_is_one_json_document(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    count = write_trace(path, trace_events([told('quoted "name"', 0.0, 1.0)], name="run\n1"))
    content = gzip.decompress(path.read_bytes())
    document = json.loads(content)
    assert len(document["traceEvents"]) == count == 4
    assert document == orjson.loads(content)
