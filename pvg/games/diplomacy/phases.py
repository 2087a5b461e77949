"""One step of the game: a position and everybody's orders give the next position, and a result for each order.

The stages are those of the game: movement in spring and fall, retreats after each if a unit was dislodged, and in
winter builds or disbands. A step skips stages in which nobody has a choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pvg.games.diplomacy.board import Board
from pvg.games.diplomacy.legal import Legality
from pvg.games.diplomacy.movement import adjudicate
from pvg.games.diplomacy.orders import Order
from pvg.games.diplomacy.position import Dislodged, Position, Unit, dislodged_units, packed


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
    return _STAGES[position.stage](board, position, orders)


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


_STAGES = {"M": _movement, "R": _retreats, "A": _adjustments}


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
