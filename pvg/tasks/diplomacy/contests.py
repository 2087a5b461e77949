"""How strong each side is in a province: the numbers in a plan's claims and in the steps of an outcome.

The strength of a unit is 1 for itself and 1 for each support that it gets. A support counts if it is not cut and if it
matches the order of the supported unit. A unit that tries to leave and fails has the strength 1 in its province, since
nobody can support it to hold. An army that needs a convoy and does not get one has the strength 0 in its goal. A power
cannot drive out its own unit. If it attacks its own unit, and this unit stays, the attack has the strength 0. If it
supports another power's attack on its own unit, and this unit stays, the support does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pvg.games.diplomacy.board import Board
from pvg.games.diplomacy.movement import Movement, adjudicate, occupant
from pvg.games.diplomacy.orders import Order
from pvg.games.diplomacy.position import Position, Unit

UnitOrders = Mapping[int, Order]  # province of a unit -> its order; a unit without an order holds


def goals_of(board: Board, orders: UnitOrders) -> dict[int, int]:
    """Province of each unit that moves -> the province that it moves to."""
    return {at: board.province_of[order.target] for at, order in orders.items() if order.act == "move"}


def helped_by(board: Board, order: Order) -> tuple[int, int]:
    """Of a support or a convoy: (province of the helped unit, province that it moves to; -1 if it holds)."""
    return board.province_of[order.origin], board.province_of[order.target] if order.target >= 0 else -1


def needs_convoy(board: Board, unit: Unit, order: Order) -> bool:
    """Whether the unit moves, and goes by convoy."""
    if order.act != "move" or unit.fleet:
        return False
    return order.via or order.target not in board.armies[unit.place]


class Contest:
    """A position, the orders of all units, and their result in `movement`."""

    def __init__(self, board: Board, position: Position, orders: UnitOrders) -> None:
        self.movement: Movement = adjudicate(board, position, orders)
        self._board = board
        self._units = {board.province_of[unit.place]: unit for unit in position.unit_list()}
        results = zip(self._units, self.movement.success, self.movement.why, strict=True)
        self._results = {at: (success, why) for at, success, why in results}
        self._goals = goals_of(board, orders)
        self._supports: dict[int, list[int]] = {}  # unit -> the powers that support it
        for at, order in orders.items():
            if order.act == "support" and self._results[at][0]:
                origin, _ = helped_by(board, order)
                self._supports.setdefault(origin, []).append(self._units[at].power)

    def stands(self, province: int) -> int:
        """The power whose unit stands in the province after the movement; -1 without one."""
        return occupant(self.movement.units, self._board, province)

    def result(self, at: int) -> tuple[bool, str]:
        """Of the unit in province `at`: whether its order succeeded, and why not (pvg.games.diplomacy.movement)."""
        return self._results[at]

    def against(self, province: int, power: int) -> int:
        """The largest strength of another power's unit that stays in the province or moves to it."""
        others = (at for at, unit in self._units.items() if unit.power != power)
        return max((self._strength(at, province) for at in others), default=0)

    def attack(self, at: int) -> tuple[int, int]:
        """(strength of the unit in `at`, which moves; the largest strength that opposes it). Any other unit that stays
        in the goal or moves to it opposes it, except one that the unit from the goal drives back. The move succeeds if
        the first number is larger."""
        goal, most = self._goals[at], 0
        for other in self._units:
            if other == at or self._driven_back(goal, other):
                continue
            strength = self._strength(other, goal)
            if other == goal and self._head_to_head(at, goal):
                strength = self._supported(goal)
            most = max(most, strength)
        return self._attacking(at, goal), most

    def _attacking(self, at: int, goal: int) -> int:
        """The strength of the unit from `at` against the unit in its goal, if that stays: a power does not drive out
        its own units, and its supports do not help others to do so."""
        strength, defender = self._strength(at, goal), self._units.get(goal)
        leaves = goal in self._goals and self._results[goal][0] and not self._head_to_head(at, goal)
        if not strength or defender is None or leaves:
            return strength
        if defender.power == self._units[at].power:
            return 0
        return strength - self._supports.get(at, []).count(defender.power)

    def _supported(self, at: int) -> int:
        return 1 + len(self._supports.get(at, ()))

    def _strength(self, at: int, province: int) -> int:
        """Of the unit from `at`, in the province that it stays in or moves to. 0 in any other province."""
        goal = self._goals.get(at)
        if goal == province:
            return self._supported(at) if self.movement.routes.get(at, True) else 0
        if at != province:
            return 0
        if goal is None:
            return self._supported(at)
        return 0 if self._results[at][0] else 1

    def _head_to_head(self, at: int, other: int) -> bool:
        """Whether the two units move to each other's province, without a convoy."""
        opposite = self._goals.get(at) == other and self._goals.get(other) == at
        return opposite and not {at, other} & self.movement.routes.keys()

    def _driven_back(self, goal: int, at: int) -> bool:
        return self._head_to_head(goal, at) and self._results[goal][0]


def own_strength(board: Board, orders: UnitOrders, own: Mapping[int, Unit], province: int) -> tuple[int, bool]:
    """(strength that a power's own orders give its unit in the province if no support is cut, whether that unit moves
    there). `own`: province -> unit of this power. Strength 0: none of its units moves there or stays there."""
    goals, best, moves = goals_of(board, orders), 0, False
    for at in own:
        if goals.get(at, at) != province:
            continue
        wanted, coasts = (at, goals.get(at, -1)), {-1, goals.get(at, -1)}
        coasts |= {orders[at].target} if at in goals else set()  # a support may name the coast of the move
        helpers = [
            o
            for other, o in orders.items()
            if other in own and o.act == "support" and helped_by(board, o) == wanted and o.target in coasts
        ]
        if 1 + len(helpers) > best:
            best, moves = 1 + len(helpers), at in goals
    return best, moves


def with_units(position: Position, units: tuple[Unit, ...]) -> Position:
    """The position with only these of its units, in ascending order of their places."""
    kept = bytes(number for unit in units for number in (unit.place, 2 * unit.power + unit.fleet))
    return replace(position, units=kept)
