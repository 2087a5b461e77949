"""TextArena's environments as games, with the real package. Skipped where the extra is missing."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pvg.games import open_game
from pvg.games.game import ReplayedGame, ReplayedState
from pvg.games.textarena import open_textarena
from pvg.records import Role

# Moves of a game of tic-tac-toe that player 0 wins with 4, 1 and 7, the middle column.
WON = ("[4]", "[0]", "I think [1] is best", "[2]", "[7]")


@pytest.fixture
def _textarena() -> None:
    pytest.importorskip("textarena", reason="`make install`")


def play(game: ReplayedGame, state: ReplayedState, *texts: str) -> ReplayedState:
    for number, text in enumerate(texts):
        (seat,) = game.seats(state)
        state = game.step(state, {seat: game.parse(state, seat, text)}, seed=number)
    return state


@pytest.mark.usefixtures("_textarena")
def test_a_game_of_tic_tac_toe_is_played_to_its_end() -> None:
    game = open_game("textarena:TicTacToe-v0")
    state = game.start(game.opening("train", 0))
    assert game.seats(state) == ("player-0",)
    prompt = game.prompt(state, "player-0", Role.HELPFUL)
    assert "Tic Tac Toe" in prompt
    assert "3 | 4 | 5" in prompt
    assert not prompt.endswith("\n")
    state = play(game, state, *WON[:-1])
    assert game.values(state) == {"player-0": 0.0, "player-1": 0.0}
    assert "3 | O | 5" in game.prompt(state, "player-0", Role.HELPFUL)
    end = play(game, state, WON[-1])
    assert game.seats(end) == ()
    assert game.values(end) == {"player-0": 1.0, "player-1": -1.0}
    assert end.shown.note == "Player 0 has won!"
    # A fork: the state before the last move is as it was.
    other = play(game, state, "[8]", "[5]", "[7]")
    assert game.values(other) == {"player-0": 1.0, "player-1": -1.0}
    assert play(game, state, WON[-1]) == end


@pytest.mark.usefixtures("_textarena")
def test_repeated_illegal_moves_lose_and_the_next_prompt_says_why() -> None:
    game = open_game("textarena:TicTacToe-v0/2")
    state = play(game, game.start(game.opening("test", 0)), "no move")
    assert game.seats(state) == ("player-0",), "TextArena asks the same player again"
    assert "invalid move" in game.prompt(state, "player-0", Role.HELPFUL)
    assert game.values(play(game, state, "\x00\ud800" * 100)) == {"player-0": -1.0, "player-1": 1.0}


@pytest.mark.usefixtures("_textarena")
@pytest.mark.parametrize("name", ["LiarsDice-v0/15", "ThreePlayerIPD-v0", "IteratedPrisonersDilemma-v0", "Poker-v0/4"])
def test_games_of_several_players_repeat_bit_by_bit(name: str) -> None:
    """Their chance comes from the seeds alone, whatever the program draws in between."""

    def played() -> list[tuple[str, str]]:
        game = open_textarena(name)
        state, shown = game.start(game.opening("train", 1)), []
        while game.seats(state) and len(shown) < 12:
            shown.append((state.shown.seat, state.shown.prompt))
            state = play(game, state, ("[Bid: 1, 2]", "[Cooperate]", "[Check]")[len(shown) % 3])
        return [*shown, ("end", repr(game.values(state)))]

    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tobytes()
    first = played()
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before, "it disturbs the program's chance"
    random.random()
    assert played() == first


@pytest.mark.usefixtures("_textarena")
def test_a_move_on_which_textarena_fails_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    from textarena.envs.TicTacToe.env import TicTacToeEnv

    game = open_textarena("TicTacToe-v0")
    state = play(game, game.start(game.opening("train", 0)), "[4]")

    def fail(self: object, action: str) -> None:
        raise IndexError("no such cell")

    monkeypatch.setattr(TicTacToeEnv, "step", fail)
    end = play(game, state, "[0]")
    assert game.values(end) == {"player-0": 0.0, "player-1": -1.0}
    assert end.shown.note == "TextArena failed on this move (IndexError: no such cell)"
