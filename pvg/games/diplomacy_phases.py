"""One step of the game: a position and everybody's orders give the next position, and a result for each order.

The stages are those of the game: movement in spring and fall, retreats after each if a unit was dislodged, and in
winter builds or disbands. A step skips stages in which nobody has a choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from pvg.games.diplomacy_board import Board, Dislodged, Position, Unit, dislodged_units, numbers, packed, unit_of
from pvg.games.diplomacy_movement import Order, adjudicate, connected, group_of

# Which orders are legal. The written order is checked by itself; listing all legal orders is for references and for
# exhaustive replies.

_STAGES = {"M": ("hold", "move", "support", "convoy"), "R": ("move", "disband"), "A": ("build", "disband", "waive")}

_POWER = bytes(code >> 1 for code in range(256))  # 2 * power + fleet -> power


def destinations(board: Board, unit: Unit) -> tuple[int, ...]:
    """The places to which a unit can move without a convoy, in ascending order."""
    return tuple(sorted(set(board.fleets[unit.place] if unit.fleet else board.armies[unit.place])))


class Legality:
    """The units of a position by province, for checking many orders of the same position."""

    def __init__(self, board: Board, position: Position) -> None:
        self.board, self.position = board, position
        province_of = board.province_of
        places = position.units[::2]
        # The units by province and by place, in the order of `Position.units`.
        standing = list(map(unit_of, places, position.units[1::2]))
        self.units = dict(zip(map(province_of.__getitem__, places), standing, strict=True))
        self._at = dict(zip(places, standing, strict=True)) if position.stage == "M" else {}
        self.leaving = {board.province_of[gone.unit.place]: gone for gone in position.dislodged_list()}

    @cached_property
    def fleets(self) -> int:
        """The seas with a fleet, as a set of bits."""
        return sum(1 << place for place in self.position.units[::2]) & self.board.seas

    def fault(self, power: int, order: Order) -> str:
        """Why the order of the power is illegal, in a few words; "" for a legal order."""
        unit = self._at.get(order.place)
        if unit is not None and unit.power == power and order.unit == "AF"[unit.fleet]:
            return self._movement_fault(unit, order)  # the usual case first: a step checks every order
        if order.act not in _STAGES[self.position.stage]:
            return "not in this phase"
        if order.act in ("build", "waive"):
            return self._build_fault(power, order)
        unit = self._ordered(order.place)
        if unit is None:
            return "no unit there" if self.position.stage != "R" else "no unit there must retreat"
        return self._unit_fault(unit, power, order) or self._act_fault(unit, order)

    def complete(self, order: Order) -> Order:
        """With the unit's letter and coast, and with the destination's coast if only one is possible."""
        board, province = self.board, self.board.province_of[order.place]
        if order.act == "build":
            if order.unit or (order.place == province and board.kinds[province] == "coast"):
                return order
            return order._replace(unit="A" if order.place == province else "F")
        unit = self._ordered(order.place)
        if unit is None:
            return order
        order = order._replace(unit=order.unit or "AF"[unit.fleet])
        if order.place == province:
            order = order._replace(place=unit.place)
        if order.act == "move" and unit.fleet and 0 <= order.target < len(board.provinces):
            coasts = [place for place in board.fleets[unit.place] if board.province_of[place] == order.target]
            order = order._replace(target=coasts[0] if len(coasts) == 1 else order.target)
        return order

    def orders_of(self, power: int) -> dict[int, tuple[Order, ...]]:
        """All legal orders of a power: place of the unit, or of the build -> its orders, complete and in a fixed order.

        A support does not name a coast. A move that is possible by land and by convoy is listed twice. Waiving a build
        is not listed.
        """
        if self.position.stage == "M":
            return {u.place: tuple(self._movement_orders(u)) for u in self.units.values() if u.power == power}
        if self.position.stage == "R":
            return {
                gone.unit.place: (
                    *(Order("move", gone.unit.place, to, unit="AF"[gone.unit.fleet]) for to in self.retreats(gone)),
                    Order("disband", gone.unit.place, unit="AF"[gone.unit.fleet]),
                )
                for gone in self.leaving.values()
                if gone.unit.power == power
            }
        own = [unit for unit in self.units.values() if unit.power == power]
        if len(own) > self.position.centres_of(power):
            return {unit.place: (Order("disband", unit.place, unit="AF"[unit.fleet]),) for unit in own}
        return self._builds(power) if len(own) < self.position.centres_of(power) else {}

    def retreats(self, gone: Dislodged) -> tuple[int, ...]:
        board, unit = self.board, gone.unit
        near = board.fleets[unit.place] if unit.fleet else board.armies[unit.place]
        closed = {gone.barred, *self.position.contested, *self.units}
        return tuple(place for place in near if board.province_of[place] not in closed)

    def sites(self, power: int) -> list[int]:
        """The free home centres that the power owns."""
        owners, centre_at = self.position.owners, self.board.centre_at
        return [c for c in self.board.homes[power] if owners[centre_at[c]] == power and c not in self.units]

    def adjustment(self, power: int) -> int:
        """The number of builds of a power, negative for disbands."""
        surplus = self.position.centres_of(power) - self.position.units[1::2].translate(_POWER).count(power)
        return min(surplus, len(self.sites(power))) if surplus > 0 else surplus

    def landings(self, origin: int, without: int = -1) -> int:
        """The coastal provinces that fleets connect with a province, as a set of bits, if the fleet in the province
        `without` does not convoy."""
        board, found = self.board, 0
        for seas, shores in self._groups:
            if not seas & board.seas_beside[origin]:
                continue
            if without >= 0 and seas >> without & 1:
                left = group_of(board, seas & ~(1 << without), board.seas_beside[origin])
                found |= _union(board.shores_beside, left)
            else:
                found |= shores
        return found & board.shores & ~(1 << origin) if board.shores >> origin & 1 else 0

    @cached_property
    def _groups(self) -> list[tuple[int, int]]:
        """The connected fleets at sea, each group with the coasts that it touches, as sets of bits."""
        left, found = self.fleets, []
        while left:
            group = group_of(self.board, left, left & -left)
            found.append((group, _union(self.board.shores_beside, group)))
            left &= ~group
        return found

    # Faults

    def _ordered(self, place: int) -> Unit | None:
        province = self.board.province_of[place] if 0 <= place < len(self.board.places) else -1
        if self.position.stage != "R":
            return self.units.get(province)
        return self.leaving[province].unit if province in self.leaving else None

    def _unit_fault(self, unit: Unit, power: int, order: Order) -> str:
        if unit.power != power:
            return "not your unit"
        if order.unit and (order.unit == "F") != unit.fleet:
            return "wrong kind of unit"
        if order.place not in (unit.place, self.board.province_of[unit.place]):
            return "the unit is not on this coast"
        return ""

    def _act_fault(self, unit: Unit, order: Order) -> str:
        if self.position.stage == "M":
            return self._movement_fault(unit, order)
        if order.act == "move":
            gone = self.leaving[self.board.province_of[unit.place]]
            return "" if order.target in self.retreats(gone) else "cannot retreat there"
        surplus = self.position.stage == "A" and self.adjustment(unit.power) >= 0
        return "no disband left" if surplus else ""

    def _movement_fault(self, unit: Unit, order: Order) -> str:
        act, _, target, origin, via, _ = order
        if act == "support":
            return self._support_fault(unit, target, origin)
        if act == "move":
            return self._move_fault(unit, target, via)
        if act == "convoy":
            return self._convoy_fault(unit, target, origin)
        return "" if act == "hold" else "not in this phase"

    def _move_fault(self, unit: Unit, target: int, via: bool) -> str:
        board = self.board
        if not unit.fleet:
            if 0 <= target < len(board.provinces):
                by_land = not via and board.army_reach[unit.place] >> target & 1
                return "" if by_land or self._crosses(unit.place, target, self.fleets) else "cannot reach it"
            return "an army does not go to a coast"
        if via:
            return "a fleet cannot go by convoy"
        if target in board.fleets[unit.place]:
            return ""
        on_coast = any(board.province_of[place] == target for place in board.fleets[unit.place])
        return "name the coast" if on_coast else "cannot reach it"

    def _support_fault(self, unit: Unit, target: int, origin: int) -> str:
        board = self.board
        own = board.province_of[unit.place]
        helped = self.units.get(board.province_of[origin]) if origin >= 0 else None
        if helped is None:
            return "no unit to support"
        if helped is unit:
            return "a unit cannot support itself"
        reach = board.fleet_reach[unit.place] if unit.fleet else board.army_reach[own]
        if not reach >> board.province_of[target if target >= 0 else origin] & 1:
            return "cannot reach the supported place"
        if target < 0 or self._may_go(helped, target, own):
            return ""
        return "the supported unit cannot reach it"

    def _may_go(self, unit: Unit, target: int, helper: int) -> bool:
        """Whether a unit can go to a place, or to any coast of the province, without a convoy by the helper's unit."""
        board, goal = self.board, self.board.province_of[target]
        if unit.fleet:
            reaches = bool(board.fleet_reach[unit.place] >> goal & 1)
            return reaches if target == goal else target in board.fleets[unit.place]
        if board.army_reach[unit.place] >> goal & 1:
            return True
        return self._crosses(unit.place, goal, self.fleets & ~(1 << helper))

    def _convoy_fault(self, unit: Unit, target: int, origin: int) -> str:
        board = self.board
        own, army = board.province_of[unit.place], self.units.get(origin)
        if not self.fleets >> own & 1:
            return "only a fleet at sea convoys"
        if army is None or army.fleet:
            return "no army to convoy"
        return "" if self._crosses(origin, target, self.fleets, own) else "no chain of fleets leads there"

    def _crosses(self, origin: int, target: int, fleets: int, through: int = -1) -> bool:
        shores = self.board.shores
        if target < 0 or origin == target or not (shores >> origin & 1 and shores >> target & 1):
            return False
        return connected(self.board, fleets, origin, target, through)

    def _build_fault(self, power: int, order: Order) -> str:
        if self.position.centres_of(power) <= sum(unit.power == power for unit in self.units.values()):
            return "no build left"
        if order.act == "waive":
            return ""
        site = self.board.province_of[order.place]
        if site not in self.sites(power):
            return "not a free home centre that you own"
        if order in self._builds(power)[site]:
            return ""
        if not order.unit:
            return "name the unit, A or F"
        unnamed = order.unit == "F" and order.place == site and self.board.coasts[site]
        return "name the coast" if unnamed else "this unit cannot be built there"

    def _builds(self, power: int) -> dict[int, tuple[Order, ...]]:
        board = self.board
        return {
            site: (
                Order("build", site, unit="A"),
                *(
                    Order("build", place, unit="F")
                    for place in board.coasts[site] or (site,)
                    if board.kinds[site] == "coast"
                ),
            )
            for site in self.sites(power)
        }

    # Lists

    def _movement_orders(self, unit: Unit) -> Iterator[Order]:
        board, place, letter = self.board, unit.place, "AF"[unit.fleet]
        own = board.province_of[place]
        yield Order("hold", place, -1, -1, False, letter)
        for target in board.fleets[place] if unit.fleet else board.armies[place]:
            yield Order("move", place, target, -1, False, letter)
        for target in [] if unit.fleet else numbers(self.landings(place)):
            yield Order("move", place, target, -1, bool(board.army_reach[place] >> target & 1), letter)
        reach = board.fleet_reach[place] if unit.fleet else board.army_reach[place]
        for province, other in self.units.items():
            if province == own:
                continue
            if reach >> province & 1:
                yield Order("support", place, -1, other.place, False, letter)
            for target in numbers(reach & self._reach(other, own)):
                yield Order("support", place, target, other.place, False, letter)
        if self.fleets >> own & 1:
            yield from self._convoys(own, letter)

    def _reach(self, unit: Unit, helper: int) -> int:
        """The provinces to which the unit in the province `helper` could support a unit, as a set of bits."""
        if unit.fleet:
            return self.board.fleet_reach[unit.place]
        return self.board.army_reach[unit.place] | self.landings(unit.place, helper)

    def _convoys(self, own: int, letter: str) -> Iterator[Order]:
        shores = numbers(next(shores for seas, shores in self._groups if seas >> own & 1))
        for origin in shores:
            if origin in self.units and not self.units[origin].fleet:
                for target in shores:
                    if target != origin:
                        yield Order("convoy", own, target, origin, False, letter)


def _union(sets: Sequence[int], members: int) -> int:
    found = 0
    for member in numbers(members):
        found |= sets[member]
    return found


class Result(NamedTuple):
    """What became of an order. `why`: "" for success, otherwise a reason such as "bounced" or "illegal: ..."."""

    power: int
    order: Order
    success: bool
    why: str


class PhaseOutcome(NamedTuple):
    """The result of a step.

    `position`: the next one in which somebody decides. `results`: one for each given order, by power and then as
    listed. `dislodged`: the units that this movement phase dislodged.
    """

    position: Position
    results: tuple[Result, ...]
    dislodged: tuple[Dislodged, ...] = ()


def step(board: Board, position: Position, orders: Mapping[int, Sequence[Order]]) -> PhaseOutcome:
    """Execute the orders of a phase. `orders`: power -> its orders. For each unit the first legal order counts; the
    rules decide for the others."""
    return _OUTCOMES[position.stage](board, position, orders)


def deciders(board: Board, position: Position) -> tuple[int, ...]:
    """The powers that have something to decide, () if the game is over."""
    if board.winner(position) is not None:
        return ()
    if position.stage == "M":
        return tuple(sorted({code >> 1 for code in position.units[1::2]}))
    if position.stage == "R":
        return tuple(sorted({code >> 1 for code in position.dislodged[1::3]}))
    legality = Legality(board, position)
    return tuple(power for power in range(len(board.powers)) if legality.adjustment(power))


def _movement(board: Board, position: Position, orders: Mapping[int, Sequence[Order]]) -> PhaseOutcome:
    legality, chosen = Legality(board, position), dict[int, Order]()
    given = _chosen(legality, chosen, orders)
    done = adjudicate(board, position, chosen)
    ends = dict(zip(legality.units, zip(done.success, done.why, strict=True), strict=True))
    results = _results(board, given, ends)
    after = Position(position.year, position.season, "R", done.units, position.owners, done.dislodged, done.contested)
    return PhaseOutcome(_with_retreats(board, after), results, dislodged_units(done.dislodged))


def _results(
    board: Board, given: Sequence[tuple[int, Order, str]], ends: Mapping[int, tuple[bool, str]]
) -> tuple[Result, ...]:
    """The result of each order: its fault, or what became of its unit."""
    return tuple(
        Result(power, order, False, fault) if fault else Result(power, order, *ends[board.province_of[order.place]])
        for power, order, fault in given
    )


def _with_retreats(board: Board, after: Position) -> Position:
    """The position in which the units that can retreat do so; the others are disbanded at once."""
    if not after.dislodged:
        return _next_season(board, after, after.units)
    legality = Legality(board, after)
    able = b"".join(
        after.dislodged[at : at + 3]
        for at, gone in zip(range(0, len(after.dislodged), 3), after.dislodged_list(), strict=True)
        if legality.retreats(gone)
    )
    if not able:
        return _next_season(board, after, after.units)
    return Position(after.year, after.season, "R", after.units, after.owners, able, after.contested)


def _retreats(board: Board, position: Position, orders: Mapping[int, Sequence[Order]]) -> PhaseOutcome:
    legality, chosen = Legality(board, position), dict[int, Order]()
    given = _chosen(legality, chosen, orders)
    goals = [board.province_of[order.target] for order in chosen.values() if order.act == "move"]
    units = [(place, code) for place, code in zip(position.units[::2], position.units[1::2], strict=True)]
    ends: dict[int, tuple[bool, str]] = {}
    for province, gone in legality.leaving.items():
        order = chosen.get(province)
        if order is None or order.act == "disband":
            ends[province] = (True, "")
        elif goals.count(board.province_of[order.target]) > 1:
            ends[province] = (False, "bounced")
        else:
            ends[province] = (True, "")
            units.append((order.target, 2 * gone.unit.power + gone.unit.fleet))
    return PhaseOutcome(_next_season(board, position, packed(units)), _results(board, given, ends))


def _adjustments(board: Board, position: Position, orders: Mapping[int, Sequence[Order]]) -> PhaseOutcome:
    legality = Legality(board, position)
    results: list[Result] = []
    units = set(legality.units.values())
    for power in range(len(board.powers)):
        given, left = orders.get(power, ()), legality.adjustment(power)
        built: dict[int, Order] = {}
        for order in given:
            fault = _choose(legality, built, power, order)
            results.append(Result(power, order, not fault, fault))
        if left > 0:
            units |= {Unit(power, o.unit == "F", o.place) for o in built.values() if o.act == "build"}
            continue
        gone = {legality.units[province] for province in built}
        forced = _civil_disorder(board, position, [u for u in position.units_of(power) if u not in gone])
        units -= gone | set(forced[: -left - len(gone)])
    after = packed([(unit.place, 2 * unit.power + unit.fleet) for unit in units])
    following = Position(position.year + 1, "S", "M", after, position.owners)
    return PhaseOutcome(following, tuple(results))


_OUTCOMES = {"M": _movement, "R": _retreats, "A": _adjustments}


def _chosen(
    legality: Legality, chosen: dict[int, Order], orders: Mapping[int, Sequence[Order]]
) -> list[tuple[int, Order, str]]:
    """Note the first legal order of each unit in `chosen`; all orders, each with the reason why it does not count."""
    return [
        (power, order, _choose(legality, chosen, power, order)) for power in sorted(orders) for order in orders[power]
    ]


def _choose(legality: Legality, chosen: dict[int, Order], power: int, order: Order) -> str:
    fault = accept(legality, chosen, power, order)
    return fault and f"illegal: {fault}"


def accept(legality: Legality, chosen: dict[int, Order], power: int, order: Order) -> str:
    """Note an order in `chosen` under its province if it is legal beside those; otherwise the reason why it does not
    count. In stage A, `chosen` has the orders of one power."""
    if fault := legality.fault(power, order):
        return fault
    if legality.position.stage == "A" and len(chosen) >= abs(legality.adjustment(power)):
        return "none left"
    province = legality.board.province_of[order.place] if order.act != "waive" else -1 - len(chosen)
    if province in chosen:
        return "the unit has an order"
    chosen[province] = order
    return ""


def _next_season(board: Board, position: Position, units: bytes) -> Position:
    """The first position after a movement and its retreats in which somebody decides."""
    if position.season == "S":
        return Position(position.year, "F", "M", units, position.owners)
    owners, centre_at = bytearray(position.owners), board.centre_at
    for place, code in zip(units[::2], units[1::2], strict=True):
        if centre_at[place] >= 0:
            owners[centre_at[place]] = code >> 1
    winter = Position(position.year, "W", "A", units, bytes(owners))
    if deciders(board, winter):
        return winter
    return Position(position.year + 1, "S", "M", units, winter.owners)


def _civil_disorder(board: Board, position: Position, units: list[Unit]) -> list[Unit]:
    """Units in the order in which they are disbanded if their power does not say which: those farthest from the centres
    that it owns first, fleets before armies, then by the province's full name. Every border counts as one step for both
    kinds of units (the rules of 2023)."""
    if not units:
        return []
    owned = [centre for centre, owner in zip(board.centres, position.owners, strict=True) if owner == units[0].power]
    steps = _distances(board, owned)
    return sorted(
        units,
        key=lambda unit: (
            -steps[board.province_of[unit.place]],
            not unit.fleet,
            board.titles[board.province_of[unit.place]],
        ),
    )


def _distances(board: Board, origins: Sequence[int]) -> list[int]:
    """For each province the number of borders to the nearest origin; a large number if there is none."""
    steps = [len(board.provinces)] * len(board.provinces)
    level, reached = 0, set(origins)
    while reached:
        for province in reached:
            steps[province] = level
        near = {neighbour for province in reached for neighbour in board.touching[province]}
        reached = {province for province in near if steps[province] > level + 1}
        level += 1
    return steps
