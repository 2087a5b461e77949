"""Games with several players and turns. `open_game(name)` opens one; pvg.games.game has the protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pvg.errors import ConfigurationError
from pvg.extensions import called, is_reference, load
from pvg.games.diplomacy.game import Diplomacy
from pvg.games.game import GameRules
from pvg.games.negotiation import Negotiation

__all__ = ["GAMES", "open_game"]

# `task.game` -> the function that opens a game.
GAMES: dict[str, Callable[[], GameRules[Any]]] = {
    "negotiation": Negotiation,
    "diplomacy": Diplomacy,
}


def open_game(name: str, key: str = "task.game") -> GameRules[Any]:
    """The game that `name` means for the setting `key`: one of GAMES, or a class in a user's file (`FILE.py:NAME`).

    Raises ConfigurationError for another name, and for a file that cannot be used.
    """
    if is_reference(name):
        kind = load(key, name)
        game: GameRules[Any] = called(key, name, kind)
        return game
    if name not in GAMES:
        raise ConfigurationError(
            f"{key} = {name!r} is not a game.", f"Known games: {', '.join(GAMES)}. A game of yours: FILE.py:NAME."
        )
    return GAMES[name]()
