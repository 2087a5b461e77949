"""Positions for problems: games that scripted players played up to a movement phase.

Each power decides with random and greedy orders: a greedy unit enters a supply centre that its power does not own, if
it can; other units move, hold or support at random. The positions depend only on the board and the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pvg.config.task import DiplomacyPlanTask
from pvg.games.diplomacy.board import Board
from pvg.games.diplomacy.legal import orders_of
from pvg.games.diplomacy.orders import Order
from pvg.games.diplomacy.phases import deciders, step
from pvg.games.diplomacy.position import Position
from pvg.records import Problem, Split
from pvg.seeds import generator_for
from pvg.tasks.diplomacy.contests import helped_by

LAST_PHASE = 12  # movement phases of a game: six years
GREEDY = 0.6  # share of the units that go to a centre if they can
SUPPORTING = 0.6  # share of the others that support one of the moves of their power, if they can
ALONE = 0.8  # share of the rest that hold or move, without supports and convoys


class DrawnProblems:
    """The problems of both splits. The first call for a split draws them with `draw(split, count, taken)`, later calls
    return the same ones. `taken` has the ids of the test problems, which the training split must not contain."""

    def __init__(self, section: DiplomacyPlanTask, draw: Callable[[Split, int, set[str]], list[Problem]]) -> None:
        self._section, self._draw = section, draw
        self._kept: dict[Split, list[Problem]] = {}

    def of(self, split: Split) -> Iterator[Problem]:
        if split not in self._kept:
            count = self._section.problems if split == "train" else self._section.test_problems
            taken = {problem.id for problem in self.of("test")} if split == "train" else set[str]()
            self._kept[split] = self._draw(split, count, taken)
        return iter(self._kept[split])


def played_positions(board: Board, seed: int, kind: str, every: int) -> Iterator[Position]:
    """Endless, in a fixed order. Of each game those before every `every`-th movement phase, without the start."""
    number = 0
    while True:
        generator = generator_for(seed, "diplomacy", board.name, kind, number)
        number += 1
        yield from list(_played(board, generator))[every - 1 :: every]


def _played(board: Board, generator: np.random.Generator) -> Iterator[Position]:
    """The positions before each movement phase of a game, without the start."""
    position, phases = board.start, 0
    while phases < LAST_PHASE and (powers := deciders(board, position)):
        orders = {power: drawn_orders(board, position, power, generator) for power in powers}
        position = step(board, position, orders).position
        if position.stage == "M" and deciders(board, position):
            phases += 1
            yield position


def drawn_orders(board: Board, position: Position, power: int, generator: np.random.Generator) -> list[Order]:
    """Orders of one power for any phase, drawn by the rules above."""
    legal = orders_of(board, position, power)
    shuffled = [list(legal)[number] for number in generator.permutation(len(legal)).tolist()]
    if position.stage != "M":
        return [_any(legal[at], generator) for at in shuffled]
    orders: dict[int, Order] = {}
    wanted = _foreign_centres(board, position, power)
    for at in shuffled:
        order = _greedy(board, legal[at], wanted) if generator.random() < GREEDY else None
        if order is not None:
            wanted -= {board.province_of[order.target]}
            orders[at] = order
    moves = {(board.province_of[at], board.province_of[order.target]) for at, order in orders.items()}
    for at in shuffled:
        if at not in orders:
            helping = [o for o in legal[at] if o.act == "support" and helped_by(board, o) in moves]
            support = bool(helping) and generator.random() < SUPPORTING
            alone = generator.random() < ALONE
            own = [order for order in legal[at] if not alone or order.act in ("hold", "move")]
            orders[at] = _any(helping if support else own, generator)
    return list(orders.values())


def _foreign_centres(board: Board, position: Position, power: int) -> set[int]:
    return {centre for centre, owner in zip(board.centres, position.owners, strict=True) if owner != power}


def _greedy(board: Board, orders: Sequence[Order], wanted: set[int]) -> Order | None:
    """The first move to one of the provinces `wanted`."""
    return next((o for o in orders if o.act == "move" and board.province_of[o.target] in wanted), None)


def _any(orders: Sequence[Order], generator: np.random.Generator) -> Order:
    return orders[int(generator.integers(len(orders)))]
