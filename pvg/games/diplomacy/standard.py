"""The standard map: 75 provinces, 34 supply centres, 7 powers, Europe in 1901."""

from __future__ import annotations

from functools import cache

from pvg.games.diplomacy.board import Board, Kind, build_board

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
