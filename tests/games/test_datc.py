"""The Diplomacy Adjudicator Test Cases: 171 cases from shared/data/datc, each with the result of each order."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from pvg.games.diplomacy.orders import Order, parse, write
from pvg.games.diplomacy.phases import Outcome, step
from pvg.games.diplomacy.position import Position
from pvg.games.diplomacy.setup import place
from pvg.games.diplomacy.standard import standard_board

CASES = Path(os.environ.get("PVG_DATC", Path(__file__).parents[3] / "shared" / "data" / "datc")) / "cases.json"
BOARD = standard_board()
PHASES = {"Main": "S1901M", "Retreat": "S1901M", "Build": "W1901A"}

# Cases whose expected result contradicts the rule that this engine follows: case and edition -> that rule.
EXCEPTIONS: dict[tuple[str, str], str] = {}


def cases() -> list[Any]:
    found = json.loads(CASES.read_text())["cases"] if CASES.is_file() else []
    return [pytest.param(case, id="-".join(filter(None, (case["name"], case.get("edition"))))) for case in found]


def split(text: str) -> tuple[int, str]:
    name, _, rest = text.partition(": ")
    power = BOARD.power(name)
    assert power is not None
    return power, rest


def position_of(case: dict[str, Any], orders: dict[str, str | None]) -> Position:
    """The case's own units, or else those that its orders are written to."""
    units: dict[str, list[str]] = defaultdict(list)
    start = case.get("starting_state")
    building = case["phase"] == "Build"
    texts = start if start is not None else [] if building else list(orders)
    for text in texts:
        power, rest = split(text)
        units[BOARD.powers[power]].append(" ".join(rest.split()[:2]))
    owners = None
    if building:
        stand = place(BOARD, units)
        owned = dict(zip(BOARD.centres, stand.owners, strict=True))
        for name, power_name in case.get("occupiers", {}).items():
            owned[BOARD.find(name) or 0] = BOARD.power(power_name) or 0
        owners = defaultdict(list)
        for centre, power in owned.items():
            if power < len(BOARD.powers):
                owners[BOARD.powers[power]].append(BOARD.provinces[centre])
    return place(BOARD, units, PHASES[case["phase"]], owners)


def played(position: Position, orders: dict[str, str | None]) -> tuple[Outcome, dict[str, bool]]:
    given: dict[int, list[Order]] = defaultdict(list)
    found: dict[tuple[int, Order], str] = {}
    unread: dict[str, bool] = {}
    for text in orders:
        power, rest = split(text)
        order = parse(BOARD, rest)
        if order is None:
            unread[text] = False
            continue
        assert parse(BOARD, write(BOARD, order)) == order
        given[power].append(order)
        found[power, order] = text
    outcome = step(BOARD, position, given)
    return outcome, unread | {found[r.power, r.order]: r.success for r in outcome.results}


def differences(case: dict[str, Any]) -> list[str]:
    orders = case["orders"]
    before = case.get("preceding_main_phase")
    wrong = []
    if before:
        main, success = played(position_of(case, before["orders"]), before["orders"])
        wrong += compared(before["orders"], success)
        position = main.position
    else:
        position = position_of(case, orders)
    outcome, success = played(position, orders)
    wrong += compared(orders, success)
    if "civil_disorder" in case:
        gone = {f"{BOARD.powers[r.power][:3].upper()}: {r.order.unit} {BOARD.places[r.order.place]}" for r in outcome.implied}
        if gone != set(case["civil_disorder"]):
            wrong.append(f"civil disorder removes {gone}, expected {case['civil_disorder']}")
    return wrong


def compared(expected: dict[str, str | None], success: dict[str, bool]) -> list[str]:
    return [
        f"{text}: {'Succeeds' if success[text] else 'Fails'}, expected {wanted}"
        for text, wanted in expected.items()
        if wanted is not None and success[text] != (wanted == "Succeeds")
    ]


@pytest.mark.skipif(not CASES.is_file(), reason="the DATC data is not there")
@pytest.mark.parametrize("case", cases())
def test_a_case_has_the_expected_result(case: dict[str, Any]) -> None:
    rule = EXCEPTIONS.get((case["name"], case.get("edition", "")))
    wrong = differences(case)
    assert bool(wrong) == bool(rule), "\n".join([*wrong, rule or ""])
