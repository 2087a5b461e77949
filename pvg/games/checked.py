"""`CheckedGame`: a game in a user's file. Its errors name the file and the method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from pvg.errors import ConfigurationError
from pvg.extensions import called
from pvg.games.game import Action, ExplainsRules, PlaysByScript
from pvg.records import Problem, Role, Split

R = TypeVar("R")


class CheckedGame:
    """The game of `FILE.py:NAME` for the setting `key`. An exception in the user's code and a result of a wrong type
    become a ConfigurationError. Errors of pvg pass through."""

    def __init__(self, key: str, name: str, game: Any) -> None:
        self._key, self._name, self._game = key, name, game
        if isinstance(game, ExplainsRules):
            self.instructions = game.instructions
        if isinstance(game, PlaysByScript):
            self.scripted = partial(self._called, "scripted")

    def opening(self, split: Split, number: int) -> Problem:
        return self._checked("opening", Problem, split, number)

    def start(self, problem: Problem) -> Any:
        return self._called("start", problem)

    def seats(self, state: Any) -> Sequence[str]:
        seats = self._called("seats", state)
        if isinstance(seats, str) or not isinstance(seats, Sequence):
            raise self._wrong(f"seats must return a tuple of names, not {seats!r}")
        return seats

    def phase(self, state: Any) -> str:
        return self._checked("phase", str, state)

    def prompt(self, state: Any, seat: str, role: Role) -> str:
        return self._checked("prompt", str, state, seat, role)

    def parse(self, state: Any, seat: str, text: str) -> Action:
        return self._checked("parse", Action, state, seat, text)

    def step(self, state: Any, actions: Mapping[str, Action], seed: int) -> Any:
        return self._called("step", state, actions, seed)

    def values(self, state: Any) -> Mapping[str, float]:
        values = self._called("values", state)
        if not isinstance(values, Mapping):
            raise self._wrong(f"values must return a mapping, not {type(values).__name__}")
        if missing := [seat for seat in self.seats(state) if seat not in values]:
            raise self._wrong(f"values must have every seat, but {missing[0]!r} is missing")
        return values

    def dump(self, state: Any) -> bytes:
        return self._checked("dump", bytes, state)

    def load(self, data: bytes) -> Any:
        return self._called("load", data)

    def _called(self, method: str, *arguments: Any) -> Any:
        return called(self._key, self._name, lambda: getattr(self._game, method)(*arguments))

    def _checked(self, method: str, kind: type[R], *arguments: Any) -> R:
        found = self._called(method, *arguments)
        if not isinstance(found, kind):
            raise self._wrong(f"{method} must return {kind.__name__}, not {type(found).__name__}")
        return found

    def _wrong(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"{self._key} = {self._name!r}: {what}.", "See docs/research.md for an example.")
