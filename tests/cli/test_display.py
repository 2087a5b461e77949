"""What is shown while a run plays: its numbers, the panel, and the lines."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
from calling import Clock
from rich.console import Console, RenderableType
from run_samples import played

from pvg.reporting.run_summary import read_run
from pvg.telemetry.events import PhaseInfo, Progress, Sample
from pvg_cli.run_display import RunDisplay


def display(rounds: int = 2, **options: Any) -> tuple[RunDisplay, Clock]:
    clock = Clock()
    return RunDisplay("modchain-2", rounds, Console(file=io.StringIO()), clock=clock, **options), clock


def info(phase: str, total: int, *, round_: int = 0, done: int = 0, rounds: int = 2) -> PhaseInfo:
    return PhaseInfo(round_, rounds, phase, "steps", total, done)


def drawn(state: RunDisplay, width: int) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width).print(state.render(width))
    return stream.getvalue().splitlines()


def test_rate_and_eta_count_only_what_this_process_did() -> None:
    state, clock = display()
    state.phase_started(info("train_prover", 60, done=20))
    assert state.rate() is None
    assert state.phase_eta() is None
    clock.now = 10.0
    state.progressed(Progress(25))
    assert state.rate() == pytest.approx(0.5)
    assert state.phase_eta() == pytest.approx(70.0)
    clock.now = 12.0
    assert state.phase_eta() == pytest.approx(68.0)


def test_the_estimate_of_a_growing_game_grows_with_its_rounds() -> None:
    state, clock = display(3, effort=lambda round_: round_ + 1)
    for phase, seconds in (("mint", 2.0), ("train_verifier", 5.0), ("train_prover", 20.0), ("checkpoint", 3.0)):
        state.phase_started(info(phase, 10, rounds=3))
        clock.now += seconds
        state.phase_finished(info(phase, 10, rounds=3), {})
    state.phase_started(info("mint", 20, round_=1, rounds=3))
    clock.now += 2.0
    state.progressed(Progress(10))
    # the rest of this mint; then mint and verifier twice and three times as long, the other phases as long as before
    assert state.game_eta() == pytest.approx(2.0 + (2 * 5.0 + 20.0 + 3.0) + (3 * 2.0 + 3 * 5.0 + 20.0 + 3.0))


def test_a_metric_is_followed_through_the_phase_it_belongs_to() -> None:
    state, _ = display()
    state.phase_started(info("mint", 1))
    state.progressed(Progress(1, {"helpful_accuracy": 0.1}))
    assert state.latest("helpful_accuracy") == 0.1
    state.phase_started(info("train_prover", 2))
    state.progressed(Progress(1, {"helpful_accuracy": 0.5}))
    state.progressed(Progress(2, {"helpful_accuracy": float("nan")}))
    state.phase_finished(info("train_prover", 2), {"helpful_accuracy": 0.5})
    state.phase_started(info("mint", 1, round_=1))
    state.progressed(Progress(1, {"helpful_accuracy": 0.1}))
    assert len(state.series["helpful_accuracy"]) == 2
    assert state.latest("helpful_accuracy") == 0.5


def test_the_panels_auc_is_that_of_the_table_once_a_round_has_one() -> None:
    """After its training, a verifier has another AUC, on the mint's held-out problems."""
    state, _ = display()
    for round_ in (0, 1):
        state.phase_started(info("train_verifier", 1, round_=round_))
        state.phase_finished(info("train_verifier", 1, round_=round_), {"verifier_auc": 0.9})
        assert state.latest("verifier_auc") == (0.8 if round_ else 0.9)
        state.phase_started(info("checkpoint", 1, round_=round_))
        state.progressed(Progress(1, {"verifier_auc": 0.8}))
        assert state.latest("verifier_auc") == 0.8


def test_a_resumed_run_recalls_its_rounds_and_lines(tmp_path: Path) -> None:
    state, _ = display()
    state.recall(read_run(played(tmp_path)))
    assert state.rounds_done[0]["helpful_accuracy"] == 0.875
    assert list(state.series["helpful_accuracy"]) == [0.5, 0.75]
    assert list(state.series["n"]) == [8.0]
    assert state.alerts == [("collapse", "It fell.")]


SAMPLES = (
    Sample("helpful", "7+5+8+3+6?", "7+5=2;2+8=0;0+3=3;3+6=9;A9", "correct", 3.25, True),
    Sample("sneaky", "How many\n" * 90, "Step\x1b[31m by\nstep " * 40 + "A8", "wrong", -1.5, False),
)


def full_display() -> RunDisplay:
    state, clock = display()
    for phase in ("mint", "train_verifier", "train_prover"):
        state.phase_started(info(phase, 2000))
        for number in (1, 2):
            clock.now += 1.0
            metrics = {"helpful_accuracy": 0.5, "verifier_auc": 0.9, "score_gap": -12.345, "tokens_per_s": 123456.0}
            state.progressed(Progress(1000 * number, metrics))
        state.phase_finished(info(phase, 2000), {})
    state.round_finished(0, {"helpful_accuracy": 1.0, "verifier_auc": 0.999, "base_helpful_accuracy": 0.5})
    state.alerted("goodharting", "word " * 40)
    state.phase_started(info("train_prover", 2000, round_=1))
    clock.now += 1.0
    state.progressed(Progress(700, {"helpful_accuracy": 0.5}, samples=SAMPLES))
    return state


def test_the_panel_is_a_whole_rectangle() -> None:
    for state, width in ((display()[0], 120), (full_display(), 78)):
        lines = drawn(state, width)
        assert {len(line) for line in lines} == {width}
        assert lines[0].startswith("╭─ pvg modchain-2")
        assert lines[-1].endswith("╯")


def test_the_panel_shows_a_solution_of_each_role_and_keeps_it_for_a_while() -> None:
    state, clock = display()
    state.phase_started(info("train_prover", 60))
    state.progressed(Progress(1, samples=SAMPLES))
    clock.now += 1.0
    state.progressed(Progress(2, samples=SAMPLES[:1]))
    for width in (78, 118):
        text = "\n".join(drawn(state, width))
        for said in ("7+5=2;2+8=0;0+3=3;3+6=9;A9", "correct, accepted", "wrong, refused", "A8", "step 1"):
            assert said in text
        assert "\x1b" not in text
    clock.now += 10.0
    state.progressed(Progress(3, samples=SAMPLES[:1]))
    assert "refused" not in "\n".join(drawn(state, 78))


def test_the_panel_shows_right_verdicts_of_a_verifier_that_has_no_pairs() -> None:
    shown = []
    for metric in ("pair_accuracy", "verdict_accuracy"):
        state, _ = display()
        state.phase_started(info("train_verifier", 10))
        state.progressed(Progress(1, {metric: 0.875}))
        shown.append(next(line for line in drawn(state, 100) if "87.5 %" in line))
    assert "verdict accuracy" not in shown[0]
    assert "verdict accuracy" in shown[1]


def test_the_panel_survives_a_run_that_tells_it_much_while_it_draws() -> None:
    stream = io.StringIO()
    shown = RunDisplay("modchain-2", 2, Console(file=stream, force_terminal=True, width=80, height=40))
    drawings: list[RenderableType] = []
    finished = threading.Event()

    def draw_all_the_time() -> None:
        drawn_once = Console(file=io.StringIO(), width=80)
        while not finished.is_set():
            drawn_once.print(shown.drawn())
        drawings.append(shown.drawn())  # not if printing has raised an error

    with shown:
        painter = threading.Thread(target=draw_all_the_time)
        painter.start()
        for number in range(100):
            shown.phase_started(info(("mint", "train_prover")[number % 2], 10))
            shown.progressed(Progress(number % 10, {f"metric{number}": 1.0}, samples=SAMPLES))
            shown.round_finished(number, {"helpful_accuracy": 0.5})
        shown.noticed("a notice")
        finished.set()
        painter.join()
    assert drawings
    assert "a notice" in stream.getvalue()


def test_plain_lines_are_few_and_without_escape_codes() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = RunDisplay("modchain-2", 2, Console(file=stream), clock=clock)
    lines.phase_started(info("train_prover", 100, done=3))
    for number in range(4, 54):
        clock.now += 1.0
        lines.progressed(Progress(number, {"helpful_accuracy": 0.5}))
    lines.phase_finished(info("train_prover", 100), {"helpful_accuracy": 0.6})
    lines.round_finished(0, {"verifier_auc": 0.9})
    text = stream.getvalue()
    told = text.splitlines()
    assert len(told) == 3 + 50 / RunDisplay.EVERY_S
    assert "begins: 100 steps, 3 done before" in told[0]
    assert "13/100 steps  1/s  1 min 27 s left  helpful_accuracy=50.0%" in told[1]
    assert "done in 50 s" in told[-2]
    assert "verifier_auc=0.900" in told[-1]
    assert "\x1b" not in text
