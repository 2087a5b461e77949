"""Which orders are legal. The written order is checked by itself; listing all legal orders is for references and for
exhaustive replies.

A legal order is one that the map and the units allow: a move by land or sea, or by convoy over a chain of fleets of any
power, whatever their orders are. A legal order can still fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from pvg.games.diplomacy.board import Board, numbers
from pvg.games.diplomacy.movement import connected, group_of
from pvg.games.diplomacy.orders import Order
from pvg.games.diplomacy.position import Dislodged, Position, Unit, unit_of

_STAGES = {"M": ("hold", "move", "support", "convoy"), "R": ("move", "disband"), "A": ("build", "disband", "waive")}

_POWER = bytes(code >> 1 for code in range(256))  # 2 * power + fleet -> power


def fault(board: Board, position: Position, power: int, order: Order) -> str:
    """Why the order of the power is illegal, in a few words; "" for a legal order."""
    return Legality(board, position).fault(power, order)


def complete(board: Board, position: Position, order: Order) -> Order:
    """The order with the unit's letter and coast, and with the destination's coast if only one is possible."""
    return Legality(board, position).complete(order)


def orders_of(board: Board, position: Position, power: int) -> dict[int, tuple[Order, ...]]:
    """All legal orders of a power: place of the unit, or of the build -> its orders, complete and in a fixed order.

    A support does not name a coast. A move that is possible by land and by convoy is listed twice. Waiving a build is
    not listed.
    """
    return Legality(board, position).orders_of(power)


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
        surplus = self.position.centres_of(power) - self._powers.count(power)
        return min(surplus, len(self.sites(power))) if surplus > 0 else surplus

    @cached_property
    def _powers(self) -> bytes:
        """The power of each unit."""
        return self.position.units[1::2].translate(_POWER)

    def crossings(self, unit: Unit) -> list[int]:
        """The provinces that an army can reach by convoy."""
        return [] if unit.fleet else numbers(self.landings(unit.place))

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
        """The unit in the province of the place that gets orders in this stage."""
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
        for target in self.crossings(unit):
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
