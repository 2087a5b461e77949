"""A map as a value: provinces, their coasts and borders, supply centres and powers.

Everything has a number. A *province* is 0..P-1. A *place* is a province or one of its coasts (`spa/nc`), and the first
P places are the provinces. A *power* is 0..N-1. Sets of provinces are integers with one bit for each province, because
the rules ask for membership thousands of times per second.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
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


# The standard map: 75 provinces, 34 supply centres, 7 powers, Europe in 1901.

_SEAS = """
adr Adriatic Sea;aeg Aegean Sea;bal Baltic Sea;bar Barents Sea;bla Black Sea;bot Gulf of Bothnia
eas Eastern Mediterranean;eng English Channel;hel Helgoland Bight;ion Ionian Sea;iri Irish Sea;lyo Gulf of Lyon
mao Mid-Atlantic Ocean;nao North Atlantic Ocean;nth North Sea;nwg Norwegian Sea;ska Skagerrak;tys Tyrrhenian Sea
wes Western Mediterranean
"""
_INLAND = """
boh Bohemia;bud Budapest;bur Burgundy;gal Galicia;mos Moscow;mun Munich;par Paris
ruh Ruhr;ser Serbia;sil Silesia;tyr Tyrolia;ukr Ukraine;vie Vienna;war Warsaw
"""
_COASTAL = """
alb Albania;ank Ankara;apu Apulia;arm Armenia;bel Belgium;ber Berlin;bre Brest
bul Bulgaria;cly Clyde;con Constantinople;den Denmark;edi Edinburgh;fin Finland;gas Gascony
gre Greece;hol Holland;kie Kiel;lon London;lvn Livonia;lvp Liverpool;mar Marseilles
naf North Africa;nap Naples;nwy Norway;pic Picardy;pie Piedmont;por Portugal;pru Prussia
rom Rome;rum Rumania;sev Sevastopol;smy Smyrna;spa Spain;stp St Petersburg;swe Sweden
syr Syria;tri Trieste;tun Tunis;tus Tuscany;ven Venice;wal Wales;yor Yorkshire
"""
# Borders that an army crosses. Each is listed once, under one of its two provinces.
_LAND = """
cly edi lvp;edi lvp yor;lvp wal yor;lon wal yor;wal yor
por spa;spa gas mar;gas bre bur mar par;bre par pic;par bur pic;pic bel bur;mar bur pie;bur bel mun ruh
bel hol ruh;hol kie ruh;ruh kie mun;kie ber den mun;ber mun pru sil;mun boh sil tyr;pru lvn sil war
den swe;swe fin nwy;nwy fin stp;fin stp;stp lvn mos;lvn mos war;mos sev ukr war
war gal sil ukr;ukr gal rum sev;sev arm rum;sil boh gal;boh gal tyr vie;gal bud rum vie;vie bud tri tyr
bud rum ser tri;tri alb ser tyr ven;tyr pie ven;ser alb bul gre rum;alb gre;gre bul;bul con rum
con ank smy;ank arm smy;smy arm syr;arm syr;pie tus ven;ven apu rom tus;tus rom;rom apu nap;apu nap;naf tun
"""
# Borders that a fleet crosses: between seas, between a sea and a coast, and along the coasts.
_WATER = """
adr ion;aeg eas ion;bal bot;bar nwg;eas ion;eng iri mao nth;hel nth;ion tys;iri mao nao;lyo tys wes;mao nao wes
nao nwg;nth nwg ska;tys wes
adr alb apu tri ven;aeg bul/sc con gre smy;bal ber den kie lvn pru swe;bar nwy stp/nc;bla ank arm bul/ec con rum sev
bot fin lvn stp/sc swe;eas smy syr;eng bel bre lon pic wal;hel den hol kie;ion alb apu gre nap tun;iri lvp wal
lyo mar pie spa/sc tus;mao bre gas naf por spa/nc spa/sc;nao cly lvp;nth bel den edi hol lon nwy yor;nwg cly edi nwy
ska den nwy swe;tys nap rom tun tus;wes naf spa/sc tun
cly edi lvp;edi yor;yor lon;lon wal;wal lvp;bre gas pic;pic bel;bel hol;hol kie;kie ber den;ber pru;pru lvn
den swe;swe fin nwy;fin stp/sc;lvn stp/sc;nwy stp/nc;gas spa/nc;por spa/nc spa/sc;mar pie spa/sc;pie tus;tus rom
rom nap;nap apu;apu ven;ven tri;tri alb;alb gre;gre bul/sc;con ank bul/ec bul/sc smy;rum bul/ec sev;sev arm;arm ank
smy syr;naf tun
"""
_HOMES = {
    "Austria": ("bud", "tri", "vie"),
    "England": ("edi", "lon", "lvp"),
    "France": ("bre", "mar", "par"),
    "Germany": ("ber", "kie", "mun"),
    "Italy": ("nap", "rom", "ven"),
    "Russia": ("mos", "sev", "stp", "war"),
    "Turkey": ("ank", "con", "smy"),
}
_START = {
    "Austria": ("A bud", "F tri", "A vie"),
    "England": ("F edi", "F lon", "A lvp"),
    "France": ("F bre", "A mar", "A par"),
    "Germany": ("A ber", "F kie", "A mun"),
    "Italy": ("F nap", "A rom", "A ven"),
    "Russia": ("A mos", "F sev", "F stp/sc", "A war"),
    "Turkey": ("F ank", "A con", "A smy"),
}
_NEUTRAL = ("bel", "bul", "den", "gre", "hol", "nwy", "por", "rum", "ser", "spa", "swe", "tun")


@cache
def standard_board() -> Board:
    """The standard map with the position of spring 1901."""
    return build_board(
        "standard",
        {**_provinces(_SEAS, "sea"), **_provinces(_INLAND, "land"), **_provinces(_COASTAL, "coast")},
        land=pairs(_LAND),
        water=pairs(_WATER),
        powers=_HOMES,
        start=_START,
        neutral=_NEUTRAL,
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
