"""Games whose states replay an environment: states are values, forks replay, and chance must follow from the seeds."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from tiny_games import Guessing

from pvg.errors import StateError
from pvg.games.game import LIVE, LONGEST_MOVE, NoRoomError, ReplayedGame, ReplayedState, Shown
from pvg.records import Role


@pytest.fixture
def game() -> Iterator[ReplayedGame]:
    Guessing.opened = Guessing.steps = Guessing.closed = 0
    game = ReplayedGame("guessing", Guessing)
    yield game
    game.close()
    assert Guessing.closed == Guessing.opened, "an environment stays open"


def move(game: ReplayedGame, state: ReplayedState, text: str, seed: int = 5) -> ReplayedState:
    return game.step(state, {"player": game.parse(state, "player", text)}, seed)


def started(game: ReplayedGame, number: int = 0) -> ReplayedState:
    return game.start(game.opening("train", number))


def wrong(game: ReplayedGame, count: int) -> ReplayedState:
    state = started(game)
    for _ in range(count):
        state = move(game, state, "x")
    return state


def test_a_game_that_goes_straight_on_takes_one_step_per_move(game: ReplayedGame) -> None:
    state = wrong(game, 20)
    assert (Guessing.opened, Guessing.steps) == (2, 20), "one more shows the prompts of openings"
    assert game.seats(state) == ("player",)
    assert game.phase(state) == "move-20"
    ended = [move(game, wrong(game, 3), str(guess)) for guess in range(10)]
    assert [game.values(end)["player"] for end in ended].count(1.0) == 1
    assert [game.seats(end) for end in ended].count(()) == 1


def test_a_fork_replays_and_shows_the_same(game: ReplayedGame) -> None:
    state = wrong(game, 3)
    first = move(game, state, "y", seed=1)
    again = move(game, state, "y", seed=1)
    other = move(game, state, "y", seed=2)
    assert first == again
    assert hash(first) == hash(again)
    assert first.shown == again.shown
    assert other.shown != first.shown, "the seed of the step is its chance"
    assert other != first
    assert game.prompt(state, "player", Role.HELPFUL) == game.prompt(state, "player", Role.SNEAKY)
    assert Guessing.opened == 4
    assert len(state.moves) == 3, "step changed its input"


def test_an_environment_that_ignores_its_seed_is_found_out(game: ReplayedGame) -> None:
    class Whim(Guessing):
        def reset(self, seed: int) -> object:  # type: ignore[override]
            return super().reset(time.perf_counter_ns())

    whim = ReplayedGame("whim", Whim)  # type: ignore[arg-type]
    state = move(whim, started(whim), "x")
    move(whim, state, "y")
    with pytest.raises(StateError, match="whim showed something else"):
        move(whim, state, "y")
    whim.close()


def test_the_number_of_open_environments_is_bounded(game: ReplayedGame) -> None:
    states = [move(game, started(game, number), "x") for number in range(LIVE + 10)]
    assert Guessing.opened - Guessing.closed == LIVE + 1
    assert move(game, states[0], "y").shown.prompt.startswith("no"), "a closed one is replayed"


def test_openings_differ_and_texts_are_bounded(game: ReplayedGame) -> None:
    openings = [game.opening(split, number) for split in ("train", "test") for number in range(100)]
    assert len({opening.id for opening in openings}) == 200
    assert len({opening.metadata["seed"] for opening in openings}) == 200
    state = started(game)
    action = game.parse(state, "player", "a" * (LONGEST_MOVE + 1))
    assert len(action.move) == LONGEST_MOVE
    assert not action.legal
    assert game.parse(state, "player", "lone \ud800 surrogate").move == "lone ? surrogate"
    assert b'"moves":[["?\\u0000' in game.dump(move(game, state, "\ud800\x00é"))


def test_with_room_for_few_environments_the_oldest_one_is_closed(game: ReplayedGame) -> None:
    """A server may allow a few sessions, or one. Games that are played at the same time then take turns."""

    class Narrow(Guessing):
        def reset(self, seed: int) -> Shown:
            if Guessing.opened - Guessing.closed > room:
                raise NoRoomError("no room")
            return super().reset(seed)

    for room in (1, 2, 3):
        narrow, most = ReplayedGame("guessing", Narrow), 0
        wide = ReplayedGame("guessing", Guessing)
        states = [started(narrow, number) for number in range(5)]
        for text in "xyz":
            states = [move(narrow, state, text) for state in states]
            narrow.opening("test", 0)
            most = max(most, Guessing.opened - Guessing.closed)
        assert most <= room
        narrow.close()
        expected = [started(wide, number) for number in range(5)]
        for text in "xyz":
            expected = [move(wide, state, text) for state in expected]
        assert [state.shown for state in states] == [state.shown for state in expected]
        wide.close()
    room = 0
    nowhere = ReplayedGame("guessing", Narrow)
    with pytest.raises(NoRoomError):
        nowhere.opening("train", 0)
