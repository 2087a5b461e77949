"""The replies that can matter, against all legal replies: small random positions with random plans."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from pvg.games.diplomacy_board import Board, Position, mini_board, place, standard_board
from pvg.games.diplomacy_movement import Order, parse
from pvg.games.diplomacy_phases import Legality
from pvg.tasks.diplomacy_claims import ClaimedPlan, Contest, judge, read_plan, reply_space

pytestmark = pytest.mark.slow

MOST_REPLIES = 4000


def drawn_position(board: Board, generator: np.random.Generator) -> Position:
    """Two or three units of power 0 and two or three of two other powers, all near each other."""
    centre = int(generator.integers(len(board.provinces)))
    near = {centre, *board.touching[centre]}
    near |= {p for q in list(near) for p in board.touching[q]}
    size = min(len(near), int(generator.integers(4, 7)))
    units: dict[str, list[str]] = {name: [] for name in board.powers}
    for number, province in enumerate(generator.permutation(sorted(near))[:size].tolist()):
        places = [at for at in (*board.coasts[province], province) if board.fleets[at]]
        kinds = [f"F {board.places[at]}" for at in places[: len(board.coasts[province]) or 1]]
        kinds += [f"A {board.provinces[province]}"] if board.kinds[province] != "sea" else []
        power = 0 if number % 2 else 1 + number % (len(board.powers) - 1)
        units[board.powers[power]].append(str(generator.choice(kinds)))
    return place(board, units)


def all_replies(board: Board, position: Position, power: int) -> list[dict[int, Order]] | None:
    """None if there are too many."""
    legal = {
        board.province_of[at]: orders
        for other in range(len(board.powers))
        if other != power
        for at, orders in Legality(board, position).orders_of(other).items()
    }
    if np.prod([len(orders) for orders in legal.values()]) > MOST_REPLIES:
        return None
    return [dict(zip(legal, chosen, strict=True)) for chosen in itertools.product(*legal.values())]


def judged(
    board: Board, position: Position, plan: Mapping[int, Order], replies: Iterator[dict[int, Order]], claimed: list[int]
) -> list[tuple[bool, int]]:
    """For each claimed province: whether a unit of power 0 stands there after every reply, and the most against it."""
    found = [(True, 0)] * len(claimed)
    for reply in replies:
        contest = Contest(board, position, {**plan, **reply})
        for number, province in enumerate(claimed):
            stands, most = found[number]
            found[number] = (stands and contest.stands(province) == 0, max(most, contest.against(province, 0)))
    return found


def cases(board: Board, seed: int, count: int) -> Iterator[tuple[Position, dict[int, Order], list[int]]]:
    """Positions with a plan and the provinces that it claims."""
    generator = np.random.default_rng(seed)
    while count:
        position = drawn_position(board, generator)
        plan = {
            board.province_of[at]: orders[int(generator.integers(len(orders)))]
            for at, orders in Legality(board, position).orders_of(0).items()
        }
        ends = sorted({board.province_of[order.target] if order.act == "move" else at for at, order in plan.items()})
        if ends:
            count -= 1
            claimed = generator.permutation(ends)[: int(generator.integers(1, 3))].tolist()
            yield position, plan, claimed


@pytest.mark.parametrize("board", [standard_board(), mini_board()], ids=lambda board: board.name)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_replies_that_can_matter_judge_a_plan_like_all_replies(board: Board, seed: int) -> None:
    compared = sound = 0
    for position, plan, claimed in cases(board, seed, 30):
        every = all_replies(board, position, 0)
        if every is None:
            continue
        space = reply_space(board, position, 0, plan, claimed)
        expected = judged(board, position, plan, iter(every), claimed)
        assert judged(board, space.position, plan, space.every(), claimed) == expected, (position, plan, claimed)
        compared += 1
        sound += expected[0][0]
    assert compared > 10
    assert 0 < sound < compared


@pytest.mark.parametrize(
    ("units", "plan", "reply"),
    [
        (  # a second fleet replaces the convoy that the army needs to bounce
            {"England": ["A yor", "A par", "F eng"], "Germany": ["F nth"]},
            "A yor-bre\nA par-bre\nF eng C yor-bre\nbre 1>0",
            "F nth C yor-bre",
        ),
        (  # the army goes by its own convoy, because it changes places with the unit in hol
            {"England": ["A bel", "A ruh", "F nth"], "Germany": ["A hol", "F ska", "F nwg"]},
            "A bel-hol\nA ruh S bel-hol\nF nth C bel-hol\nhol 2>1",
            "A hol-bel; F ska-nth; F nwg S ska-nth",
        ),
    ],
)
def test_replies_about_the_plans_own_convoys_matter(units: dict[str, list[str]], plan: str, reply: str) -> None:
    board = standard_board()
    position, power = place(board, units), board.power("England")
    assert power is not None
    claimed = board.provinces.index(plan.rpartition("\n")[2][:3])
    read = read_plan(board, position, power, plan, claimed)
    assert isinstance(read, ClaimedPlan)
    orders = [order for text in reply.split("; ") if (order := parse(board, text)) is not None]
    refuting = {board.province_of[order.place]: order for order in orders}
    assert Contest(board, position, {**read.orders, **refuting}).stands(claimed) != power
    judgement = judge(board, position, power, read, 10_000, np.random.default_rng(0))
    assert judgement.false is not None
    assert not judgement.sampled
