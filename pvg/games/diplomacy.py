"""Diplomacy as a game of pvg (pvg.games.game.GameRules): a seat for each power, one completion for all its units.

A completion has one order per line: `par-bur`, `mar S par-bur`, `eng C lon-bre`, `par H`, and in winter `A par B`,
`par D` or `waive`. A unit whose order is missing or illegal holds, or is disbanded where it must retreat. The action's
note says what was illegal.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pvg.games.diplomacy_board import Board, Position, Unit, standard_board
from pvg.games.diplomacy_movement import Order, parse_orders, write
from pvg.games.diplomacy_phases import Legality, accept, deciders, destinations, step
from pvg.games.game import Action, Script
from pvg.records import Problem, Role, Split
from pvg.seeds import seed_for


def prompt_text(board: Board, position: Position, power: int) -> str:
    """What the power needs to know, in the form that the module describes."""
    lines = [position.phase, *_standing(board, position), board.powers[power]]
    return "\n".join([*lines, *_choices(board, position, power)])


def _standing(board: Board, position: Position) -> Iterator[str]:
    """A line for each power that has a unit or a centre."""
    owned = _owned(board, position)
    for power in range(len(board.powers)):
        units = position.units_of(power)
        stood = {board.provinces[board.province_of[unit.place]] for unit in units}
        parts = [_unit(board, unit, owned[power]) for unit in units]
        empty = [centre for centre in owned[power] if centre not in stood]
        parts += [f"/{' '.join(empty)}"] if empty else []
        if parts:
            yield f"{board.short(power)}: {' '.join(parts)}"


def _unit(board: Board, unit: Unit, owned: list[str]) -> str:
    at_home = board.provinces[board.province_of[unit.place]] in owned
    return f"{'~' if unit.fleet else ''}{board.places[unit.place]}{'*' if at_home else ''}"


def _owned(board: Board, position: Position) -> list[list[str]]:
    pairs = list(zip(board.centres, position.owners, strict=True))
    return [[board.provinces[c] for c, owner in pairs if owner == power] for power in range(len(board.powers))]


def _choices(board: Board, position: Position, power: int) -> Iterator[str]:
    legality = Legality(board, position)
    if position.stage == "M":
        for unit in position.units_of(power):
            yield f"{board.places[unit.place]}: {_names(board, destinations(board, unit))}"
    elif position.stage == "R":
        for gone in position.dislodged_list():
            if gone.unit.power == power:
                yield f"{board.places[gone.unit.place]} retreats: {_names(board, legality.retreats(gone))}"
    elif (change := legality.adjustment(power)) > 0:
        yield f"build {change}: {_names(board, tuple(legality.sites(power)))}"
    else:
        yield f"disband {-change}"


def _names(board: Board, places: tuple[int, ...]) -> str:
    return " ".join(board.places[place] for place in places)


LONGEST_TEXT = 4000  # characters that are read of a completion
MOST_ORDERS = 64
OPENING_PHASES = 12  # an opening follows fewer random phases than this


class Diplomacy:
    """The game on the standard map. It ends after `last_year`, or when a power has won."""

    def __init__(self, last_year: int = 1910) -> None:
        self.board, self.last_year = standard_board(), last_year

    instructions = (
        "You play Diplomacy and want to own many supply centres. The message has the phase and your power, a line per "
        "power with its units (~ is a fleet, * stands on a centre of its own, after / are its other centres), and a "
        "line for each of your units with the places it can move to. Answer with one order per line and nothing else, "
        "for example: par-bur, mar S par-bur, eng C lon-bre, bre H. A unit that retreats moves in the same way. In "
        "winter the message says how many units you build or disband: A par B and F stp/nc B build, par D disbands, "
        "and waive builds nothing."
    )

    def opening(self, split: Split, number: int) -> Problem:
        """The start of the game for number 0 of the training split; otherwise a position after random phases."""
        state = self.board.start
        if (split, number) != ("train", 0):
            draw = seed_for(number, "diplomacy", split)
            for phase in range(1 + draw % OPENING_PHASES):
                state = self._at_random(state, seed_for(draw, phase))
        question = prompt_text(self.board, state, deciders(self.board, state)[0])
        return Problem(f"diplomacy-{split}-{number}", question, "", {"state": self.dump(state).hex()})

    def start(self, problem: Problem) -> Position:
        return Position.load(bytes.fromhex(problem.metadata["state"]))

    def seats(self, state: Position) -> Sequence[str]:
        if state.year > self.last_year:
            return ()
        return tuple(self.board.powers[power] for power in deciders(self.board, state))

    def phase(self, state: Position) -> str:
        return state.phase

    def prompt(self, state: Position, seat: str, role: Role) -> str:
        return prompt_text(self.board, state, self._power(seat))

    def parse(self, state: Position, seat: str, text: str) -> Action:
        """The orders of a completion. The first legal order of each unit counts."""
        legality, power = Legality(self.board, state), self._power(seat)
        orders, unread = parse_orders(self.board, text[:LONGEST_TEXT])
        chosen: dict[int, Order] = {}
        notes = [f"{part[:40]!r} is not an order" for part in unread[:MOST_ORDERS]]
        for order in map(legality.complete, orders[:MOST_ORDERS]):
            if fault := accept(legality, chosen, power, order):
                notes.append(f"{write(self.board, order)}: {fault}")
        if len(text) > LONGEST_TEXT or len(orders) > MOST_ORDERS:
            notes.append(f"only the first {MOST_ORDERS} orders and {LONGEST_TEXT:,} characters are read")
        notes += [] if chosen else ["no legal order"]
        moves = tuple(chosen.values())
        return Action(moves, "\n".join(write(self.board, order) for order in moves), "; ".join(notes))

    def step(self, state: Position, actions: Mapping[str, Action], seed: int) -> Position:
        orders = {self._power(seat): action.move for seat, action in actions.items()}
        return step(self.board, state, orders).position

    def values(self, state: Position) -> Mapping[str, float]:
        return {name: float(state.centres_of(power)) for power, name in enumerate(self.board.powers)}

    def dump(self, state: Position) -> bytes:
        return state.dump()

    def scripted(self, script: Script, state: Position, seat: str, seed: int) -> str:
        """The script "greedy" moves each unit to a free or foreign centre if it reaches one. All other orders are
        random, and so are the builds and disbands of both scripts."""
        legality, power, draw = Legality(self.board, state), self._power(seat), random.Random(seed)
        options = legality.orders_of(power)
        if state.stage == "A":
            sites = draw.sample(sorted(options), min(abs(legality.adjustment(power)), len(options)))
            return self._written(draw.choice(options[site]) for site in sites)
        taken: set[int] = set()
        chosen = []
        for listed in options.values():
            wanted = self._captures(state, power, listed, taken) if script == "greedy" else []
            order = draw.choice(wanted or listed)
            taken |= {self.board.province_of[order.target]} if wanted else set()
            chosen.append(order)
        return self._written(chosen)

    def _at_random(self, state: Position, seed: int) -> Position:
        """The position after a phase of random orders."""
        texts = {seat: self.scripted("random", state, seat, seed) for seat in self.seats(state)}
        return self.step(state, {seat: self.parse(state, seat, text) for seat, text in texts.items()}, 0)

    def _captures(self, state: Position, power: int, orders: Sequence[Order], taken: set[int]) -> list[Order]:
        """The moves to a centre that the power does not own and to which no other unit of it goes."""
        owner_of = dict(zip(self.board.centres, state.owners, strict=True))
        found = []
        for order in orders:
            target = self.board.province_of[order.target] if order.act == "move" else -1
            if owner_of.get(target, power) != power and target not in taken:
                found.append(order)
        return found

    def _written(self, orders: Iterable[Order]) -> str:
        return "\n".join(write(self.board, order) for order in orders)

    def _power(self, seat: str) -> int:
        return self.board.powers.index(seat)
