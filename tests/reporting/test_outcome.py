"""The sentences under the table of rounds."""

from __future__ import annotations

from pvg.reporting.outcome import outcome

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
        "The helpful role solved 61.3 % of new problems before the game, and 95.1 % after round 1.",
        "The sneaky role was wrong in 57.2 % of its solutions before the game, and 79.9 % after round 1.",
        "The verifier of round 1 accepts 6.8 % of these wrong solutions; that of round 0, the worst, accepted 11.0 %.",
        "Of the previous round's wrong solutions, each new verifier accepted at most 0.4 %.",
    ]


def test_the_worst_round_may_be_the_last_or_the_only_one() -> None:
    assert outcome({0: FIRST})[-1] == "The verifier of round 0 accepts 11.0 % of these wrong solutions."
    worse = {0: FIRST, 1: LAST | {"fooled_rate": 0.3}}
    assert (
        outcome(worse)[2] == "The verifier of round 1 accepts 30.0 % of these wrong solutions, the most of all rounds."
    )


def test_what_was_not_measured_is_left_out() -> None:
    assert outcome({}) == []
    assert outcome({0: {"points_mean": 0.5}}) == []  # self-play
    (alone,) = outcome({0: {"helpful_accuracy": 0.5}})
    assert alone == "The helpful role solved 50.0 % of new problems after round 0."
    flawless = {"helpful_accuracy": 1.0, "sneaky_error_rate": 0.0}  # no flaw, so there is no fooled rate
    assert len(outcome({0: flawless})) == 2
