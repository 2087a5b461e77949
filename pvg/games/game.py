"""The `GameRules` protocol: games with several players and turns, as pure functions on a state.

    state = game.start(problem)
    while seats := game.seats(state):
        texts = {seat: write(game.prompt(state, seat, Role.HELPFUL)) for seat in seats}
        state = game.step(state, {seat: game.parse(state, seat, text) for seat, text in texts.items()}, seed)
    print(game.values(state))

A state is an immutable, hashable value, so a fork of a game is a reference to its state. pvg.rollout.games plays games
with an engine. pvg.games.negotiation is a small example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from pvg.errors import ConfigurationError
from pvg.extensions import called
from pvg.records import Problem, Role, Split

S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)

Script = Literal["random", "greedy"]


@dataclass(frozen=True, slots=True)
class Action:
    """What one seat decided. `move` belongs to the game. `text` is its standard written form. `note` says what was
    illegal or could not be read, and what happened instead; it is empty for a legal decision."""

    move: Any
    text: str
    note: str = ""

    @property
    def legal(self) -> bool:
        return not self.note


class GameRules(Protocol[S]):
    """The rules of a game. All methods are pure: equal arguments give equal results, and no argument changes."""

    def opening(self, split: Split, number: int) -> Problem:
        """Start number `number` (from 0) of a split. Ids are distinct, also between the splits. The metadata holds what
        `start` needs, as JSON values."""
        ...

    def start(self, problem: Problem) -> S: ...

    def seats(self, state: S) -> Sequence[str]:
        """The seats that decide now, all at once, in a fixed order. Empty if the game is over."""
        ...

    def phase(self, state: S) -> str:
        """A short name of the phase, such as "F1902M". Statistics and credit groups use it."""
        ...

    def prompt(self, state: S, seat: str, role: Role) -> str:
        """The text that the policy reads before it decides for `seat`, which is one of `seats(state)`."""
        ...

    def parse(self, state: S, seat: str, text: str) -> Action:
        """The decision in a completion. Takes any text, never raises, and takes time linear in the text."""
        ...

    def step(self, state: S, actions: Mapping[str, Action], seed: int) -> S:
        """The next state, given the actions of exactly `seats(state)`. `seed` determines all chance."""
        ...

    def values(self, state: S) -> Mapping[str, float]:
        """What the state is worth to each seat of the game, in a fixed order. Rewards are differences of values."""
        ...

    def dump(self, state: S) -> bytes: ...

    def load(self, data: bytes) -> S:
        """The state of `dump`. Raises StateError for other bytes."""
        ...


@runtime_checkable
class ExplainsRules(Protocol):
    """An optional part of a game: its rules and the form of a decision, as the system message of a chat model
    (`prompts = "chat"` or `"text"`). Other models read the prompt alone."""

    @property
    def instructions(self) -> str: ...


@runtime_checkable
class PlaysByScript(Protocol[S_contra]):
    """An optional part of a game: opponents without a model, as fixed references for a rating."""

    def scripted(self, script: Script, state: S_contra, seat: str, seed: int) -> str:
        """The completion of a script. "random": uniform over the legal decisions. "greedy": the best immediate
        result."""
        ...


# `CheckedGame`: a game in a user's file. Its errors name the file and the method.


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
