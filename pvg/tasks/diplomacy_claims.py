"""Plans: orders of one power and claims that no reply of the others refutes. Reads plans and judges their claims.

    A gas-bur
    A mar S gas-bur
    bur 2>1

A claim `bur 2>1` says three things. The orders give the unit that holds or enters bur the strength 2: 1 for itself and
1 for each support. The others bring at most the strength 1 there, whatever they order. After every reply a unit of this
power stands in bur. A unit that holds keeps its province on a tie, so `bur 1=1` is a claim for such a unit.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pvg.games.diplomacy_board import Board, Position, Unit
from pvg.games.diplomacy_movement import Movement, Order, adjudicate, occupant, parse, write
from pvg.games.diplomacy_phases import Legality

# How strong each side is in a province: the numbers in a plan's claims and in the steps of an outcome.

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

    def against(self, province: int, power: int) -> int:
        """The largest strength of another power's unit that stays in the province or moves to it."""
        others = (at for at, unit in self._units.items() if unit.power != power)
        return max((self._strength(at, province) for at in others), default=0)

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


# The replies of the other powers to a plan: all that can matter, or a sample.

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
        for place, orders in Legality(board, position).orders_of(other).items()
    }


@dataclass
class _Relevance:
    """Which provinces matter to a plan (`matter`), where an attack only cuts a support (`cut`), which units can attack
    back (`back`: province of the unit, province of its attacker), and which units' leaving matters (`loose`)."""

    board: Board
    units: Mapping[int, Unit]
    power: int
    plan: UnitOrders
    legal: Mapping[int, tuple[Order, ...]]
    matter: set[int] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)
    back: set[tuple[int, int]] = field(default_factory=set)
    loose: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.goals = goals_of(self.board, self.plan)

    def close(self, claimed: Iterable[int]) -> None:
        """Add provinces until nothing changes."""
        waiting = {*claimed, *self._convoyed()}
        while waiting:
            self.matter |= waiting
            waiting = {*self._by_moves(), *self._by_supports()} - self.matter

    def keeps(self, at: int, order: Order) -> bool:
        """Whether this order of another power's unit in province `at` can matter."""
        if order.act == "move":
            goal = self.board.province_of[order.target]
            return at in self.loose or goal in self.cut or self._concerns(at, goal)
        if order.act not in ("support", "convoy"):
            return False
        origin, target = helped_by(self.board, order)
        if self.units[origin].power == self.power:
            # Help can hurt: it helps a unit out of a province that matters, or replaces a convoy by the plan's fleets.
            matters = origin in self.matter or target in self.matter
            return matters and target >= 0 and self.goals.get(origin) == target
        if target < 0:
            return origin in self.matter
        return self._concerns(origin, target) or (order.act == "convoy" and target in self.cut)

    def _concerns(self, origin: int, target: int) -> bool:
        return target in self.matter or (origin, target) in self.back

    def _convoyed(self) -> Iterator[int]:
        """The goals of the plan's convoyed armies, and the provinces of the fleets that convoy them."""
        for at, goal in self.goals.items():
            fleets = [
                fleet
                for fleet, order in self.plan.items()
                if order.act == "convoy" and helped_by(self.board, order) == (at, goal)
            ]
            # An army that could go by land goes by convoy if it changes places with another unit.
            if fleets or needs_convoy(self.board, self.units[at], self.plan[at]):
                yield goal
                yield from fleets

    def _by_moves(self) -> Iterator[int]:
        """The provinces that matter because of the plan's moves. Updates `back` and `loose`."""
        for at, goal in self.goals.items():
            if goal in self.matter and self._is_other(goal):
                self.back.add((goal, at))
            if at in self.matter:
                yield goal
                if self._is_other(goal):
                    self.loose.add(goal)
                    yield from goals_of(self.board, dict(enumerate(self.legal[goal]))).values()

    def _by_supports(self) -> Iterator[int]:
        """The provinces that matter because of the plan's supports. Updates `cut`."""
        for at, order in self.plan.items():
            if order.act != "support":
                continue
            origin, target = helped_by(self.board, order)
            if (origin if target < 0 else target) in self.matter or (target >= 0 and origin in self.matter):
                self.cut.add(at)
                if target >= 0 and self._is_other(target):
                    yield at  # the attacked unit cuts this support only if it drives the supporter out

    def _is_other(self, province: int) -> bool:
        unit = self.units.get(province)
        return unit is not None and unit.power != self.power


# A longer text is no plan. It bounds the time of reading one.
MOST_LINES, LONGEST_LINE = 60, 80
PIECE = re.compile(r"[^\n;]+")
CLAIM = re.compile(r"([a-z][a-z /().]*?)\s*:?\s*([0-9]{1,2})\s*([>=])\s*([0-9]{1,2})\.?", re.IGNORECASE)


class Claim(NamedTuple):
    """`province` own>other, or own=other for a `tie`. `step`: which line of the plan it is, counted from 0."""

    province: int
    own: int
    tie: bool
    other: int
    step: int


@dataclass(frozen=True, slots=True)
class ClaimedPlan:
    """`orders`: province of the unit -> its order; a unit without an order holds."""

    orders: Mapping[int, Order]
    claims: tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class Judgement:
    """`false`: the first claim that is false, None if no reply refutes a claim; `reason` says why it is. `tried`: the
    number of replies that were tried. `sampled`: these were not all that can matter, so the plan is not proven."""

    false: Claim | None
    reason: str
    tried: int
    sampled: bool


def pieces(text: str) -> list[tuple[int, int]]:
    """Start and end of each line, or part between semicolons, that is not blank and is a step of a plan."""
    found = []
    for match in PIECE.finditer(text):
        part = match.group()
        if part.strip():
            start = match.start() + len(part) - len(part.lstrip())
            found.append((start, start + len(part.strip())))
    return found


def read_claim(board: Board, text: str, step: int) -> Claim | None:
    """The claim that the text says; None if it says none, or is longer than LONGEST_LINE."""
    match = CLAIM.fullmatch(text) if len(text) <= LONGEST_LINE else None
    at = board.find(match[1]) if match else None
    if match is None or at is None:
        return None
    return Claim(board.province_of[at], int(match[2]), match[3] == "=", int(match[4]), step)


def write_claim(board: Board, claim: Claim) -> str:
    return f"{board.provinces[claim.province]} {claim.own}{'=' if claim.tie else '>'}{claim.other}"


def read_plan(board: Board, position: Position, power: int, text: str, target: int) -> ClaimedPlan | str:
    """The plan in a text, or why it is none: legal orders, at most one for each unit, then claims, at most one for each
    province, the last one for the province `target`."""
    places = pieces(text)
    if not places:
        return "no orders and no claims"
    if len(places) > MOST_LINES or any(end - start > LONGEST_LINE for start, end in places):
        return "too long"
    orders: dict[int, Order] = {}
    claims: list[Claim] = []
    for step, (start, end) in enumerate(places):
        line = text[start:end]
        claim = read_claim(board, line, step)
        reason = ""
        if claim is not None:
            reason = "a second claim for a province" if claim.province in {c.province for c in claims} else ""
            claims.append(claim)
        elif claims:
            reason = "no claim after a claim"
        else:
            reason = _read_order(board, position, power, line, orders)
        if reason:
            return f"{reason} (step {step + 1})"
    if not claims or claims[-1].province != target:
        return f"no claim for {board.provinces[target]} at the end"
    return ClaimedPlan(orders, tuple(claims))


def _read_order(board: Board, position: Position, power: int, line: str, orders: dict[int, Order]) -> str:
    """Adds the order in a line to `orders`; otherwise why not."""
    order = parse(board, line)
    if order is None:
        return "neither an order nor a claim"
    legality = Legality(board, position)
    if reason := legality.fault(power, order):
        return f"illegal order: {reason}"
    order = legality.complete(order)
    if board.province_of[order.place] in orders:
        return "a second order for a unit"
    orders[board.province_of[order.place]] = order
    return ""


def write_plan(board: Board, plan: ClaimedPlan) -> str:
    """The plan in the notation that `read_plan` reads, one order or claim per line."""
    return "\n".join([*(write(board, o) for o in plan.orders.values()), *(write_claim(board, c) for c in plan.claims)])


def judge(
    board: Board, position: Position, power: int, plan: ClaimedPlan, most: int, generator: np.random.Generator
) -> Judgement:
    """Judges the claims of a plan of `power`. Tries all replies that can matter if these are at most `most`, otherwise
    `most` replies that `generator` draws."""
    own = {board.province_of[unit.place]: unit for unit in position.units_of(power)}
    first, reason, reply = len(plan.claims), "", None
    for number, claim in enumerate(plan.claims):
        if reason := _own_fault(board, claim, *own_strength(board, plan.orders, own, claim.province)):
            first = number
            break
    space = reply_space(board, position, power, plan.orders, [claim.province for claim in plan.claims])
    replies = list(itertools.islice(space.every(), most + 1))
    sampled = len(replies) > most
    tried = 0
    for orders in space.sample(most, generator) if sampled else replies:
        if not first:
            break
        tried += 1
        contest = Contest(board, space.position, {**plan.orders, **orders})
        for number, claim in enumerate(plan.claims[:first]):
            if contest.against(claim.province, power) > claim.other or contest.stands(claim.province) != power:
                first, reply = number, orders
                break
    if first == len(plan.claims):
        return Judgement(None, "", tried, sampled)
    if reply is not None:
        written = "; ".join(write(board, order) for order in reply.values())
        reason = f"refuted by {written}" if written else "refuted even if the others hold"
    return Judgement(plan.claims[first], reason, tried, sampled)


def _own_fault(board: Board, claim: Claim, strength: int, moves: bool) -> str:
    """Why a claim is false whatever the others order; "" if it is not."""
    if strength != claim.own:
        return f"the orders give {board.provinces[claim.province]} the strength {strength}"
    if claim.tie and moves:
        return "a tie does not let a unit in"
    holds = claim.own == claim.other if claim.tie else claim.own > claim.other
    return "" if holds else f"{claim.own} is not {'equal to' if claim.tie else 'more than'} {claim.other}"
