"""Positions for problems: games that scripted players played up to a movement phase.

Each power decides with random and greedy orders: a greedy unit enters a supply centre that its power does not own, if
it can; other units move, hold or support at random. A position depends only on the board, the seed and its number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pvg.games.diplomacy.board import Board
from pvg.games.diplomacy.legal import orders_of
from pvg.games.diplomacy.orders import Order
from pvg.games.diplomacy.phases import deciders, step
from pvg.games.diplomacy.position import Position
from pvg.seeds import generator_for
from pvg.tasks.diplomacy.contests import helped_by

LAST_PHASE = 12  # most movement phases before a position: six years
GREEDY = 0.6  # share of the units that go to a centre if they can
SUPPORTING = 0.4  # share of the others that support one of the moves of their power, if they can


def played_positions(board: Board, seed: int, kind: str) -> Iterator[Position]:
    """Endless, in a fixed order. Each position is of a movement phase of another game."""
    number = 0
    while True:
        generator = generator_for(seed, "diplomacy", board.name, kind, number)
        number += 1
        position = _played(board, int(generator.integers(1, LAST_PHASE + 1)), generator)
        if position is not None:
            yield position


def _played(board: Board, phases: int, generator: np.random.Generator) -> Position | None:
    """The position after so many movement phases; None if the game ended before."""
    position = board.start
    while phases or position.stage != "M":
        powers = deciders(board, position)
        if not powers:
            return None
        phases -= position.stage == "M"
        position = step(board, position, {power: drawn_orders(board, position, power, generator) for power in powers})[0]
    return position if deciders(board, position) else None


def drawn_orders(board: Board, position: Position, power: int, generator: np.random.Generator) -> list[Order]:
    """Orders of one power for any phase, drawn by the rules above."""
    legal = orders_of(board, position, power)
    places = [list(legal)[number] for number in generator.permutation(len(legal)).tolist()]
    if position.stage != "M":
        return [_any(legal[place], generator) for place in places]
    orders: dict[int, Order] = {}
    wanted = _foreign_centres(board, position, power)
    for place in places:
        order = _greedy(board, legal[place], wanted) if generator.random() < GREEDY else None
        if order is not None:
            wanted -= {board.province_of[order.target]}
            orders[place] = order
    moves = {(board.province_of[place], board.province_of[order.target]) for place, order in orders.items()}
    for place in places:
        if place not in orders:
            helping = [o for o in legal[place] if o.act == "support" and helped_by(board, o) in moves]
            support = bool(helping) and generator.random() < SUPPORTING
            orders[place] = _any(helping if support else legal[place], generator)
    return list(orders.values())


def _foreign_centres(board: Board, position: Position, power: int) -> set[int]:
    return {centre for centre, owner in zip(board.centres, position.owners, strict=True) if owner != power}


def _greedy(board: Board, orders: Sequence[Order], wanted: set[int]) -> Order | None:
    """The first move to one of the provinces `wanted`."""
    return next((o for o in orders if o.act == "move" and board.province_of[o.target] in wanted), None)


def _any(orders: Sequence[Order], generator: np.random.Generator) -> Order:
    return orders[int(generator.integers(len(orders)))]
