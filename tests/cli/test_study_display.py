"""What is shown while a study is played."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from calling import Clock
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent.parent / "study"))

from study_samples import SMALL, small

from pvg.study.playing import CellProgress
from pvg_cli.study import StudyDisplay

ROUND = ({"helpful_accuracy": 0.61},)


def shown_study(console: Console, clock: Clock) -> StudyDisplay:
    plan = small(SMALL)
    return StudyDisplay(plan, {cell.name: CellProgress("new") for cell in plan.cells}, console, clock)


def test_the_time_left_is_that_of_the_steps_left_at_the_rate_so_far() -> None:
    clock = Clock()
    shown = shown_study(Console(file=io.StringIO()), clock)
    first, second, third, _ = shown.plan.cells
    assert shown.seconds_left() is None
    clock.now = 10.0
    shown.progressed(first, CellProgress("complete", done=16))
    shown.progressed(second, CellProgress("unfinished", 0, "train_prover", 4))
    assert shown.seconds_left() == 10.0 * (12 + 16 + 16) / 20
    shown.progressed(third, CellProgress("unfinished", reason="It broke."))  # no process continues it
    assert shown.seconds_left() == 10.0 * (12 + 16) / 20


def test_lines_tell_what_happens_and_that_something_does() -> None:
    clock, stream = Clock(), io.StringIO()
    lines = shown_study(Console(file=stream), clock)
    first, second, *_ = lines.plan.cells
    lines.began(first, "train", CellProgress("unfinished", done=8))
    lines.waited()
    clock.now = StudyDisplay.EVERY_S
    lines.waited()
    lines.ended(first, "complete", CellProgress("complete", done=16, rounds=ROUND), 3.0)
    lines.began(second, "evaluate", CellProgress("played", done=16))
    lines.ended(second, "failed", CellProgress("played", done=16, reason="It broke."), 1.0)
    lines.stopping(1)
    told = stream.getvalue().splitlines()
    expected = ["resumes", "still playing", "helpful_accuracy=61.0%", "is evaluated", "failed: It broke.", "stopping 1"]
    for line, said in zip(told, expected, strict=True):
        assert said in line


def test_a_terminal_has_a_panel_with_the_games_that_play_and_failures_above_it() -> None:
    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    with shown_study(console, Clock()) as display:
        first, second, *_ = display.plan.cells
        display.began(first, "train", CellProgress("new"))
        display.progressed(first, CellProgress("unfinished", 1, "train_prover", 12, ROUND))
        display.ended(second, "failed", CellProgress("unfinished", done=3, reason="It broke."), 1.0)
        plain = Console(width=100, file=io.StringIO())
        with plain.capture() as captured:
            plain.print(display.drawn())
    for said in ("pvg study small", "0/4 games", "75%", "61.0 %", "1 failed"):
        assert said in captured.get(), said
    assert "failed: It broke." in console.file.getvalue()  # type: ignore[attr-defined]
