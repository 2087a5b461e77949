"""The negotiation game, by hand-computed games, and the properties that every game has."""

from __future__ import annotations

import pytest

from pvg.errors import ConfigurationError
from pvg.games import GAMES, open_game
from pvg.games.game import PlaysByScript
from pvg.games.negotiation import NO_PRICE, Bargain, Negotiation
from pvg.records import Role

GAME = Negotiation()


def after(state: Bargain, *texts: str) -> Bargain:
    for text in texts:
        (seat,) = GAME.seats(state)
        state = GAME.step(state, {seat: GAME.parse(state, seat, text)}, seed=0)
    return state


def test_the_buyer_meets_what_the_seller_asked() -> None:
    """Worth 8, costs 2. The seller asks 6; the buyer offers 7, which meets it: the price is 6, less a tenth."""
    state = after(Bargain(8, 2, first=1), "6", "7")
    assert GAME.seats(state) == ()
    assert GAME.values(state) == {"buyer": pytest.approx(0.9 * 2), "seller": pytest.approx(0.9 * 4)}


def test_the_seller_meets_what_the_buyer_offered() -> None:
    state = after(Bargain(8, 2, first=0), "3", "5", "4", "4")
    assert GAME.values(state) == {"buyer": pytest.approx(0.9**3 * 4), "seller": pytest.approx(0.9**3 * 2)}


def test_a_deal_can_be_a_loss() -> None:
    state = after(Bargain(3, 0, first=1), "9", "9")
    assert GAME.values(state) == {"buyer": pytest.approx(0.9 * -6), "seller": pytest.approx(0.9 * 9)}


def test_without_a_deal_both_gain_nothing() -> None:
    state = after(Bargain(8, 2, first=0), "1", "9", "1", "9")
    assert GAME.seats(state) == ()
    assert GAME.values(state) == {"buyer": 0.0, "seller": 0.0}


def test_an_offer_before_the_last_one_cannot_be_accepted() -> None:
    """The seller lost the turn in between, so the buyer's second offer meets nothing."""
    state = after(Bargain(8, 2, first=1), "5", "", "4", "3")
    assert state.offers == (5, NO_PRICE, 4, 3)
    assert GAME.values(state) == {"buyer": 0.0, "seller": 0.0}


def test_prompts_show_a_seat_only_its_own_limit() -> None:
    state = after(Bargain(8, 2, first=0), "3", "no digit")
    assert GAME.prompt(state, "buyer", Role.HELPFUL) == "8+0;3;?"
    assert GAME.prompt(state, "seller", Role.HELPFUL) == "2+1;3;?"


@pytest.mark.parametrize(
    ("text", "move", "legal"),
    [("5", 5, True), ("8+6=4;A4", 4, True), ("45", 5, True), ("", NO_PRICE, False), ("٣", NO_PRICE, False)],
)
def test_the_last_digit_is_the_offer(text: str, move: int, legal: bool) -> None:
    action = GAME.parse(GAME.start(GAME.opening("train", 0)), "buyer", text)
    assert (action.move, action.legal) == (move, legal)


def test_the_greedy_script_takes_every_gain() -> None:
    assert GAME.scripted("greedy", after(Bargain(8, 2, first=1), "7"), "buyer", 0) == "7"
    assert GAME.scripted("greedy", after(Bargain(8, 2, first=1), "8"), "buyer", 0) == "7"
    assert GAME.scripted("greedy", after(Bargain(8, 2, first=0), "2"), "seller", 0) == "3"


@pytest.mark.slow
@pytest.mark.parametrize("name", GAMES)
def test_games_keep_the_promises_of_the_protocol(name: str) -> None:
    """Random play to the end: openings are distinct, no state changes, prompts and phases are text, seats are in
    values, and what a script writes is legal."""
    game = open_game(name)
    assert isinstance(game, PlaysByScript)
    problems = [game.opening(split, number) for split in ("train", "test") for number in range(20)]
    assert len({problem.id for problem in problems}) == len(problems)
    for problem in problems[:5]:
        state, steps = game.start(problem), 0
        assert problem == game.opening("train", problems.index(problem))
        while (seats := game.seats(state)) and steps < 12:
            before = game.dump(state)
            assert set(seats) <= game.values(state).keys()
            assert game.phase(state) != ""
            assert all(game.prompt(state, seat, Role.HELPFUL) for seat in seats)
            texts = {seat: game.scripted("random", state, seat, steps) for seat in seats}
            actions = {seat: game.parse(state, seat, text) for seat, text in texts.items()}
            assert all(action.legal for action in actions.values())
            after_it = game.step(state, actions, steps)
            assert game.dump(state) == before
            state, steps = after_it, steps + 1


def test_an_unknown_game_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Known games: negotiation"):
        open_game("chess")
