"""A map as a value: provinces, their coasts and borders, supply centres and powers.

Everything has a number. A *province* is 0..P-1. A *place* is a province or one of its coasts (`spa/nc`), and the first
P places are the provinces. A *power* is 0..N-1. Sets of provinces are integers with one bit for each province, because
the rules ask for membership thousands of times per second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pvg.errors import UsageError
from pvg.games.diplomacy.position import NOBODY, Position, Unit, packed

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

    def can_stand(self, place: int, fleet: bool) -> bool:
        """Whether an army or a fleet can be in the place."""
        if fleet:
            return bool(self.fleets[place])
        return place < len(self.provinces) and self.kinds[place] != "sea"

    def admits(self, position: Position) -> bool:
        """Whether the board can have this position. Positions of other boards, and bytes of strangers, may not fit."""
        units, gone = position.unit_list(), position.dislodged_list()
        leaving = [one.unit for one in gone]
        if not all(self._has(unit) for unit in (*units, *leaving)):
            return False
        provinces = {*(one.barred for one in gone), *position.contested} - {-1}
        owners = {*range(len(self.powers)), NOBODY}
        return (
            (position.season == "W") == (position.stage == "A")
            and (position.stage == "R") == bool(gone)
            and not (position.contested and not gone)
            and list(position.units[::2]) == sorted(position.units[::2])
            and self._apart(units)
            and self._apart(leaving)
            and all(province < len(self.provinces) for province in provinces)
            and len(position.owners) == len(self.centres)
            and owners >= set(position.owners)
        )

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

    def _has(self, unit: Unit) -> bool:
        known = unit.power < len(self.powers) and unit.place < len(self.places)
        return known and self.can_stand(unit.place, unit.fleet)

    def _apart(self, units: Sequence[Unit]) -> bool:
        return len({self.province_of[unit.place] for unit in units}) == len(units)

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
    """A board from a table, checked.

    `provinces`: short name -> full name and kind. `land` and `water`: each border for armies and for fleets once.
    `powers`: name -> home centres. `start`: power -> units such as "F stp/sc". `neutral`: centres without an owner.
    Raises ValueError for a border that the kinds of its two sides forbid, a border that is named twice, a coast that
    has no border, or an unknown name.
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
    _check_borders(land, water, {short: kind for short, (_, kind) in provinces.items()}, coast_names)
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


def _check_borders(
    land: list[tuple[str, str]], water: list[tuple[str, str]], kinds: Mapping[str, Kind], coasts: Sequence[str]
) -> None:
    for borders, forbidden in ((land, "sea"), (water, "land")):
        if len({frozenset(pair) for pair in borders}) != len(borders) or any(a == b for a, b in borders):
            raise ValueError("a border is named twice, or leads from a province to itself")
        for place in (place for pair in borders for place in pair):
            if kinds[place.split("/")[0]] == forbidden:
                raise ValueError(f"{place} is {forbidden} and cannot have this border")
    split = {coast.split("/")[0] for coast in coasts}
    for place in (place for pair in water for place in pair):
        if place in split:
            raise ValueError(f"a fleet border of {place} must name one of its coasts")


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
