"""A game in a user's file: what it may get wrong, and the error of one line that names the file and the method."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pvg.errors import ConfigurationError
from pvg.games import open_game
from pvg.games.game import ExplainsRules, PlaysByScript
from pvg.records import Role

EXAMPLE = Path(__file__).parents[2] / "examples" / "divide.py"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def written(body: str) -> str:
        source = EXAMPLE.read_text(encoding="utf-8")
        path = tmp_path / "mine.py"
        path.write_text(f"{source}\n\nclass Mine(Divide):\n{body}\n", encoding="utf-8")
        return f"{path}:Mine"

    return written


def opened_and_played(game: Any) -> None:
    state = game.start(game.opening("train", 0))
    while seats := game.seats(state):
        assert game.phase(state)
        game.values(state)
        texts = {seat: game.prompt(state, seat, Role.HELPFUL) for seat in seats}
        state = game.step(state, {seat: game.parse(state, seat, text) for seat, text in texts.items()}, 0)
        assert game.dump(state)


def test_a_right_game_is_played_and_keeps_its_optional_parts(write: Callable[[str], str]) -> None:
    plain = open_game(write("    pass"))
    opened_and_played(plain)
    assert isinstance(plain, PlaysByScript)
    assert not isinstance(plain, ExplainsRules)
    assert plain.scripted("greedy", plain.start(plain.opening("test", 1)), "left", 0)
    assert isinstance(open_game(write("    instructions = 'Claim a share.'")), ExplainsRules)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    def step(self, state, actions, seed): return 1 // 0", "failed in Mine.step, line"),
        ("    def parse(self, state, seat, text): return text", "parse must return Action, not str"),
        ("    def seats(self, state): return 'left'", "seats must return a tuple of names, not 'left'"),
        ("    def values(self, state): return {'left': 0.0}", "values must have every seat, but 'right' is missing"),
        ("    def values(self, state): return [0.0, 0.0]", "values must return a mapping, not list"),
        ("    def prompt(self, state, seat, role): return None", "prompt must return str, not NoneType"),
        ("    def opening(self, split, number): return split", "opening must return Problem, not str"),
        ("    phase = None", "failed in phase: TypeError"),
    ],
)
def test_a_wrong_game_is_the_users_error(write: Callable[[str], str], body: str, message: str) -> None:
    name = write(body)
    with pytest.raises(ConfigurationError) as error:
        opened_and_played(open_game(name))
    assert message in error.value.message
    assert error.value.message.startswith(f"task.game = {name!r}")
