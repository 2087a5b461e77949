"""Games with several players and turns. `open_game(name)` opens one; pvg.games.game has the protocol."""

from __future__ import annotations

from typing import Any, cast

from pvg.errors import ConfigurationError
from pvg.extensions import called, imported, is_reference, load
from pvg.games.game import CheckedGame, GameRules

# `task.game` -> the class of a game: MODULE:NAME.
GAMES = {"negotiation": "pvg.games.negotiation:Negotiation", "diplomacy": "pvg.games.diplomacy:Diplomacy"}
# The beginning of a name -> the function that opens the game of another project, given the rest of the name.
OTHER_PROJECTS = {"textarena:": "pvg.games.textarena:open_textarena", "openenv:": "pvg.games.openenv:open_openenv"}


def open_game(name: str, key: str = "task.game") -> GameRules[Any]:
    """The game that `name` means for the setting `key`: one of GAMES, a class in a user's file (`FILE.py:NAME`), or a
    game of another project: `textarena:NAME`, `openenv:URL`.

    Raises ConfigurationError for another name, and for a file or a game that cannot be used, and
    MissingRequirementError if the other project's package is missing.
    """
    for prefix, opener in OTHER_PROJECTS.items():
        if name.startswith(prefix):
            game: GameRules[Any] = imported(opener)(name.removeprefix(prefix))
            return game
    if is_reference(name):
        kind = load(key, name)
        return cast(GameRules[Any], CheckedGame(key, name, called(key, name, kind)))
    if name not in GAMES:
        raise ConfigurationError(
            f"{key} = {name!r} is not a game.",
            f"Known games: {', '.join(GAMES)}, textarena:NAME, openenv:URL. A game of yours: FILE.py:NAME.",
        )
    game = imported(GAMES[name])()
    return game
