"""The replies of the other powers to a plan: all that can matter, or a sample.

A plan fixes the orders of one power. A *reply* is an order for each unit of all other powers. Most of them cannot
change what a claim says, so `reply_space` keeps only the units and the orders that can:

- A province *matters* if a claim names it, if the plan moves a unit of such a province there, if a fleet of the plan
  convoys there, or if a unit of the plan in it supports an attack on a unit that could drive it out.
- A reply can move a unit to a province that matters, or to the province of a supporting unit, which cuts the support.
- A reply can support a move to a province that matters or a unit in it, and convoy an army to it. It can do so for the
  plan's own units, also for one that leaves a province that matters.
- A unit that the plan attacks can attack back.

All other orders have the effect of a hold. Leaving an attacked province also only helps the plan, unless the attacker
comes from a province that matters itself. A support that matches no order is a hold too, so `every` leaves it out.
tests/tasks/diplomacy/test_replies.py compares the result with all legal replies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pvg.games.diplomacy.board import Board
from pvg.games.diplomacy.legal import orders_of
from pvg.games.diplomacy.orders import Order
from pvg.games.diplomacy.position import Position, Unit
from pvg.tasks.diplomacy.contests import UnitOrders, goals_of, helped_by, needs_convoy, with_units

COORDINATED = 0.7  # share of the units that support the main attack of a sampled reply, if they can


@dataclass(frozen=True, slots=True)
class ReplySpace:
    """`options`: province of a unit that can matter -> its orders that can matter, apart from a hold. `position` has
    the plan's units and the units that can matter."""

    board: Board
    position: Position
    plan: UnitOrders
    options: Mapping[int, tuple[Order, ...]]

    def every(self) -> Iterator[dict[int, Order]]:
        """All replies that can matter. A unit without an order holds."""
        moves = {at: [order for order in orders if order.act == "move"] for at, orders in self.options.items()}
        helps = {at: [order for order in orders if order.act != "move"] for at, orders in self.options.items()}
        for chosen in itertools.product(*([None, *orders] for orders in moves.values())):
            reply = {at: order for at, order in zip(moves, chosen, strict=True) if order is not None}
            goals = goals_of(self.board, {**self.plan, **reply})
            staying = [at for at in helps if at not in reply]
            lists = [[None, *(order for order in helps[at] if self._matches(order, goals))] for at in staying]
            for helping in itertools.product(*lists):
                yield reply | {at: order for at, order in zip(staying, helping, strict=True) if order is not None}

    def sample(self, count: int, generator: np.random.Generator) -> Iterator[dict[int, Order]]:
        """`count` drawn replies. Half of them are coordinated: one unit moves, and most others support or convoy it."""
        for number in range(count):
            main = self._main(generator) if number % 2 else None
            reply = {}
            for at, orders in self.options.items():
                order = self._drawn(at, orders, main, generator)
                if order is not None:
                    reply[at] = order
            yield reply

    def _main(self, generator: np.random.Generator) -> tuple[int, Order] | None:
        """A drawn move of the reply: the province of the unit, and its order."""
        moves = [(at, order) for at, orders in self.options.items() for order in orders if order.act == "move"]
        return moves[int(generator.integers(len(moves)))] if moves else None

    def _drawn(
        self, at: int, orders: tuple[Order, ...], main: tuple[int, Order] | None, generator: np.random.Generator
    ) -> Order | None:
        if main is not None:
            if at == main[0]:
                return main[1]
            helped = (main[0], self.board.province_of[main[1].target])
            fitting = [order for order in orders if order.act != "move" and helped_by(self.board, order) == helped]
            if fitting and generator.random() < COORDINATED:
                return fitting[int(generator.integers(len(fitting)))]
        place = int(generator.integers(len(orders) + 1))
        return orders[place] if place < len(orders) else None

    def _matches(self, order: Order, goals: Mapping[int, int]) -> bool:
        """Whether a support or a convoy fits the moves. `goals`: province of each unit that moves -> its goal."""
        origin, target = helped_by(self.board, order)
        return goals.get(origin, -1) == target


def reply_space(board: Board, position: Position, power: int, plan: UnitOrders, claimed: Iterable[int]) -> ReplySpace:
    """The replies to the orders `plan` of `power` that can change whether claims about the provinces `claimed` hold."""
    units = {board.province_of[unit.place]: unit for unit in position.unit_list()}
    legal = _legal(board, position, power)
    found = _Relevance(board, units, power, plan, legal)
    found.close(claimed)
    kept = {at: tuple(order for order in orders if found.keeps(at, order)) for at, orders in legal.items()}
    options = {at: orders for at, orders in kept.items() if orders}
    shown = {at for at, unit in units.items() if unit.power == power} | options.keys() | found.matter
    return ReplySpace(
        board, with_units(position, tuple(unit for at, unit in units.items() if at in shown)), plan, options
    )


@lru_cache(maxsize=256)  # a plan is compared with others for the same position
def _legal(board: Board, position: Position, power: int) -> dict[int, tuple[Order, ...]]:
    """Province of each unit of another power -> its legal orders."""
    return {
        board.province_of[place]: orders
        for other in range(len(board.powers))
        if other != power
        for place, orders in orders_of(board, position, other).items()
    }


class _Relevance:
    """Which provinces matter to a plan (`matter`), where an attack only cuts a support (`cut`), which units can attack
    back (`back`: province of the unit, province of its attacker), and which units' leaving matters (`loose`)."""

    def __init__(
        self,
        board: Board,
        units: Mapping[int, Unit],
        power: int,
        plan: UnitOrders,
        legal: Mapping[int, tuple[Order, ...]],
    ) -> None:
        self._board = board
        self._units = units
        self._power = power
        self._plan = plan
        self._legal = legal
        self._goals = goals_of(board, plan)
        self.matter: set[int] = set()
        self.cut: set[int] = set()
        self.back: set[tuple[int, int]] = set()
        self.loose: set[int] = set()

    def close(self, claimed: Iterable[int]) -> None:
        """Add provinces until nothing changes."""
        waiting = {*claimed, *self._convoyed()}
        while waiting:
            self.matter |= waiting
            waiting = {*self._by_moves(), *self._by_supports()} - self.matter

    def keeps(self, at: int, order: Order) -> bool:
        """Whether this order of another power's unit in province `at` can matter."""
        if order.act == "move":
            goal = self._board.province_of[order.target]
            return at in self.loose or goal in self.cut or self._concerns(at, goal)
        if order.act not in ("support", "convoy"):
            return False
        origin, target = helped_by(self._board, order)
        if self._units[origin].power == self._power:
            # Help can hurt: it helps a unit out of a province that matters, or replaces a convoy by the plan's fleets.
            matters = origin in self.matter or target in self.matter
            return matters and target >= 0 and self._goals.get(origin) == target
        if target < 0:
            return origin in self.matter
        return self._concerns(origin, target) or (order.act == "convoy" and target in self.cut)

    def _concerns(self, origin: int, target: int) -> bool:
        return target in self.matter or (origin, target) in self.back

    def _convoyed(self) -> Iterator[int]:
        """The goals of the plan's convoyed armies, and the provinces of the fleets that convoy them."""
        for at, goal in self._goals.items():
            fleets = [
                fleet
                for fleet, order in self._plan.items()
                if order.act == "convoy" and helped_by(self._board, order) == (at, goal)
            ]
            # An army that could go by land goes by convoy if it changes places with another unit.
            if fleets or needs_convoy(self._board, self._units[at], self._plan[at]):
                yield goal
                yield from fleets

    def _by_moves(self) -> Iterator[int]:
        """The provinces that matter because of the plan's moves. Updates `back` and `loose`."""
        for at, goal in self._goals.items():
            if goal in self.matter and self._is_other(goal):
                self.back.add((goal, at))
            if at in self.matter:
                yield goal
                if self._is_other(goal):
                    self.loose.add(goal)
                    yield from goals_of(self._board, dict(enumerate(self._legal[goal]))).values()

    def _by_supports(self) -> Iterator[int]:
        """The provinces that matter because of the plan's supports. Updates `cut`."""
        for at, order in self._plan.items():
            if order.act != "support":
                continue
            origin, target = helped_by(self._board, order)
            if (origin if target < 0 else target) in self.matter or (target >= 0 and origin in self.matter):
                self.cut.add(at)
                if target >= 0 and self._is_other(target):
                    yield at  # the attacked unit cuts this support only if it drives the supporter out

    def _is_other(self, province: int) -> bool:
        unit = self._units.get(province)
        return unit is not None and unit.power != self._power
