"""A position as text for a model, short, and in a long form with which a benchmark compares it.

    F1902M
    Aus: bud* vie* ser ~tri*        units; ~ is a fleet, * a unit on a centre of its own power
    Tur: ~ank* con* bul /smy        after the slash: centres of the power without a unit of its own
    Turkey                          the power that decides
    ank: arm bla con                each own unit, and where it can move without a convoy
    bul: con gre rum ser

The prompts of all powers begin with the same lines, which an engine with shared prefixes computes once.
Supports and convoys follow from the lines of the units, so the text does not list them. A retreat phase lists the
dislodged units in the same way, and a winter gives the number of builds with the free centres, or of disbands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from pvg.games.diplomacy.board import Board
from pvg.games.diplomacy.legal import Legality, destinations
from pvg.games.diplomacy.orders import Order
from pvg.games.diplomacy.position import Position, Unit


def prompt_text(board: Board, position: Position, power: int) -> str:
    """What the power needs to know, in the form that the module describes."""
    lines = [position.phase, *_standing(board, position), board.powers[power]]
    return "\n".join([*lines, *_choices(board, position, power)])


def verbose_json(board: Board, position: Position, power: int) -> str:
    """The whole board and all legal orders of the power in the long notation, as indented JSON."""
    legality = Legality(board, position)
    owned = _owned(board, position)
    state = {
        "phase": position.phase,
        "power": board.powers[power],
        "units": {
            name: [f"{'AF'[unit.fleet]} {board.places[unit.place]}" for unit in position.units_of(number)]
            for number, name in enumerate(board.powers)
        },
        "centers": {name: owned[number] for number, name in enumerate(board.powers)},
        "legal_orders": {
            board.places[place]: [long_order(board, position, order) for order in orders]
            for place, orders in legality.orders_of(power).items()
        },
    }
    return json.dumps(state, indent=2)


def long_order(board: Board, position: Position, order: Order) -> str:
    """The order in the notation of most other programs: "A PAR - BUR", "F BRE S A PAR - PIC", "A PAR R BUR"."""
    names = [name.upper() for name in board.places]
    unit = f"{order.unit} {names[order.place]}"
    aim = f" - {names[order.target]}" if order.target >= 0 else ""
    if order.act == "move":
        return (
            f"{unit} R {names[order.target]}" if position.stage == "R" else f"{unit}{aim}{' VIA' if order.via else ''}"
        )
    if order.act in ("support", "convoy"):
        helped = next(u for u in position.unit_list() if board.province_of[u.place] == board.province_of[order.origin])
        return f"{unit} {order.act[0].upper()} {'AF'[helped.fleet]} {names[helped.place]}{aim}"
    return f"{unit} {order.act[0].upper()}"


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
    """For each power the names of its centres."""
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
