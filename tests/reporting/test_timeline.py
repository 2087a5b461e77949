"""The timeline of some steps: which are chosen, and how their spans are laid out in lanes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import orjson
import pytest
from page_checks import Page
from run_samples import begin, step, telemetered, tell

from pvg.reporting import run_page
from pvg.reporting.run_page import StepWindow, choose_windows, lane_of, read_windows, timeline
from pvg.reporting.run_summary import read_run


def chosen() -> StepWindow:
    return StepWindow(0, "train_prover", (1,))


def span(name: str, start: float, end: float, track: str = "driver") -> dict[str, Any]:
    place = {"round": 0, "phase": "train_prover", "step": 1, "depth": 0}
    return {"name": name, "start_s": start, "end_s": end, "track": track, **place}


def test_the_middle_of_the_middle_round_is_chosen(tmp_path: Path) -> None:
    run = begin(tmp_path)
    for round_ in range(3):
        tell(run, *(step("train_prover", number, round_=round_) for number in range(1, 12)))
        tell(run, step("checkpoint", 64, round_=round_))
    assert choose_windows(read_run(run).steps) == [
        StepWindow(1, "train_prover", (5, 6, 7)),
        StepWindow(1, "checkpoint", (64,)),
    ]


def test_a_timeline_has_a_lane_per_track_and_marks_its_steps(tmp_path: Path) -> None:
    run = telemetered(tmp_path)
    (window,), damaged = read_windows(run.spans, choose_windows(read_run(run).steps))
    assert damaged == 0
    page = Page(timeline(window))
    assert page.wrong == []
    assert "forward backward: 300 ms" in [attributes.get("title") for _, attributes in page.tags]
    assert page.text.index("step 1 step 2 driver") < page.text.index("loop") < page.text.index("writer")


def test_nested_spans_lie_below_each_other_and_short_neighbours_are_one_block() -> None:
    spans = [span("rollout", 0.0, 1.0), *(span("decode", 0.001 * n, 0.001 * n + 0.0008) for n in range(100))]
    (rollout, decode), left_out = lane_of(spans, 0.0, 1.0)
    assert (rollout.row, decode.row, decode.count, left_out) == (0, 1, 100, 0)
    assert decode.worked_s == pytest.approx(0.08)


def test_no_time_is_lost_in_a_lane_and_nothing_overlaps_in_a_row() -> None:
    spans = [span(f"p{n % 3}", 0.1 * n, 0.1 * n + 0.1 * (n % 4 + 1)) for n in range(60)]
    blocks, _ = lane_of(spans, 0.0, 7.0)
    assert sum(block.worked_s for block in blocks) == pytest.approx(sum(s["end_s"] - s["start_s"] for s in spans))
    for row in {block.row for block in blocks}:
        own = [block for block in blocks if block.row == row]
        assert all(b.start_s >= a.end_s - 1e-6 for a, b in itertools.pairwise(own))


def test_too_many_at_once_are_counted() -> None:
    window = StepWindow(0, "train_prover", (1,), [span("grade", 0.0, 1.0)] * (run_page.MOST_ROWS + 5))
    assert "5 spans are not drawn" in timeline(window)


def test_spans_without_a_track_and_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    good = b'{"name":"rollout","start_s":0.1,"end_s":0.2,"depth":0,"round":0,"phase":"train_prover","step":1}\n'
    path.write_bytes(good + b'{"name":"x","step":1\n' + b'{"step":1}\n' + good + b'{"name":"torn","step":1')
    ((window,), damaged) = read_windows(path, [chosen()])
    assert damaged == 2
    assert "driver" in Page(timeline(window)).text
    assert read_windows(tmp_path / "none", [chosen()]) == ([], 0)


def test_the_spans_of_other_steps_are_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "spans.jsonl"
    rows = ({**span("a", float(n), n + 0.5), "step": n} for n in range(1, 2001))
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    parsed = []
    original = run_page._row
    monkeypatch.setattr(run_page, "_row", lambda line: parsed.append(line) or original(line))
    ((window,), _) = read_windows(path, [StepWindow(0, "train_prover", (11, 12))])
    assert len(parsed) == len(window.spans) == 2
