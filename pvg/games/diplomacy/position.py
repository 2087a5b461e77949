"""A position of the game as an immutable value of about 150 bytes.

A copy of a position is the position itself, so a fork costs nothing. Numbers of provinces, places and powers are those
of the board (pvg.games.diplomacy.board) on which the position was made.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from pvg.errors import StateError

NOBODY = 255  # the owner of a free centre, and the missing province in `dislodged`

_HEAD = struct.Struct(">2sHccBBBB")
_FORMAT = b"D1"


class Unit(NamedTuple):
    """`place`: a province, or for a fleet on a province with two coasts that coast."""

    power: int
    fleet: bool
    place: int


class Dislodged(NamedTuple):
    """A unit that must retreat. `barred`: the province of its attacker, or -1 if the attacker came by convoy."""

    unit: Unit
    barred: int


@dataclass(frozen=True, slots=True)
class Position:
    """Everything that the rules need to continue the game.

    `season`: S, F or W (spring, fall, winter). `stage`: M, R or A (movement, retreats, adjustments: builds or
    disbands). `units`: two bytes for each unit in ascending order of places: its place, and 2 * power + fleet.
    `owners`: for each of the board's centres its power, or NOBODY. `dislodged`: three bytes for each unit that must
    retreat, the first two as in `units`, then the barred province or NOBODY. `contested`: the provinces where units
    bounced, to which nobody can retreat.
    """

    year: int
    season: str
    stage: str
    units: bytes
    owners: bytes
    dislodged: bytes = b""
    contested: bytes = b""

    @property
    def phase(self) -> str:
        """Such as S1901M, F1901R or W1901A."""
        return f"{self.season}{self.year}{self.stage}"

    def unit_list(self) -> tuple[Unit, ...]:
        return tuple(map(unit_of, self.units[::2], self.units[1::2]))

    def dislodged_list(self) -> tuple[Dislodged, ...]:
        return dislodged_units(self.dislodged)

    def units_of(self, power: int) -> tuple[Unit, ...]:
        return tuple(unit for unit in self.unit_list() if unit.power == power)

    def centres_of(self, power: int) -> int:
        """The number of centres that the power owns."""
        return self.owners.count(power)

    def dump(self) -> bytes:
        parts = (self.units, self.owners, self.dislodged, self.contested)
        phase = (self.year, self.season.encode(), self.stage.encode())
        return _HEAD.pack(_FORMAT, *phase, *map(len, parts)) + b"".join(parts)

    @classmethod
    def load(cls, data: bytes) -> Position:
        """The position of a dump. Raises StateError for other bytes."""
        if len(data) < _HEAD.size:
            raise _malformed()
        mark, year, season, stage, *sizes = _HEAD.unpack_from(data)
        if mark != _FORMAT or len(data) != _HEAD.size + sum(sizes) or sizes[0] % 2 or sizes[2] % 3:
            raise _malformed()
        if season not in (b"S", b"F", b"W") or stage not in (b"M", b"R", b"A"):
            raise _malformed()
        parts, at = [], _HEAD.size
        for size in sizes:
            parts.append(data[at : at + size])
            at += size
        return cls(year, season.decode(), stage.decode(), *parts)


def dislodged_units(data: bytes) -> tuple[Dislodged, ...]:
    """What `Position.dislodged` says."""
    return tuple(
        Dislodged(unit_of(data[at], data[at + 1]), -1 if data[at + 2] == NOBODY else data[at + 2])
        for at in range(0, len(data), 3)
    )


def packed(units: list[tuple[int, int]]) -> bytes:
    """`Position.units` from pairs of place and 2 * power + fleet."""
    return bytes(number for pair in sorted(units) for number in pair)


@cache
def unit_of(place: int, code: int) -> Unit:
    """The unit that two bytes of `Position.units` stand for."""
    return Unit(code >> 1, bool(code & 1), place)


def _malformed() -> StateError:
    return StateError("These bytes are not a position of Diplomacy.", "Pass bytes that Position.dump returned.")
