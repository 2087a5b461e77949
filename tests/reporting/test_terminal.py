"""What a report prints, at 80 columns."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from page_checks import check
from rich.console import Console, RenderableType
from run_samples import played, tell

from pvg.reporting.run_page import collect, run_page
from pvg.reporting.run_summary import read_run
from pvg.reporting.solutions import choose_examples
from pvg.reporting.table import TableCell
from pvg.reporting.terminal import alerts_list, outcome, report, rounds_table
from pvg.telemetry.catalogue import REMEDIES


def printed(renderable: RenderableType, width: int = 80) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(renderable)
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
    places = [text.index(part) for part in ("Alerts (1)", "Rounds", "Example solutions")]
    assert places == sorted(places)
    assert "87.5 %" in text
    assert "score +2.50" in text
    assert "wrong: answer 8, wrong sum in step 1" in text
    assert "\x1b" not in text


def test_a_report_has_the_critic_beside_the_judge(tmp_path: Path) -> None:
    run, lead = played(tmp_path), {"critic_lead": -0.08, "critic_lead_low": -0.12, "critic_lead_high": -0.04}
    metrics = {"critic_balanced": 0.72, "judge_balanced": 0.8, **lead}
    tell(run, {"kind": "phase", "round": 0, "phase": "mint", "seconds": 3.0, "metrics": metrics})
    for text in (printed(report(read_run(run), [])), check(run_page(collect(run, read_run(run), 0))).text):
        assert all(number in text for number in ("0.72", "0.80", "-0.08", "-0.12", "-0.04"))


FIRST = {
    "base_helpful_accuracy": 0.613,
    "base_sneaky_error_rate": 0.572,
    "helpful_accuracy": 0.936,
    "sneaky_error_rate": 0.666,
    "fooled_rate": 0.11,
}
LAST = {"helpful_accuracy": 0.951, "sneaky_error_rate": 0.799, "fooled_rate": 0.068, "fooled_rate_previous": 0.004}


def test_a_game_of_two_rounds() -> None:
    assert outcome({1: LAST, 0: FIRST}) == [
        "61.3 % of the helpful role's solutions were correct before the game, and 95.1 % after round 1.",
        "57.2 % of the sneaky role's solutions were wrong (flaws) before the game, and 79.9 % after round 1.",
        "The verifier of round 1 accepted 6.8 % of its round's flaws."
        " The highest share of flaws was 11.0 %, in round 0.",
        "Each new verifier accepted at most 0.4 % of the previous round's flaws.",
    ]


def test_shares_have_their_interval_and_those_of_few_solutions_are_grey() -> None:
    few = {"helpful_accuracy": 0.5, "fooled_rate": 0.5, "tested": 100.0, "flaws": 10.0}
    few |= {"fooled_rate_low": 0.237, "fooled_rate_high": 0.763}
    assert outcome({0: few})[-1] == (
        "The verifier of round 0 accepted 50.0 % (95 % interval 23.7 to 76.3 %) of its round's 10 flaws."
    )
    (row,) = rounds_table({0: few}).rows
    styles = {cell.style for cell in row if isinstance(cell, TableCell) and cell.text == "50.0 %"}
    assert styles == {"", "quiet"}  # of 100 solutions, and of 10 flaws


@pytest.mark.parametrize(
    ("of_correct", "low", "said"),
    [(0.95, 0.9, ""), (0.1, 0.05, "do not show"), (1.0, None, "do not show"), (math.nan, None, "says little")],
    ids=["tells apart", "refuses nearly all", "one problem", "no solution"],
)
def test_few_accepted_flaws_are_no_success_of_a_verifier_that_accepts_nothing(
    of_correct: float, low: float | None, said: str
) -> None:
    own = {"fooled_rate": 0.13, "fooled_rate_high": 0.3, "flaws": 23.0, "accepted_helpful": of_correct}
    own |= {"solved": 200.0, "solutions": 400.0} | ({} if low is None else {"accepted_helpful_low": low})
    sentence = outcome({0: own})[-1]
    assert (said in sentence) if said else ("show" not in sentence and "little" not in sentence)


def test_what_was_not_measured_is_left_out() -> None:
    assert outcome({}) == []
    assert outcome({0: {"points_mean": 0.5}}) == []  # self-play
    (alone,) = outcome({3: {"helpful_accuracy": 0.5}})
    assert alone == "50.0 % of the helpful role's solutions were correct after round 3."
    flawless = {"helpful_accuracy": 1.0, "sneaky_error_rate": 0.0}  # no flaw, so there is no fooled rate
    assert len(outcome({0: flawless})) == 2
