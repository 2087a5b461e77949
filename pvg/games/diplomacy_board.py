"""A map as a value: provinces, their coasts and borders, supply centres and powers.

Everything has a number. A *province* is 0..P-1. A *place* is a province or one of its coasts (`spa/nc`), and the first
P places are the provinces. A *power* is 0..N-1. Sets of provinces are integers with one bit for each province, because
the rules ask for membership thousands of times per second.
"""

from __future__ import annotations

import re
import struct
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Literal, NamedTuple

from pvg.errors import StateError, UsageError

# A position of the game as an immutable value of about 150 bytes.

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
        mark, year, season, stage, *sizes = _HEAD.unpack_from(data.ljust(_HEAD.size, b"\0"))
        if mark != _FORMAT or len(data) != _HEAD.size + sum(sizes):
            raise StateError("These bytes are not a position of Diplomacy.", "Pass bytes that Position.dump returned.")
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


Kind = Literal["land", "coast", "sea"]

_COAST = re.compile(r"\(([a-z]{2})\)$")


@dataclass(frozen=True, eq=False)
class Board:
    """A map and the position at the start. Two boards are equal only if they are the same object.

    `armies`: for each province those that an army can enter by land. `fleets`: for each place those that a fleet can
    enter; a fleet on a province with two coasts is always on one of the coasts. `homes`: for each power the centres
    where it builds. `to_win`: the number of centres that wins the game, 0 if no number does.
    """

    name: str
    provinces: tuple[str, ...]
    titles: tuple[str, ...]
    kinds: tuple[Kind, ...]
    places: tuple[str, ...]
    province_of: tuple[int, ...]
    coasts: tuple[tuple[int, ...], ...]
    armies: tuple[tuple[int, ...], ...]
    fleets: tuple[tuple[int, ...], ...]
    centres: tuple[int, ...]
    powers: tuple[str, ...]
    homes: tuple[tuple[int, ...], ...]
    to_win: int
    start: Position

    def find(self, name: str) -> int | None:
        """The place with this short or full name in any case: "spa/nc", "SPA(NC)", "Spain". None if there is none."""
        return self.names.get(_COAST.sub(r"/\1", name.strip().lower()).replace(" ", ""))

    def power(self, name: str) -> int | None:
        """The power whose name begins with these letters, at least three unless it is the whole name."""
        wanted = name.strip().lower()
        for number, power in enumerate(self.powers):
            if power.lower() == wanted or (len(wanted) >= 3 and power.lower().startswith(wanted)):
                return number
        return None

    def short(self, power: int) -> str:
        """The first three letters of the power's name."""
        return self.powers[power][:3]

    def winner(self, position: Position) -> int | None:
        """The power that has won, or None."""
        if not self.to_win:
            return None
        return next((p for p in range(len(self.powers)) if position.centres_of(p) >= self.to_win), None)

    @cached_property
    def names(self) -> Mapping[str, int]:
        """Every accepted name of a place, in lower case and without spaces."""
        titles = {title.lower().replace(" ", ""): number for number, title in enumerate(self.titles)}
        return titles | {name: number for number, name in enumerate(self.places)}

    @cached_property
    def centre_at(self) -> tuple[int, ...]:
        """For each place the index of its province in `centres`, -1 if it is not one."""
        index = {province: at for at, province in enumerate(self.centres)}
        return tuple(index.get(province, -1) for province in self.province_of)

    @cached_property
    def touching(self) -> tuple[tuple[int, ...], ...]:
        """For each province every province that an army or a fleet can enter from it."""
        return tuple(
            tuple(sorted({*self.armies[p], *(self.province_of[q] for at in self._on(p) for q in self.fleets[at])}))
            for p in range(len(self.provinces))
        )

    @cached_property
    def army_reach(self) -> tuple[int, ...]:
        """`armies` as sets of bits."""
        return tuple(map(_bits, self.armies))

    @cached_property
    def fleet_reach(self) -> tuple[int, ...]:
        """For each place the provinces, on any coast, that a fleet can enter from there, as sets of bits."""
        return tuple(_bits(self.province_of[q] for q in places) for places in self.fleets)

    @cached_property
    def seas_beside(self) -> tuple[int, ...]:
        """For each province the seas that touch it, as sets of bits."""
        return tuple(_bits(q for q in near if self.kinds[q] == "sea") for near in self.touching)

    @cached_property
    def shores_beside(self) -> tuple[int, ...]:
        """For each province the coastal provinces that touch it, as sets of bits."""
        return tuple(_bits(q for q in near if self.kinds[q] == "coast") for near in self.touching)

    @cached_property
    def seas(self) -> int:
        """All seas as a set of bits."""
        return _bits(p for p, kind in enumerate(self.kinds) if kind == "sea")

    @cached_property
    def shores(self) -> int:
        """All provinces with a coast as a set of bits."""
        return _bits(p for p, kind in enumerate(self.kinds) if kind == "coast")

    def _on(self, province: int) -> tuple[int, ...]:
        return self.coasts[province] or (province,)


def build_board(
    name: str,
    provinces: Mapping[str, tuple[str, Kind]],
    land: Iterable[tuple[str, str]],
    water: Iterable[tuple[str, str]],
    powers: Mapping[str, Sequence[str]],
    start: Mapping[str, Sequence[str]],
    neutral: Sequence[str] = (),
    to_win: int = 0,
) -> Board:
    """A board from a table.

    `provinces`: short name -> full name and kind. `land` and `water`: each border for armies and for fleets once.
    `powers`: name -> home centres. `start`: power -> units such as "F stp/sc". `neutral`: centres without an owner.
    """
    land, water = list(land), list(water)
    order = sorted(provinces)
    number = {short: at for at, short in enumerate(order)}
    coast_names = sorted({name for pair in water for name in pair if "/" in name})
    places = (*order, *coast_names)
    number |= {coast: len(order) + at for at, coast in enumerate(coast_names)}
    province_of = tuple(number[place.split("/")[0]] for place in places)
    kinds = tuple(provinces[short][1] for short in order)
    coasts = tuple(tuple(number[c] for c in coast_names if c.startswith(f"{short}/")) for short in order)
    homes = tuple(tuple(sorted(number[centre] for centre in centres)) for centres in powers.values())
    centres = tuple(sorted({*(centre for home in homes for centre in home), *(number[c] for c in neutral)}))
    units = [
        (number[text.split()[1]], 2 * power + (text.split()[0] == "F"))
        for power, owner in enumerate(powers)
        for text in start[owner]
    ]
    owner_of = {centre: power for power, home in enumerate(homes) for centre in home}
    owners = bytes(owner_of.get(centre, NOBODY) for centre in centres)
    return Board(
        name=name,
        provinces=tuple(order),
        titles=tuple(provinces[short][0] for short in order),
        kinds=kinds,
        places=places,
        province_of=province_of,
        coasts=coasts,
        armies=_neighbours(land, number, len(order)),
        fleets=_neighbours(water, number, len(places)),
        centres=centres,
        powers=tuple(powers),
        homes=homes,
        to_win=to_win,
        start=Position(1901, "S", "M", packed(units), owners),
    )


def _neighbours(pairs: list[tuple[str, str]], number: Mapping[str, int], size: int) -> tuple[tuple[int, ...], ...]:
    found: list[set[int]] = [set() for _ in range(size)]
    for one, other in pairs:
        found[number[one]].add(number[other])
        found[number[other]].add(number[one])
    return tuple(tuple(sorted(near)) for near in found)


def numbers(bits: int) -> list[int]:
    """The members of a set of bits, in ascending order."""
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found


def _bits(provinces: Iterable[int]) -> int:
    return sum(1 << province for province in set(provinces))


# Positions from names: `place(standard_board(), {"France": ["A par", "F bre"]})`.


def place(
    board: Board,
    units: Mapping[str, Sequence[str]],
    phase: str = "S1901M",
    owners: Mapping[str, Sequence[str]] | None = None,
) -> Position:
    """A position with these units: power -> "A par", "F spa/nc".

    `owners`: power -> centres. By default each power owns its home centres, and those on which its units stand. Raises
    UsageError for an unknown place.
    """
    powers = {board.short(power): power for power in range(len(board.powers))}
    found = [
        (_place(board, text[2:]), 2 * powers[name[:3]] + (text[0] == "F"))
        for name, texts in units.items()
        for text in texts
    ]
    owned = {centre: power for power, home in enumerate(board.homes) for centre in home}
    if owners is None:
        owned |= {board.province_of[at]: code >> 1 for at, code in found}
    else:
        owned = {_place(board, centre): powers[name[:3]] for name, centres in owners.items() for centre in centres}
    held = bytes(owned.get(centre, NOBODY) for centre in board.centres)
    return Position(int(phase[1:-1]), phase[0], phase[-1], packed(found), held)


def _place(board: Board, name: str) -> int:
    if (at := board.find(name)) is None:
        raise UsageError(f"The map has no place {name!r}.", "Use the short names of the map, such as 'par'.")
    return at


@cache
def standard_board() -> Board:
    """The standard map with the position of spring 1901."""
    found = tomllib.loads(files(__package__).joinpath("standard_map.toml").read_text(encoding="utf-8"))
    seas, inland, coastal = found["seas"], found["inland"], found["coastal"]
    return build_board(
        "standard",
        {**_provinces(seas, "sea"), **_provinces(inland, "land"), **_provinces(coastal, "coast")},
        land=pairs(found["land"]),
        water=pairs(found["water"]),
        powers=found["homes"],
        start=found["start"],
        neutral=found["neutral"],
        to_win=18,
    )


def pairs(table: str) -> list[tuple[str, str]]:
    """The borders of a table whose entries begin with a place and go on with its neighbours."""
    entries = (entry.split() for entry in table.replace("\n", ";").split(";") if entry)
    return [(first, other) for first, *others in entries for other in others]


def _provinces(table: str, kind: Kind) -> dict[str, tuple[str, Kind]]:
    return {entry[:3]: (entry[4:], kind) for entry in table.replace("\n", ";").split(";") if entry}


# A map of eight provinces with armies only, small enough that every reply of the other side can be tried.

_BORDERS = ("ab", "bc", "ad", "bd", "bf", "cf", "de", "ef", "dg", "eg", "eh", "fh", "gh")


@cache
def mini_board() -> Board:
    """Two powers, no supply centres. The start is one example; the task places its own units."""
    return build_board(
        "mini",
        {name: (name.upper(), "land") for name in "abcdefgh"},
        land=[(border[0], border[1]) for border in _BORDERS],
        water=[],
        powers={"White": (), "Black": ()},
        start={"White": ("A d", "A e", "A g"), "Black": ("A b", "A f")},
    )
