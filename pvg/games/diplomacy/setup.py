"""Positions from names: `place(standard_board(), {"France": ["A par", "F bre"]})`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pvg.errors import UsageError
from pvg.games.diplomacy.board import Board
from pvg.games.diplomacy.position import NOBODY, Position, packed


def place(
    board: Board,
    units: Mapping[str, Sequence[str]],
    phase: str = "S1901M",
    owners: Mapping[str, Sequence[str]] | None = None,
) -> Position:
    """A position with these units: power -> "A par", "F spa/nc".

    `owners`: power -> centres. By default each power owns its home centres, and those on which its units stand. Raises
    UsageError for an unknown name, a unit that cannot stand in its place, or two units in one province.
    """
    found: dict[int, tuple[int, int]] = {}
    for name, texts in units.items():
        power = _power(board, name)
        for text in texts:
            at, fleet = _unit(board, text)
            province = board.province_of[at]
            if province in found:
                raise UsageError(f"Two units are in {board.provinces[province]}.", "Place at most one unit there.")
            found[province] = (at, 2 * power + fleet)
    owned = {centre: power for power, home in enumerate(board.homes) for centre in home}
    if owners is None:
        owned |= {province: code >> 1 for province, (_, code) in found.items()}
    else:
        owned = {_place(board, c): _power(board, name) for name, centres in owners.items() for c in centres}
    if not (phase[:1] in "SFW" and phase[-1:] in "MRA" and phase[1:-1].isdecimal() and len(phase) <= 7):
        raise UsageError(f"{phase!r} is not a phase.", "Write it like S1901M, F1901R or W1901A.")
    return Position(
        int(phase[1:-1]),
        phase[0],
        phase[-1],
        packed(list(found.values())),
        bytes(owned.get(centre, NOBODY) for centre in board.centres),
    )


def _unit(board: Board, text: str) -> tuple[int, bool]:
    letter, _, name = text.strip().partition(" ")
    if letter.upper() not in ("A", "F"):
        raise UsageError(f"{text!r} is not a unit.", "Write it like 'A par' or 'F spa/nc'.")
    at, fleet = _place(board, name), letter.upper() == "F"
    if not board.can_stand(at, fleet):
        raise UsageError(f"{text!r} cannot stand there.", "Name a province for this kind of unit, and a fleet's coast.")
    return at, fleet


def _place(board: Board, name: str) -> int:
    if (at := board.find(name)) is None:
        raise UsageError(f"The map has no place {name!r}.", "Use the short names of the map, such as 'par'.")
    return at


def _power(board: Board, name: str) -> int:
    if (power := board.power(name)) is None:
        raise UsageError(f"The map has no power {name!r}.", f"Name one of {', '.join(board.powers)}.")
    return power
