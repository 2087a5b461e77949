"""Reading logs: other programs' lines, damage of every kind, compressed and cut off."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest
from event_logs import steps
from hypothesis import given
from hypothesis import strategies as st

from pvg.reporting.diagnosis import diagnose
from pvg.reporting.diagnosis.log_events import LONGEST_LINE, EventReader, LineCounts, MalformedLineError, parse_line
from pvg.telemetry.events import format_event


def read(content: bytes) -> tuple[list[str], LineCounts]:
    counts = LineCounts()
    events = list(EventReader(io.BytesIO(content), "x.log", counts))
    return [f"{event.tag}:{event.name}:{event.line}" for event in events], counts


def test_every_line_the_product_writes_is_read() -> None:
    line = format_event("alert", name="collapse", message="It fell [gen] t=3 wall_ms=-4\nbadly", step=7, empty="")
    event = parse_line(line, 0, 1)
    assert event is not None
    assert (event.tag, event.number("step")) == ("alert", 7.0)
    assert event.fields["message"] == "It fell [gen] t=3 wall_ms=-4\\nbadly"
    assert event.number("wall_ms") is None


def test_a_tag_behind_another_programs_prefix() -> None:
    event = parse_line("INFO 11-21 10:00:00 worker.py:12] [weights] event=server.recv t=3.5 trace=a", 0, 1)
    assert event is not None
    assert (event.name, event.t) == ("server.recv", 3.5)
    assert event.text.startswith("[weights]")


@pytest.mark.parametrize(
    "text",
    [
        "[ckpt] event=write.done write_ms=3",
        "[ckpt] t=abc event=write.done write_ms=3",
        "[ckpt] t=nan event=write.done",
        "[ckpt] t=inf event=write.done",
        "[ckpt] t=-7 event=write.done",
        "[ckpt]",
    ],
)
def test_a_line_of_ours_without_a_time_is_malformed(text: str) -> None:
    with pytest.raises(MalformedLineError):
        parse_line(text, 0, 1)


def test_numbers_that_cannot_be_are_malformed_and_counted_once(tmp_path: Path) -> None:
    lines = [
        "[ckpt] t=1 event=write.done write_ms=nan",
        "[weights] t=2 event=client.done trace=a wall_ms=-40 rpc_ms=1 queue_ms=1",
        "[step] t=3 event=done phase=p wall_ms=9 train_ms=x idle_ms=1",
        "[weights] t=4 event=client.done trace=b wall_ms=5 rpc_ms=5 queue_ms=-0.00002",
    ]
    (tmp_path / "x.log").write_text("\n".join(lines))
    found = diagnose([tmp_path / "x.log"])
    counts = found.tally.lines
    assert (counts.read, counts.events, counts.malformed) == (4, 1, 3)
    assert counts.example.startswith("x.log:1: write_ms is out of range: [ckpt] t=1")
    assert found.timings["queue_ms"].max == 0.0  # the difference of two times, a hair below zero
    assert set(found.timings) == {"wall_ms", "rpc_ms", "queue_ms"}


def test_damage_is_counted_and_the_rest_is_read() -> None:
    content = b"".join(
        [
            b"[run] t=1 event=start\n",
            b"\x00\xff\xfe[gen] t=2 event=batch.start inflight=3\n",  # binary
            b"[gen] t=2 " + b"x" * (3 * LONGEST_LINE) + b"\n",  # far too long
            b"\n",
            b"Traceback (most recent call last):\r\n",
            b"[phase] t=3 event=start\r\n",
            b"[ckpt] t=4 event=write.do",  # torn: still a line with a time
        ]
    )
    events, counts = read(content)
    assert events == ["run:start:1", "phase:start:6", "ckpt:write.do:7"]
    assert (counts.read, counts.malformed, counts.other) == (7, 2, 1)
    assert counts.example.startswith("x.log:2: binary")


def test_a_log_cannot_move_the_readers_cursor() -> None:
    event = parse_line_of_reader(b"[alert] t=1 name=\x1b[2Jbad\xe2\x80\xae message=x\n")
    assert "\x1b" not in event
    assert "\u202e" not in event


def parse_line_of_reader(line: bytes) -> str:
    (event,) = EventReader(io.BytesIO(line), "x", LineCounts())
    return event.text


@given(st.binary(max_size=400))
def test_no_bytes_are_fatal(content: bytes) -> None:
    _, counts = read(content)
    assert counts.events + counts.other + counts.malformed <= counts.read


def test_compressed_logs_by_their_content_and_cut_off(tmp_path: Path) -> None:
    plain = steps().write(tmp_path / "events.log")
    packed = gzip.compress(plain.read_bytes())
    (tmp_path / "odd-name").write_bytes(packed)
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) // 2])
    whole = diagnose([tmp_path / "odd-name"])
    assert whole.timings == diagnose([plain]).timings
    cut = diagnose([tmp_path / "cut.gz"])
    assert 0 < cut.tally.lines.events < whole.tally.lines.events
    assert any("ends in the middle" in note for note in cut.notes)


def test_an_empty_log(tmp_path: Path) -> None:
    (tmp_path / "empty.log").write_bytes(b"")
    found = diagnose([tmp_path / "empty.log"])
    assert (found.findings, found.seconds, found.timings) == ((), 0.0, {})
