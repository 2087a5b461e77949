"""A game: two seats claim a share of 10 at the same time, in three rounds. Claims that do not fit pay nothing."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pvg.games.game import Action, Script
from pvg.records import Problem, Role, Split

SEATS = ("left", "right")
ROUNDS = 3


class Claims(NamedTuple):
    """The number of the start, and both claims of each round so far."""

    number: int
    rounds: tuple[tuple[int, int], ...] = ()


class Divide:
    def opening(self, split: Split, number: int) -> Problem:
        return Problem(f"divide-{split}-{number}", f"{number % 10}?", "", {"number": number % 10})

    def start(self, problem: Problem) -> Claims:
        return Claims(int(problem.metadata["number"]))

    def seats(self, state: Claims) -> Sequence[str]:
        return SEATS if len(state.rounds) < ROUNDS else ()  # both decide at the same time

    def phase(self, state: Claims) -> str:
        return f"round-{len(state.rounds) + 1}"

    def prompt(self, state: Claims, seat: str, role: Role) -> str:
        own = SEATS.index(seat)
        past = "".join(f";{claims[own]}+{claims[1 - own]}" for claims in state.rounds)
        return f"{state.number}{past}?"

    def parse(self, state: Claims, seat: str, text: str) -> Action:
        digits = [character for character in text if character in "0123456789"]
        if not digits:  # parse never raises; an unreadable claim is a claim of nothing, with a note
            return Action(0, "0", "no claim")
        return Action(int(digits[-1]), digits[-1])

    def step(self, state: Claims, actions: Mapping[str, Action], seed: int) -> Claims:
        claims = (int(actions["left"].move), int(actions["right"].move))
        return Claims(state.number, (*state.rounds, claims))  # a new state; the old one may be a fork

    def values(self, state: Claims) -> Mapping[str, float]:
        paid = [claims for claims in state.rounds if sum(claims) <= 10]
        return {seat: float(sum(claims[own] for claims in paid)) for own, seat in enumerate(SEATS)}

    def dump(self, state: Claims) -> bytes:
        return bytes([state.number, *(claim for claims in state.rounds for claim in claims)])

    def scripted(self, script: Script, state: Claims, seat: str, seed: int) -> str:
        """Optional: opponents without a model, for the rating."""
        return str(seed % 10) if script == "random" else "5"
