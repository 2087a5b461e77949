"""TextArena's environments as games (extra `textarena`): text games for 1 to 15 players, such as `LiarsDice-v0/4`.

TextArena draws from Python's and numpy's global random numbers. pvg seeds them before each step and restores them
afterwards. Rewards come at the end of a game. TextArena ends a game after repeated illegal moves, with the reward -1
for the player who made them. All this was found by reading and trying TextArena 0.7.4."""

from __future__ import annotations

import contextlib
import difflib
import math
import random
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.games.game import LONGEST_MOVE, ReplayedGame, Shown
from pvg.installation import install_extra

PREFIX = "textarena:"
MOST_PLAYERS = 15
USUAL_PLAYERS = (2, 1, *range(3, MOST_PLAYERS + 1))  # the order in which pvg tries numbers of players
LOST = -1.0
# These environments download word lists when they are imported, or ask a model of a paid service.
DOWNLOADS = "it downloads word lists while it runs"
ASKS_A_MODEL = "it asks a model of a paid service"
REFUSED = {
    **dict.fromkeys(
        ("Codenames", "DontSayIt", "Hangman", "LetterAuction", "SpellingBee", "WordChains", "WordLadder"), DOWNLOADS
    ),
    **dict.fromkeys(("WordSearch", "Wordle"), DOWNLOADS),
    **dict.fromkeys(("Debate", "GuessWho", "ScenarioPlanning", "TwentyQuestions"), ASKS_A_MODEL),
}
NAME = re.compile(r"([A-Za-z0-9_.-]{1,80})(?:/([0-9]{1,3}))?")


def open_textarena(name: str) -> ReplayedGame:
    """The game of `ENVIRONMENT` or `ENVIRONMENT/PLAYERS`. Without a number, pvg takes the first of USUAL_PLAYERS that
    the environment accepts.

    Raises MissingRequirementError without the extra, ConfigurationError for a name or a number that cannot be played.
    """
    found = NAME.fullmatch(name)
    if found is None:
        raise ConfigurationError(f"{name!r} names no TextArena environment.", "For example: textarena:TicTacToe-v0")
    environment, players = found[1], found[2]
    _check_name(environment)
    wanted = USUAL_PLAYERS if players is None else (int(players),)
    if not 1 <= wanted[0] <= MOST_PLAYERS:
        raise ConfigurationError(f"TextArena's games have 1 to {MOST_PLAYERS} players, not {wanted[0]}.")
    number = _accepted(environment, wanted)
    return ReplayedGame(f"{PREFIX}{environment}/{number}", lambda: TextArenaEnvironment(environment, number))


class TextArenaEnvironment:
    """A `SteppedEnvironment`: one game of an environment of TextArena."""

    def __init__(self, name: str, players: int) -> None:
        self._name, self._players = name, players
        self._game: Any = None

    def reset(self, seed: int) -> Shown:
        with _chance(seed):
            self._game = _made(self._name)
            self._game.reset(num_players=self._players, seed=seed)
            return self._shown()

    def step(self, text: str, seed: int) -> Shown:
        """One move of the seat that decides. If TextArena fails on the text, this seat loses the game."""
        mover = self._game.state.current_player_id
        with _chance(seed):
            try:
                done, _ = self._game.step(text[:LONGEST_MOVE])
                return self._over() if done else self._shown()
            except Exception as error:  # noqa: BLE001 - a model's text must not end a run, whatever TextArena raises
                note = f"TextArena failed on this move ({type(error).__name__}: {error})"
                return self._ended({mover: LOST}, note)

    def close(self) -> None:
        self._game = None

    def _shown(self) -> Shown:
        player, observation = self._game.get_observation()
        return Shown(_seat(player), _text(observation), self._values({}))

    def _over(self) -> Shown:
        rewards, facts = self._game.close()
        reason = facts.get(0, {}).get("reason") if isinstance(facts, dict) else None
        return self._ended(rewards or {}, str(reason or ""))

    def _ended(self, rewards: dict[int, Any], note: str) -> Shown:
        return Shown("", "", self._values(rewards), note)

    def _values(self, rewards: dict[int, Any]) -> tuple[tuple[str, float], ...]:
        return tuple((_seat(player), _reward(rewards.get(player, 0.0))) for player in range(self._players))


def _seat(player: int) -> str:
    return f"player-{player}"


def _reward(found: Any) -> float:
    """Some environments of TextArena give the reason for an illegal move where its reward belongs."""
    number = isinstance(found, int | float | np.number) and math.isfinite(found)
    return float(found) if number else LOST


def _text(observation: Any) -> str:
    """Environments without a wrapper (their names end in -raw) show a list of messages."""
    if isinstance(observation, str):
        return observation.rstrip("\n")
    return "\n".join(f"[{'GAME' if n < 0 else f'Player {n}'}] {message}" for n, message, *_ in observation)


@contextlib.contextmanager
def _chance(seed: int) -> Iterator[None]:
    """Python's and numpy's global random numbers begin at `seed`, and continue afterwards as if nothing happened. What
    TextArena prints goes to stderr."""
    before, numpy_before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)


def _check_name(name: str) -> None:
    try:
        from textarena.envs.registration import ENV_REGISTRY
    except ModuleNotFoundError as error:
        raise MissingRequirementError(
            f"The game {PREFIX}{name} needs the package textarena (there is no module {error.name!r}).",
            install_extra("textarena"),
        ) from None
    if name not in ENV_REGISTRY:
        alike = difflib.get_close_matches(name, ENV_REGISTRY, n=3, cutoff=0.4)
        raise ConfigurationError(
            f"TextArena has no environment {name!r}.", f"The nearest names are {', '.join(alike)}." if alike else ""
        )
    folder = str(ENV_REGISTRY[name].entry_point).partition(":")[0].split(".")[2]
    if folder in REFUSED:
        raise ConfigurationError(f"pvg does not open TextArena's {name}: {REFUSED[folder]}.", "Use another game.")


def _made(name: str) -> Any:
    """A new environment. Raises ConfigurationError if TextArena cannot import it: some need a newer Python."""
    import textarena

    try:
        return textarena.make(name)
    except (ImportError, OSError, SyntaxError, ValueError) as error:
        raise ConfigurationError(
            f"TextArena cannot open {name} here: {type(error).__name__}: {error}.", "Use another game."
        ) from error


def _accepted(name: str, wanted: tuple[int, ...]) -> int:
    """The first number of players with which the environment starts."""
    problem = ""
    for players in wanted:
        try:
            TextArenaEnvironment(name, players).reset(0)
        except ConfigurationError:
            raise
        except Exception as error:  # noqa: BLE001 - TextArena has no list of numbers; environments refuse in many ways
            problem = problem or str(error) or type(error).__name__
        else:
            return players
    tried = f"with {wanted[0]} players" if len(wanted) == 1 else f"with 1 to {MOST_PLAYERS} players"
    raise ConfigurationError(
        f"TextArena's {name} does not start {tried}: {problem}",
        f"Without a number, pvg takes one that fits: {PREFIX}{name}" if len(wanted) == 1 else "Use another game.",
    )
