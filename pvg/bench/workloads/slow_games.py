"""The slow sides of the `games` workload: a game as a graph of mutable objects, and a check of orders against a list.

    game = MutableGame.begin(board)
    game = advanced(game, position, orders)       # a deep copy, changed in place
    read = listed_orders(board, position, power, text)

They are what a game server does that keeps a game as one object: it copies the object before each phase, because a step
changes it, and it lists all legal orders of a power to check those that the power wrote.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pvg.games.diplomacy.board import Board
from pvg.games.diplomacy.legal import Legality
from pvg.games.diplomacy.orders import Order, parse_orders, write
from pvg.games.diplomacy.position import Position
from pvg.telemetry.spans import span


@dataclass(slots=True, eq=False)
class ProvinceObject:
    """A province with its borders by name, its owner, and the unit in it. "": none."""

    name: str
    title: str
    kind: str
    armies: list[str]
    fleets: dict[str, list[str]]  # by coast
    owner: str = ""
    unit: str = ""


@dataclass(slots=True, eq=False)
class PowerObject:
    name: str
    homes: list[str]
    centres: list[str] = field(default_factory=list)
    units: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class VerbosePhase:
    """A played phase: the units and the orders of each power."""

    phase: str
    units: dict[str, list[str]]
    orders: dict[str, list[str]]


@dataclass(slots=True, eq=False)
class MutableGame:
    """A game with its map and its history. `number`: of the game in the benchmark. `position`: the same for the rules,
    so that both sides adjudicate with the same code."""

    number: int
    position: Position
    provinces: dict[str, ProvinceObject]
    powers: dict[str, PowerObject]
    history: list[VerbosePhase] = field(default_factory=list)

    @classmethod
    def begin(cls, board: Board, number: int) -> MutableGame:
        provinces = {name: _province(board, index) for index, name in enumerate(board.provinces)}
        powers = {
            name: PowerObject(name, [board.provinces[home] for home in board.homes[power]])
            for power, name in enumerate(board.powers)
        }
        game = cls(number, board.start, provinces, powers)
        game.set_up(board, board.start)
        return game

    def set_up(self, board: Board, position: Position) -> None:
        """Put the units and owners of `position` on the map, in place."""
        self.position = position
        for province in self.provinces.values():
            province.owner = province.unit = ""
        for centre, owner in zip(board.centres, position.owners, strict=True):
            self.provinces[board.provinces[centre]].owner = board.powers[owner] if owner < len(board.powers) else ""
        for number, power in enumerate(self.powers.values()):
            power.centres = [name for name, province in self.provinces.items() if province.owner == power.name]
            power.units = [f"{'AF'[unit.fleet]} {board.places[unit.place]}" for unit in position.units_of(number)]
        for unit in position.unit_list():
            self.provinces[board.provinces[board.province_of[unit.place]]].unit = board.powers[unit.power]


def _province(board: Board, number: int) -> ProvinceObject:
    armies = [board.provinces[other] for other in board.armies[number]]
    coasts = board.coasts[number] or (number,)
    fleets = {board.places[coast]: [board.places[other] for other in board.fleets[coast]] for coast in coasts}
    return ProvinceObject(board.provinces[number], board.titles[number], board.kinds[number], armies, fleets)


def advanced(board: Board, game: MutableGame, position: Position, orders: Mapping[int, Sequence[Order]]) -> MutableGame:
    """The game after a phase with these orders, which led to `position`. `game` itself stays as it is."""
    with span("copy_state"):
        after = copy.deepcopy(game)
    after.history.append(
        VerbosePhase(
            game.position.phase,
            {name: list(power.units) for name, power in after.powers.items()},
            {board.powers[power]: [write(board, order) for order in given] for power, given in orders.items()},
        )
    )
    after.set_up(board, position)
    return after


def listed_orders(board: Board, position: Position, power: int, text: str) -> tuple[Order, ...]:
    """The orders of `text` that are in the list of all legal orders of the power; the first one of each unit counts."""
    legality = Legality(board, position)
    with span("list_orders"):
        legal = {order for listed in legality.orders_of(power).values() for order in listed}
    chosen: dict[int, Order] = {}
    for order in map(legality.complete, parse_orders(board, text).orders):
        if order in legal:
            chosen.setdefault(board.province_of[order.place], order)
    return tuple(chosen.values())
