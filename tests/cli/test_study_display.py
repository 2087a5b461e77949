"""What is shown while a study is played."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent.parent / "study"))

from study_samples import SMALL, finish, small

from pvg.study.playing import CellProgress
from pvg.study.results import collect
from pvg_cli.study_display import SECONDS_BETWEEN_LINES, StudyBoard, StudyWatcher, draw, results_text

ROUND = ({"helpful_accuracy": 0.61},)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def board(clock: Clock) -> StudyBoard:
    plan = small(SMALL)
    return StudyBoard(plan, {cell.name: CellProgress("new") for cell in plan.cells}, clock)


def test_the_time_left_is_that_of_the_steps_left_at_what_a_step_has_taken_a_process() -> None:
    clock = Clock()
    shown = board(clock)
    shown.plan = dataclasses.replace(shown.plan, processes=2)
    first, second, third, _ = shown.cells.values()
    assert shown.eta() is None
    shown.update(first, CellProgress("new"), "playing")
    shown.update(second, CellProgress("new"), "playing")
    assert shown.eta() is None
    clock.now = 10.0
    shown.update(first, CellProgress("complete", done=16), "complete")
    shown.update(second, CellProgress("unfinished", 0, "train_prover", 4), "playing")
    # 20 steps have taken two processes 10 s each; 12, 16 and 16 are left for both.
    assert shown.eta() == 20.0 * (12 + 16 + 16) / 20 / 2
    shown.update(third, CellProgress("unfinished", reason="It broke."), "failed")  # no process continues it
    assert shown.eta() == 20.0 * (12 + 16) / 20 / 2
    assert shown.time_left() == "14 s left"


def test_what_was_there_before_says_nothing_of_the_rate() -> None:
    plan, clock = small(SMALL), Clock()
    now = {cell.name: CellProgress("complete", done=16) for cell in plan.cells} | {
        "src-seed-001": CellProgress("unfinished", 1, "mint", 8)
    }
    shown = StudyBoard(plan, now, clock)
    shown.update(plan.cells[3], CellProgress("unfinished", 1, "mint", 8), "playing")
    clock.now = 6.0
    assert shown.eta() is None
    shown.update(plan.cells[3], CellProgress("unfinished", 1, "train_prover", 12))
    assert shown.eta() == 6.0


def test_the_panel_shows_every_cell_and_the_numbers_of_those_that_play() -> None:
    clock = Clock()
    shown = board(clock)
    first, second, third, _ = shown.cells.values()
    shown.update(first, CellProgress("complete", done=16, rounds=ROUND), "complete")
    shown.update(second, CellProgress("unfinished", 1, "train_prover", 12, ROUND), "playing")
    shown.update(third, CellProgress("new", reason="It broke."), "failed")
    clock.now = 60.0
    for width in (60, 80, 120):
        console = Console(width=width, file=io.StringIO(), force_terminal=False)
        with console.capture() as captured:
            console.print(draw(shown, width))
        text = captured.get()
        assert all(len(line) <= width for line in text.splitlines())
        for said in ("pvg study small", "1/4 games", "75%", "✓", "✗", "○", "src-seed-000", "61.0 %"):
            assert said in text, (width, said)
    shown.stopping = True
    with console.capture() as captured:
        console.print(draw(shown, 120))
    assert "stopping at commit points" in captured.get()


def test_lines_tell_what_happens_and_that_something_does() -> None:
    clock, stream = Clock(), io.StringIO()
    shown = board(clock)
    lines = StudyWatcher(shown, Console(file=stream))
    first, second, *_ = shown.cells.values()
    lines.began(first, "train", CellProgress("unfinished", done=8))
    lines.waited()
    clock.now = SECONDS_BETWEEN_LINES
    lines.waited()
    lines.ended(first, "complete", CellProgress("complete", done=16, rounds=ROUND), 3.0)
    lines.began(second, "evaluate", CellProgress("played", done=16))
    lines.ended(second, "failed", CellProgress("played", done=16, reason="It broke."), 1.0)
    lines.stopping(1)
    told = stream.getvalue().splitlines()
    expected = [
        "cgc-seed-000 resumes",
        "still playing",
        "complete after 3.0 s  helpful_accuracy=61.0%",
        "src-seed-000 is evaluated",
        "failed: It broke.",
        "stopping 1",
    ]
    for line, said in zip(told, expected, strict=True):
        assert said in line
    assert "[1/4, " in told[2]


def test_the_display_prints_failures_above_the_panel() -> None:
    shown = board(Clock())
    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    cell = next(iter(shown.cells.values()))
    with StudyWatcher(shown, console) as display:
        display.began(cell, "train", CellProgress("new"))
        display.progressed(cell, CellProgress("unfinished", done=3))
        display.ended(cell, "failed", CellProgress("unfinished", done=3, reason="It broke."), 1.0)
        display.stopping(0)
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert "cgc-seed-000 failed: It broke." in written
    assert shown.stopping


def test_80_columns_show_whole_names_and_the_limits_of_a_table() -> None:
    plan = small(SMALL.replace('name = "src"', 'name = "longer-by-180"').replace("seeds = 2", "seeds = 6"))
    for cell in plan.cells:
        shares = [0.6, 0.7 + 0.01 * cell.seed * (cell.arm == "cgc")]
        finish(cell, *({"helpful_accuracy": share, "fooled_rate": 0.3} for share in shares))
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    with console.capture() as captured:
        console.print(results_text(collect(plan, "pvg study small"), {}))
    text = captured.get()
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.count("longer-by-180") == 3 + 2 + 2 + 2  # a row per measure in each table
    heads = [line.split() for line in text.splitlines() if "measure" in line.split()]
    assert heads[2][:3] + heads[2][-3:] == ["measure", "arm", "differs", "seeds", "p", "Holm"]
    said = " ".join(text.split())
    assert "Holm's p is corrected for the arms of one measure" in said
    assert "6 seeds cannot show a significant trend over the rounds" in said
