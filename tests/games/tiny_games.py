"""Two games of the tests: seats that decide together, and an environment that changes with every step."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pvg.errors import StateError
from pvg.games.game import Action, Script
from pvg.games.replay import Shown
from pvg.records import Problem, Role, Split


class Evens(NamedTuple):
    rounds: int
    won: int  # by "even", less those of "odd"
    drawn: int  # by the seed of the last step


class EvenOdd:
    """Both seats name a number at once: "even" wins an even sum. Three rounds."""

    def opening(self, split: Split, number: int) -> Problem:
        return Problem(f"even-odd-{split}-{number}", "even or odd?", "", {})

    def start(self, problem: Problem) -> Evens:
        return Evens(0, 0, 0)

    def seats(self, state: Evens) -> Sequence[str]:
        return ("even", "odd") if state.rounds < 3 else ()

    def phase(self, state: Evens) -> str:
        return f"round-{state.rounds}"

    def prompt(self, state: Evens, seat: str, role: Role) -> str:
        return f"{seat}, round {state.rounds}, {state.won:+d}: a number?"

    def parse(self, state: Evens, seat: str, text: str) -> Action:
        digits = "".join(character for character in text if character in "0123456789")[:5]
        return Action(int(digits or 0), digits or "0", "" if digits else "no number: 0")

    def step(self, state: Evens, actions: Mapping[str, Action], seed: int) -> Evens:
        even = (actions["even"].move + actions["odd"].move) % 2 == 0
        return Evens(state.rounds + 1, state.won + (1 if even else -1), seed % 1000)

    def values(self, state: Evens) -> Mapping[str, float]:
        return {"even": float(state.won), "odd": float(-state.won)}

    def dump(self, state: Evens) -> bytes:
        return json.dumps(state).encode()

    def load(self, data: bytes) -> Evens:
        try:
            rounds, won, drawn = json.loads(data)
        except (ValueError, TypeError):
            raise StateError("no state of even-odd") from None
        return Evens(rounds, won, drawn)

    def scripted(self, script: Script, state: Evens, seat: str, seed: int) -> str:
        return "1" if script == "greedy" else str(seed % 10)


class Guessing:
    """A `SteppedEnvironment`: guess the number that `reset` drew from Python's global random numbers. Each wrong guess
    also draws a hint. `opened` and `steps` count, over all environments."""

    opened = steps = closed = 0

    def __init__(self) -> None:
        Guessing.opened += 1

    def reset(self, seed: int) -> Shown:
        self.chance = random.Random(seed)
        self.wanted = self.chance.randrange(10)
        return self.shown("guess")

    def step(self, text: str, seed: int) -> Shown:
        Guessing.steps += 1
        if text == str(self.wanted):
            return Shown("", "", (("player", 1.0),), "found")
        return self.shown(f"no, lucky number {random.Random(seed).randrange(1000)} and {self.chance.randrange(1000)}")

    def close(self) -> None:
        Guessing.closed += 1

    def shown(self, prompt: str) -> Shown:
        return Shown("player", prompt, (("player", 0.0),))
