"""The steps of the Gantt chart: which are chosen, and how spans are laid out in lanes."""

from __future__ import annotations

import itertools
from pathlib import Path

import orjson
import pytest
from page_checks import Page
from run_samples import begin, step, telemetered, tell

from pvg.reporting import time_sections
from pvg.reporting.run_summary import read_run
from pvg.reporting.time_sections import ChosenSteps, choose_windows, read_windows, timeline

CHOICE = ChosenSteps(0, "train_prover", (1,))


def write(path: Path, *spans: tuple[str, float, float, str]) -> Path:
    place = {"round": 0, "phase": "train_prover", "step": 1, "depth": 0}
    rows = [{"name": name, "start_s": a, "end_s": b, "track": track, **place} for name, a, b, track in spans]
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def test_the_middle_of_the_middle_round_is_chosen(tmp_path: Path) -> None:
    run = begin(tmp_path)
    for round_ in range(3):
        tell(run, *(step("train_prover", number, round_=round_) for number in range(1, 12)))
        tell(run, step("checkpoint", 64, round_=round_))
    assert choose_windows(read_run(run).steps) == [
        ChosenSteps(1, "train_prover", (5, 6, 7)),
        ChosenSteps(1, "checkpoint", (64,)),
    ]


def test_nested_spans_lie_below_and_concurrent_ones_beside_each_other(tmp_path: Path) -> None:
    run = telemetered(tmp_path)
    (window,), damaged = read_windows(run.spans, choose_windows(read_run(run).steps))
    assert damaged == 0
    assert window.starts == ((1, 0.0), (2, 1.0))
    assert window.seconds == pytest.approx(1.8)
    driver, loop, writer = window.lanes
    assert (driver.track, loop.track, writer.track) == ("driver", "loop", "writer")
    assert [(b.name, b.row) for b in driver.blocks[:3]] == [("rollout", 0), ("decode", 1), ("forward_backward", 0)]
    assert [(b.name, b.row) for b in loop.blocks[:2]] == [("grade", 0), ("grade", 1)]
    page = Page(timeline(window))
    assert page.wrong == []
    assert "forward backward: 300 ms" in [attributes.get("title") for _, attributes in page.tags]


def test_short_neighbours_are_drawn_as_one_that_says_how_many(tmp_path: Path) -> None:
    spans = [("decode", 0.001 * n, 0.001 * n + 0.0008, "driver") for n in range(100)]
    path = write(tmp_path / "spans.jsonl", *spans, ("rollout", 0.5, 1.0, "driver"))
    ((window,), _) = read_windows(path, [CHOICE])
    first, second = window.lanes[0].blocks
    assert (first.name, first.count, first.worked_s) == ("decode", 100, pytest.approx(0.08))
    assert second.name == "rollout"


def test_no_time_is_lost_in_a_lane_and_nothing_overlaps_in_a_row(tmp_path: Path) -> None:
    spans = [(f"p{n % 3}", 0.1 * n, 0.1 * n + 0.1 * (n % 4 + 1), "loop") for n in range(60)]
    ((window,), _) = read_windows(write(tmp_path / "s", ("rollout", 0.0, 7.0, "driver"), *spans), [CHOICE])
    lane = window.lanes[1]
    assert sum(b.worked_s for b in lane.blocks) == pytest.approx(sum(b - a for _, a, b, _ in spans))
    for row in range(lane.rows):
        blocks = [b for b in lane.blocks if b.row == row]
        assert all(b.start_s >= a.end_s - 1e-6 for a, b in itertools.pairwise(blocks))


def test_too_many_at_once_are_counted(tmp_path: Path) -> None:
    spans = [("grade", 0.0, 1.0, "loop")] * (time_sections.MOST_ROWS + 5)
    ((window,), _) = read_windows(write(tmp_path / "s", ("rollout", 0.0, 1.0, "driver"), *spans), [CHOICE])
    assert window.lanes[1].left_out == 5
    assert "5 spans are not drawn" in timeline(window)


def test_old_spans_without_track_and_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    good = b'{"name":"rollout","start_s":0.1,"end_s":0.2,"depth":0,"round":0,"phase":"train_prover","step":1}\n'
    path.write_bytes(good + b'{"name":"x","step":1\n' + b'{"step":1}\n' + good + b'{"name":"torn","step":1')
    ((window,), damaged) = read_windows(path, [CHOICE])
    assert damaged == 2
    assert [lane.track for lane in window.lanes] == ["driver"]


def test_the_spans_of_other_steps_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long file only the chosen steps are parsed: a step's number is found before its line is read as JSON."""
    path = tmp_path / "spans.jsonl"
    place = '"depth":0,"track":"driver","round":0,"phase":"train_prover"'
    rows = (f'{{"name":"a","start_s":{n},"end_s":{n}.5,{place},"step":{n}}}\n' for n in range(1, 2001))
    path.write_text("".join(rows))
    parsed = []
    original = time_sections._row
    monkeypatch.setattr(time_sections, "_row", lambda line: parsed.append(line) or original(line))
    ((window,), _) = read_windows(path, [ChosenSteps(0, "train_prover", (11, 12))])
    assert len(parsed) == 2
    assert window.seconds == pytest.approx(1.5)


def test_without_a_file_there_is_nothing(tmp_path: Path) -> None:
    assert read_windows(tmp_path / "none", [CHOICE]) == ([], 0)
