"""Positions in which a rule of benchmarks/games_peer gives another result than the engine."""

from __future__ import annotations

import pytest

from benchmarks.games_peer.variants import VariantPhase
from pvg.games.diplomacy.board import place
from pvg.games.diplomacy.movement import adjudicate
from pvg.games.diplomacy.orders import parse
from pvg.games.diplomacy.standard import standard_board

BOARD = standard_board()
CASES = [
    (
        "victim-helps-a-convoyed-attack",
        {"England": "A bel-hol via; F nth C bel-hol", "Germany": "A hol H; A kie S bel-hol"},
    ),
    (
        "victim-helps-to-disrupt-a-convoy",
        {"Turkey": "A bul-arm; F ank-bla", "Russia": "F bla C bul-arm; F rum S ank-bla"},
    ),
    ("intent-without-exchange", {"England": "A nwy-swe; F ska C nwy-swe", "Russia": "F bal-ska; F den S bal-ska"}),
    ("via-without-convoy-goes-by-land", {"France": "A bel-hol via", "England": "F nth H"}),
]


@pytest.mark.parametrize(("rule", "texts"), CASES, ids=[rule for rule, _ in CASES])
def test_the_rule_changes_the_result(rule: str, texts: dict[str, str]) -> None:
    orders, units = {}, {}
    for power, text in texts.items():
        for part in text.split("; "):
            order = parse(BOARD, part)
            assert order is not None
            letter = order.unit or "A"
            units.setdefault(power, []).append(f"{letter} {BOARD.places[order.place]}")
            orders[BOARD.province_of[order.place]] = order
    position = place(BOARD, units)
    plain = adjudicate(BOARD, position, orders)
    changed = VariantPhase(BOARD, position, orders, frozenset({rule})).result()
    assert changed != plain
    assert VariantPhase(BOARD, position, orders, frozenset()).result() == plain
