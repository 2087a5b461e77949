"""A game of the tests: an environment that changes with every step."""

from __future__ import annotations

import random

from pvg.games.game import Shown


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
