"""The maps: every border of the standard map, and what a table must not say."""

from __future__ import annotations

import pytest

from pvg.games.diplomacy_board import Board, mini_board, standard_board

BOARD = standard_board()
# The neighbours of each province, independent of the table of borders: A, then F for each place with fleet borders.
LISTED = """
A alb: gre ser tri | A ank: arm con smy | A apu: nap rom ven | A arm: ank sev smy syr | A bel: bur hol pic ruh
A ber: kie mun pru sil | A boh: gal mun sil tyr vie | A bre: gas par pic | A bud: gal rum ser tri vie
A bul: con gre rum ser | A bur: bel gas mar mun par pic ruh | A cly: edi lvp | A con: ank bul smy | A den: kie swe
A edi: cly lvp yor | A fin: nwy stp swe | A gal: boh bud rum sil ukr vie war | A gas: bre bur mar par spa
A gre: alb bul ser | A hol: bel kie ruh | A kie: ber den hol mun ruh | A lon: wal yor | A lvn: mos pru stp war
A lvp: cly edi wal yor | A mar: bur gas pie spa | A mos: lvn sev stp ukr war | A mun: ber boh bur kie ruh sil tyr
A naf: tun | A nap: apu rom | A nwy: fin stp swe | A par: bre bur gas pic | A pic: bel bre bur par
A pie: mar tus tyr ven | A por: spa | A pru: ber lvn sil war | A rom: apu nap tus ven | A ruh: bel bur hol kie mun
A rum: bud bul gal ser sev ukr | A ser: alb bud bul gre rum tri | A sev: arm mos rum ukr
A sil: ber boh gal mun pru war | A smy: ank arm con syr | A spa: gas mar por | A stp: fin lvn mos nwy
A swe: den fin nwy | A syr: arm smy | A tri: alb bud ser tyr ven vie | A tun: naf | A tus: pie rom ven
A tyr: boh mun pie tri ven vie | A ukr: gal mos rum sev war | A ven: apu pie rom tri tus tyr
A vie: boh bud gal tri tyr | A wal: lon lvp yor | A war: gal lvn mos pru sil ukr | A yor: edi lon lvp wal
F adr: alb apu ion tri ven | F aeg: bul/sc con eas gre ion smy | F alb: adr gre ion tri | F ank: arm bla con
F apu: adr ion nap ven | F arm: ank bla sev | F bal: ber bot den kie lvn pru swe | F bar: nwg nwy stp/nc
F bel: eng hol nth pic | F ber: bal kie pru | F bla: ank arm bul/ec con rum sev | F bot: bal fin lvn stp/sc swe
F bre: eng gas mao pic | F cly: edi lvp nao nwg | F con: aeg ank bla bul/ec bul/sc smy | F den: bal hel kie nth ska swe
F eas: aeg ion smy syr | F edi: cly nth nwg yor | F eng: bel bre iri lon mao nth pic wal | F fin: bot stp/sc swe
F gas: bre mao spa/nc | F gre: aeg alb bul/sc ion | F hel: den hol kie nth | F hol: bel hel kie nth
F ion: adr aeg alb apu eas gre nap tun tys | F iri: eng lvp mao nao wal | F kie: bal ber den hel hol
F lon: eng nth wal yor | F lvn: bal bot pru stp/sc | F lvp: cly iri nao wal | F lyo: mar pie spa/sc tus tys wes
F mao: bre eng gas iri naf nao por spa/nc spa/sc wes | F mar: lyo pie spa/sc | F naf: mao tun wes
F nao: cly iri lvp mao nwg | F nap: apu ion rom tys | F nth: bel den edi eng hel hol lon nwg nwy ska yor
F nwg: bar cly edi nao nth nwy | F nwy: bar nth nwg ska stp/nc swe | F pic: bel bre eng | F pie: lyo mar tus
F por: mao spa/nc spa/sc | F pru: bal ber lvn | F rom: nap tus tys | F rum: bla bul/ec sev | F sev: arm bla rum
F ska: den nth nwy swe | F smy: aeg con eas syr | F swe: bal bot den fin nwy ska | F syr: eas smy
F tri: adr alb ven | F tun: ion naf tys wes | F tus: lyo pie rom tys | F tys: ion lyo nap rom tun tus wes
F ven: adr apu tri | F wal: eng iri lon lvp | F wes: lyo mao naf spa/sc tun tys | F yor: edi lon nth
F bul/ec: bla con rum | F bul/sc: aeg con gre | F spa/nc: gas mao por | F spa/sc: lyo mao mar por wes
F stp/nc: bar nwy | F stp/sc: bot fin lvn
"""


def neighbours(board: Board) -> str:
    land = [
        f"A {board.places[p]}: {' '.join(board.places[q] for q in near)}" for p, near in enumerate(board.armies) if near
    ]
    water = [
        f"F {board.places[p]}: {' '.join(sorted(board.places[q] for q in near))}"
        for p, near in enumerate(board.fleets)
        if near
    ]
    return "\n".join(land + water)


def test_the_standard_map_has_the_known_numbers() -> None:
    kinds = [BOARD.kinds.count(kind) for kind in ("sea", "land", "coast")]
    assert (len(BOARD.provinces), kinds, len(BOARD.places)) == (75, [19, 14, 42], 81)
    assert (len(BOARD.centres), BOARD.to_win, len(BOARD.start.unit_list())) == (34, 18, 22)
    assert [len(home) for home in BOARD.homes] == [3, 3, 3, 3, 3, 4, 3]
    assert (sum(map(len, BOARD.armies)), sum(map(len, BOARD.fleets))) == (2 * 111, 2 * 141)


def test_every_border_of_the_standard_map() -> None:
    listed = [line.strip() for line in LISTED.replace("|", "\n").splitlines() if line.strip()]
    assert sorted(neighbours(BOARD).splitlines()) == sorted(listed)


@pytest.mark.parametrize("board", [BOARD, mini_board()], ids=lambda board: board.name)
def test_borders_are_symmetric_and_fit_the_units(board: Board) -> None:
    for province, near in enumerate(board.armies):
        assert all(province in board.armies[other] for other in near)
        assert not near or board.kinds[province] != "sea"
    for place, near in enumerate(board.fleets):
        assert all(place in board.fleets[other] for other in near)
        assert not near or board.kinds[board.province_of[place]] != "land"
        assert not near or place >= len(board.provinces) or not board.coasts[place]


def test_the_mini_map_is_the_drawn_one() -> None:
    board = mini_board()
    borders = {f"{board.places[a]}{board.places[b]}" for a, near in enumerate(board.armies) for b in near if a < b}
    assert borders == {"ab", "bc", "ad", "bd", "bf", "cf", "de", "dg", "ef", "eg", "eh", "fh", "gh"}
    assert not board.centres
    assert not any(board.fleets)
