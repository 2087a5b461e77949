"""What a report prints, at 80 columns."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_checks import check
from rich.console import Console, RenderableType
from run_samples import begin, played, tell

from pvg.reporting.run_page import collect, run_page
from pvg.reporting.run_summary import read_run
from pvg.reporting.solutions import choose_examples
from pvg.reporting.terminal import (
    BudgetBar,
    alerts_list,
    closing,
    merge_small,
    report,
)
from pvg.telemetry.alerts import REMEDIES


def printed(renderable: RenderableType, width: int = 80, colours: bool = False) -> str:
    stream = io.StringIO()
    system = "truecolor" if colours else None
    Console(file=stream, width=width, force_terminal=colours, color_system=system).print(renderable)
    return stream.getvalue()


def test_what_to_do_about_an_alert_is_said_once_per_kind(tmp_path: Path) -> None:
    run = played(tmp_path)
    place = {"kind": "alert", "round": 0, "phase": "train_prover", "message": "Again."}
    tell(
        run,
        *({**place, "step": number, "name": "zero_signal"} for number in (3, 4)),
        {**place, "step": 5, "name": "new"},
    )
    summary = read_run(run)
    text = " ".join(printed(alerts_list(summary), 200).split())
    assert text.count(REMEDIES["zero_signal"]) == text.count(REMEDIES["collapse"]) == 1
    assert text.endswith("new Again.")
    page = check(run_page(collect(run, summary, 0)))
    assert page.text.count(REMEDIES["zero_signal"]) == page.text.count(REMEDIES["collapse"]) == 1


def test_a_report_has_all_its_parts_and_stays_within_the_width(tmp_path: Path) -> None:
    run = played(tmp_path)
    text = printed(report(read_run(run), choose_examples(run)))
    for part in ("Rounds", "Phases", "Metrics", "Time budget", "Alerts (1)", "Example solutions"):
        assert part in text
    assert "87.5 %" in text
    assert "score +2.50" in text
    assert "wrong: answer 8, wrong sum in step 1" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "\x1b" not in text


def test_the_closing_tells_the_exact_commands(tmp_path: Path) -> None:
    text = printed(closing(read_run(played(tmp_path)), {"pvg report first": "what happened"}))
    assert "pvg report first   what happened" in text
    assert "Played for 5.0 s. Next:" in text
    assert "first  experiment modchain  1 of 3 rounds  5.0 s  complete" in text  # the headline of the report
    text = printed(closing(read_run(begin(tmp_path, "fresh")), {"pvg report first": "what happened"}))
    assert "Stopped. Nothing was played yet. Next:" in text


@given(st.lists(st.floats(0.001, 100.0), min_size=1, max_size=9), st.integers(20, 120))
def test_the_budget_bar_fills_its_width_exactly(seconds: list[float], width: int) -> None:
    budget = {f"part{place}": value for place, value in enumerate(seconds)}
    bar = printed(BudgetBar(budget), width).splitlines()[0]
    assert len(bar) == width


def test_small_parts_are_merged_and_nothing_is_lost() -> None:
    budget = {"rollout": 90.0, "a": 0.1, "b": 0.2, "c": 9.0, "unaccounted": 0.1}
    merged = merge_small(budget)
    assert list(merged) == ["rollout", "c", "other", "unaccounted"]
    assert sum(merged.values()) == pytest.approx(sum(budget.values()))
    assert merge_small({"rollout": 99.0, "a": 0.1}) == {"rollout": 99.0, "a": 0.1}
