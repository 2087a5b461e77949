"""The Diplomacy Adjudicator Test Cases: 171 cases from shared/data/datc, each with the result of each order."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from pvg.errors import UsageError
from pvg.games.diplomacy_board import Position, place, standard_board
from pvg.games.diplomacy_movement import Order, parse, write
from pvg.games.diplomacy_phases import PhaseOutcome, step

CASES = Path(os.environ.get("PVG_DATC", Path(__file__).parents[3] / "shared" / "data" / "datc")) / "cases.json"
BOARD = standard_board()
PHASES = {"Main": "S1901M", "Retreat": "S1901M", "Build": "W1901A"}

# Cases whose expected result contradicts the rule that this engine follows: case and edition -> that rule.
EXCEPTIONS = {
    (
        "t6a05_move_to_own_sector_with_convoy",
        "",
    ): "A support of an illegal move fits no order, so it fails. All units end where the case says.",
    ("t6b15_supporting_foreign_unit_with_unspecified_coast", ""): "A support that names no coast fits a move to either "
    "coast. The two attacks are equally strong and bounce.",
    ("t6g02_kidnapping_an_army", "1971"): "The edition of 1982: a foreign fleet alone does not make a move a convoy.",
    ("t6g07_swapping_with_illegal_intent", "1971"): "The edition of 2023: an impossible convoy order shows no intent.",
    (
        "t6g19_swapping_with_intent_of_unnecessary_convoy",
        "2023",
    ): "The edition of 1971: a fleet that belongs to a chain "
    "of fleets between both coasts may convoy, also if a shorter chain exists.",
    ("t6h01_no_supports_during_retreat", ""): "Two units that retreat to one province are both disbanded.",
    ("t6h03_no_convoy_during_retreat", ""): "The case lists no attack that could dislodge its units.",
    ("t6j09_civil_disorder_must_be_counted_from_both_coasts_second_scenario", "2023"): "Skagerrak, Norway, St "
    "Petersburg are two borders; Albania is three from Sevastopol, so the army is farther away.",
    ("t6j11_distance_to_owned_supply_center", "1971"): "The edition of 2023: distances count from owned centres.",
}
# It has a unit in "nor", which is no province of the map, and names no attacker.
BROKEN = {"t6h02_no_supports_from_retreating_unit"}


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


def played(position: Position, orders: dict[str, str | None]) -> tuple[PhaseOutcome, dict[str, bool]]:
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
        gone = {
            f"{BOARD.short(unit.power).upper()}: {'AF'[unit.fleet]} {BOARD.places[unit.place]}"
            for unit in set(position.unit_list()) - set(outcome.position.unit_list())
        }
        if gone != set(case["civil_disorder"]):
            wrong.append(f"civil disorder removes {gone}, expected {case['civil_disorder']}")
    return wrong


def compared(expected: dict[str, str | None], success: dict[str, bool]) -> list[str]:
    return [
        f"{text}: {'Succeeds' if success[text] else 'Fails'}, expected {wanted}"
        for text, wanted in expected.items()
        if wanted is not None and success[text] != (wanted == "Succeeds")
    ]


@pytest.mark.skipif(not CASES.is_file(), reason=f"no {CASES}: `PVG_DATC=FOLDER make test`")
@pytest.mark.parametrize("case", cases())
def test_a_case_has_the_expected_result(case: dict[str, Any]) -> None:
    if case["name"] in BROKEN:
        with pytest.raises(UsageError, match="nor"):
            differences(case)
        return
    rule = EXCEPTIONS.get((case["name"], case.get("edition", "")))
    wrong = differences(case)
    assert bool(wrong) == bool(rule), "\n".join([*wrong, rule or ""])
