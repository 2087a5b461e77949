"""Rewards, groups, the cache of states and the rating of self-play, with hand-computed numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pvg.game.play_phase import elo, interval, match_metrics, phase_statistics, points, rewarded_decisions
from pvg.games.negotiation import Bargain, Negotiation
from pvg.records import Grade, Problem, Role, Rollout, Timing, VersionSpan
from pvg.rollout.interaction import MOST_STATE_BYTES, GameStart, PlayedGame, SeatDecision, game_record

GAME = Negotiation()
PROBLEM = Problem("start", "", "")


def rollout(id_: str, latency_s: float = 0.0) -> Rollout:
    ids = np.zeros(3, dtype=np.int32)
    spans, grade = (VersionSpan(0, 4),), Grade(True, True)
    return Rollout(
        *(id_, "start", "?", "", Role.HELPFUL, 0, "base", 0, 0, ids, ids[:2], np.zeros(2, dtype=np.float32)),
        *(spans, "stop", "5", grade, Timing(0.0, latency_s)),
    )


def played(offers: str, *, fork: int = 0, first: int = 1, script: str = "", sample: int = 0) -> PlayedGame[Bargain]:
    """A game about a good worth 8 that costs 2; "-" is a lost turn. `script` plays one seat."""
    state = Bargain(8, 2, first)
    start, states, decisions = GameStart(PROBLEM, state), [state], []
    for number, text in enumerate(offers):
        (seat,) = GAME.seats(state)
        action = GAME.parse(state, seat, text)
        own = None if seat == script else rollout(f"{sample}/{number}", latency_s=number)
        decisions.append(SeatDecision(seat, number, state, action, own, 7))
        state = GAME.step(state, {seat: action}, 0)
        states.append(state)
    return PlayedGame(start, sample, fork, tuple(states), tuple(decisions), "over")


# The seller asks 6, the buyer offers 3, the seller asks 3: a deal at 3 after three offers, so 0.81 of 5 and of 1.
DEAL, NO_DEAL = played("633", fork=1), played("6-91", fork=1, sample=1)


def rows(**settings: object) -> list[tuple[str, float, int]]:
    choice = {"reward": "horizon", "groups": "first", **settings}
    seats = [choice.pop("seat", None)]
    found = rewarded_decisions(GAME, [[DEAL, NO_DEAL]], seats, **choice)  # type: ignore[arg-type]
    return [(one.id, pytest.approx(one.reward), one.group) for one in found]


def test_the_decisions_at_the_fork_are_one_group() -> None:
    assert rows() == [("0/1", 0.81 * 5, 0), ("1/1", 0.0, 0)]


def test_later_decisions_have_a_group_per_phase() -> None:
    expected = [("0/1", 0.81 * 5, 0), ("0/2", 0.81 * 1, 1), ("1/1", 0.0, 0), ("1/2", 0.0, 1), ("1/3", 0.0, 2)]
    assert rows(groups="phase") == expected


def test_stratified_groups_join_equal_phases_and_values() -> None:
    """All values are 0 before the deal, so the phases alone divide the decisions, over all starts."""
    found = rewarded_decisions(GAME, [[DEAL], [NO_DEAL]], [None, None], reward="horizon", groups="stratified")
    assert [one.group for one in found] == [0, 1, 0, 1, 2]


def test_a_dense_reward_counts_to_the_next_decision_of_the_seat() -> None:
    """The seller's third offer makes the deal: the buyer has no later decision, so both are paid by it."""
    assert rows(groups="phase", reward="dense")[:2] == [("0/1", 0.81 * 5, 0), ("0/2", 0.81 * 1, 1)]
    (one,) = rewarded_decisions(GAME, [[played("6-66", fork=1)]], ["buyer"], reward="dense", groups="first")
    assert one.reward == 0.0  # the deal comes after the buyer's next decision


def test_only_the_seat_of_the_policy_counts() -> None:
    assert rows(groups="phase", seat="seller") == [("0/2", 0.81, 0), ("1/2", 0.0, 0)]
    scripted = played("633", script="seller")
    found = rewarded_decisions(GAME, [[scripted]], [None], reward="horizon", groups="phase")
    assert [one.id for one in found] == ["0/1"]


def test_a_shared_warmup_counts_once_in_the_statistics() -> None:
    found = phase_statistics(GAME, [[DEAL, played("69", fork=1)]])
    assert [(row["phase"], row["decisions"], row["prompt_tokens"], row["batch"]) for row in found] == [
        ("offer-1", 1, 3.0, 7.0),
        ("offer-2", 1, 3.0, 7.0),
        ("offer-3", 1, 3.0, 7.0),
    ]
    assert [row["latency_max_s"] for row in found] == [0.0, 1.0, 2.0]


def test_points_of_matches() -> None:
    assert points({"a": 2.0, "b": 1.0}, "a") == 1.0
    assert points({"a": 2.0, "b": 1.0}, "b") == 0.0
    assert points({"a": 2.0, "b": 2.0, "c": 0.0}, "b") == 0.5


def test_the_interval_is_over_starts() -> None:
    """Means 1, 0.5, 0: their standard deviation is 0.5, so the half width is 1.96 x 0.5 / sqrt(3) = 0.566."""
    found = match_metrics([[1.0, 1.0], [0.5, 0.5], [0.0, 0.0]], [[2.0], [1.0], [0.0]])
    assert found["points"] == 0.5
    assert (found["points_low"], found["points_high"]) == (0.0, 1.0)  # clipped: 0.5 - 0.566 and 0.5 + 0.566
    assert found["gain_low"] == pytest.approx(1.0 - 1.96 / math.sqrt(3))
    assert found["elo"] == 0.0
    assert elo(10 / 11) == pytest.approx(400.0)
    assert math.isnan(elo(1.0))
    assert all(math.isnan(bound) for bound in interval(np.array([1.0])))


def test_a_game_of_one_seat_has_a_gain_and_no_points() -> None:
    assert math.isnan(points({"player": 2.0}, "player"))
    found = match_metrics([[math.nan, math.nan], [math.nan]], [[2.0, 4.0], [1.0]])
    assert sorted(found) == ["gain", "gain_high", "gain_low"]
    assert found["gain"] == 2.0


def test_the_recorded_states_of_a_long_game_are_bounded() -> None:
    """A replayed state lists all its moves, so all states together grow with the square of the game's length."""

    class Heavy(Negotiation):
        def dump(self, state: Bargain) -> bytes:
            return bytes(MOST_STATE_BYTES // 2)

    plain = game_record(0, "heavy", Heavy(), DEAL, {"buyer": "policy"}).plain()
    assert [len(phase["state"]) for phase in plain["phases"]] == [MOST_STATE_BYTES, MOST_STATE_BYTES, 0, 0]
    assert [phase["values"] for phase in plain["phases"]][-1] == GAME.values(DEAL.states[-1])
    light = game_record(0, "negotiation", GAME, DEAL, {}).plain()
    assert [bytes.fromhex(phase["state"]) for phase in light["phases"]] == [GAME.dump(state) for state in DEAL.states]
