"""The sentences under the table of rounds."""

from __future__ import annotations

from pvg.reporting.terminal import outcome

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
        "The verifier of round 1 accepted 6.8 % of its round's flaws. The highest share was 11.0 %, in round 0.",
        "Each new verifier accepted at most 0.4 % of the previous round's flaws.",
    ]


def test_what_was_not_measured_is_left_out() -> None:
    assert outcome({}) == []
    assert outcome({0: {"points_mean": 0.5}}) == []  # self-play
    (alone,) = outcome({3: {"helpful_accuracy": 0.5}})
    assert alone == "50.0 % of the helpful role's solutions were correct after round 3."
    flawless = {"helpful_accuracy": 1.0, "sneaky_error_rate": 0.0}  # no flaw, so there is no fooled rate
    assert len(outcome({0: flawless})) == 2
