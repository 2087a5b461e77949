"""Properties of the Diplomacy engine on random positions and orders, and the phases of a game."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.games.diplomacy import Diplomacy
from pvg.games.diplomacy_board import Board, Position, mini_board, packed, place, standard_board
from pvg.games.diplomacy_movement import LONGEST_ORDER, Order, adjudicate, parse, parse_orders, write
from pvg.games.diplomacy_phases import Legality, deciders, step

pytestmark = pytest.mark.slow

BOARD = standard_board()
WORDS = ["A", "F", "par", "bur", "stp/nc", "a", "f", "h", "S", "C", "-", "->", "to", "H", "via", "build", "D"]
seeds = st.integers(0, 2**32)


def crowded(draw: random.Random, board: Board = BOARD, most: int = 34) -> Position:
    """Units of random powers in random places: denser than in real games, so that more orders meet."""
    units: dict[int, tuple[int, int]] = {}
    for _ in range(draw.randint(2, most)):
        at = draw.randrange(len(board.places))
        province, power = board.province_of[at], draw.randrange(len(board.powers))
        can = [2 * power] if board.kinds[province] != "sea" and at == province else []
        can += [2 * power + 1] if board.fleets[at] else []
        if can:
            units[province] = (at, draw.choice(can))
    return Position(1901, "S", "M", packed(list(units.values())), board.start.owners)


def helpful(draw: random.Random, board: Board, position: Position) -> dict[int, list[Order]]:
    """Random legal orders, of which many fit: supports and convoys of moves that are ordered are preferred."""
    options = {p: Legality(board, position).orders_of(p) for p in range(len(board.powers))}
    moves = {
        (board.province_of[at], board.province_of[order.target])
        for listed in options.values()
        for at, orders in listed.items()
        if (order := draw.choice(orders)).act == "move"
    }
    given: dict[int, list[Order]] = {}
    for power, listed in options.items():
        given[power] = []
        for at, orders in listed.items():
            fitting = [
                o for o in orders if o.act == "move" and (board.province_of[at], board.province_of[o.target]) in moves
            ]
            fitting += [o for o in orders if o.act in ("support", "convoy") and (o.origin, o.target) in moves]
            given[power].append(draw.choice(fitting if fitting and draw.random() < 0.7 else orders))
    return given


def by_province(orders: Mapping[int, list[Order]]) -> dict[int, Order]:
    return {BOARD.province_of[order.place]: order for listed in orders.values() for order in listed}


def random_game(seed: int, phases: int = 40) -> Iterator[tuple[Position, dict[int, list[Order]]]]:
    draw, position = random.Random(seed), BOARD.start
    for _ in range(phases):
        orders = {
            power: [draw.choice(listed) for listed in Legality(BOARD, position).orders_of(power).values()]
            for power in deciders(BOARD, position)
        }
        yield position, orders
        position = step(BOARD, position, orders).position


@settings(max_examples=150, deadline=None)
@given(seeds)
def test_the_result_does_not_depend_on_the_order_of_the_listing(seed: int) -> None:
    draw = random.Random(seed)
    position = crowded(draw)
    orders = helpful(draw, BOARD, position)
    shuffled = {power: draw.sample(orders[power], len(orders[power])) for power in draw.sample(sorted(orders), 7)}
    one, other = step(BOARD, position, orders), step(BOARD, position, shuffled)
    assert one.position == other.position
    assert sorted(one.results) == sorted(other.results)


@settings(max_examples=150, deadline=None)
@given(seeds)
def test_the_decisions_agree_with_the_rules(seed: int) -> None:
    """At most one unit per province, no unit is lost, and each move in a phase without convoys has the strength that an
    independent count gives it."""
    draw = random.Random(seed)
    position = crowded(draw)
    orders = by_province(helpful(draw, BOARD, position))
    done = adjudicate(BOARD, position, orders)
    provinces = [BOARD.province_of[at] for at in done.units[::2]]
    assert len(provinces) == len(set(provinces))
    assert len(done.units) // 2 + len(done.dislodged) // 3 == len(position.units) // 2
    assert not set(done.contested) & set(provinces)
    if all(o.act != "convoy" and not o.via for o in orders.values()):
        recounted(
            position,
            orders,
            dict(zip((BOARD.province_of[at] for at in position.units[::2]), done.success, strict=True)),
        )


def recounted(position: Position, orders: dict[int, Order], success: dict[int, bool]) -> None:
    """The rules written a second time: count every strength from the results, and compare."""
    power = {BOARD.province_of[u.place]: u.power for u in position.unit_list()}
    goal = {p: BOARD.province_of[o.target] for p, o in orders.items() if o.act == "move"}
    by_land = {p: g for p, g in goal.items() if success[p] or touches(position, p, g)}

    def supports(unit: int, without: int = -1) -> int:
        return sum(
            success[p] and power[p] != without
            for p, o in orders.items()
            if o.act == "support" and BOARD.province_of[o.origin] == unit
        )

    def head_to_head(one: int) -> bool:
        other = goal[one]
        return goal.get(other) == one and one in by_land and other in by_land

    for mover, target in by_land.items():
        stays = target in power and not (success[target] and target in goal and not head_to_head(mover))
        attack = 1 + supports(mover, power[target] if stays else -1)
        hold = 0
        if stays:
            hold = 1 + (supports(target) if target not in goal or head_to_head(mover) else 0)
        prevent = [
            1 + supports(other)
            for other, to in by_land.items()
            if to == target and other != mover and not (head_to_head(other) and success[target])
        ]
        own = stays and power[target] == power[mover]
        assert success[mover] == (not own and attack > max([hold, *prevent]))


def touches(position: Position, province: int, goal: int) -> bool:
    unit = next(u for u in position.unit_list() if BOARD.province_of[u.place] == province)
    reach = BOARD.fleet_reach[unit.place] if unit.fleet else BOARD.army_reach[province]
    return bool(reach >> goal & 1)


@settings(max_examples=12, deadline=None)
@given(seeds)
def test_games_keep_every_rule_from_phase_to_phase(seed: int) -> None:
    for position, orders in random_game(seed):
        assert Position.load(position.dump()) == position
        assert len(position.dump()) < 300
        before = (position.dump(), {power: list(listed) for power, listed in orders.items()})
        outcome = step(BOARD, position, orders)
        assert (position.dump(), orders) == before
        assert len(outcome.results) == sum(map(len, orders.values()))
        assert not any(result.why.startswith("illegal") for result in outcome.results if position.stage != "A")
        after = outcome.position
        provinces = [BOARD.province_of[at] for at in after.units[::2]]
        assert len(provinces) == len(set(provinces))
        assert list(after.units[::2]) == sorted(after.units[::2])
        if after.season == "S" and after.stage == "M":  # builds and disbands are done
            assert all(len(after.units_of(p)) <= after.centres_of(p) for p in range(7))


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_exactly_the_listed_orders_are_legal(seed: int) -> None:
    draw = random.Random(seed)
    position = crowded(draw, most=16)
    for power in range(7):
        listed = {order for orders in Legality(BOARD, position).orders_of(power).values() for order in orders}
        legality = Legality(BOARD, position)
        assert not any(legality.fault(power, order) for order in listed)
        for unit in position.units_of(power):
            letter = "AF"[unit.fleet]
            for target in range(len(BOARD.places)):
                tried = [Order("move", unit.place, target, unit=letter)]
                if target < len(BOARD.provinces):
                    tried += [
                        Order("support", unit.place, target, other.place, unit=letter) for other in position.unit_list()
                    ]
                    tried += [Order("convoy", unit.place, target, o.place, unit=letter) for o in position.unit_list()]
                for order in tried:
                    assert (order in listed) == (not legality.fault(power, order)), write(BOARD, order)


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text("afdebhgscn-/()> ;,\n") | st.lists(st.sampled_from(WORDS)).map(" ".join))
def test_any_text_is_read(text: str) -> None:
    for board in (BOARD, mini_board()):
        order = parse(board, text)
        assert order is None or parse(board, write(board, order)) == order
        found = parse_orders(board, text)
        assert sum(map(len, found.unread)) <= len(text)


def test_reading_takes_linear_time() -> None:
    """A quadratic reader would need minutes for the larger text."""

    def seconds(size: int) -> float:
        texts = ("(" * size, "a" * size, "par-" * (size // 4), "/nc" * (size // 3), "par H;" * (size // 6), ";" * size)
        started = time.process_time()
        for text in texts:
            parse_orders(BOARD, text)
        return time.process_time() - started

    assert seconds(200_000) < 400 * (seconds(5_000) + 0.01)
    assert parse(BOARD, "par H".ljust(LONGEST_ORDER + 1)) is None


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("A PAR - BUR", "A par-bur"),
        ("army Paris moves to Burgundy", "A par-bur"),
        ("F spa(nc) supports A mar -> gas", "F spa/nc S mar-gas"),
        ("a mar s a par", "A mar S par"),
        ("mar s par hold", "mar S par"),
        ("F eng convoys A lon - bre", "F eng C lon-bre"),
        ("lon-bel VIA CONVOY", "lon-bel via"),
        ("A par R pic", "A par-pic"),
        ("par disband", "par D"),
        ("build f stp/nc", None),
        ("F stp/nc B", "F stp/nc B"),
        ("WAIVE", "waive"),
        ("- A par-bur", "A par-bur"),
        ("\u2022 A par-bur", "A par-bur"),
        ("12. A par-bur.", "A par-bur"),
        ("A par \u2192 bur", "A par-bur"),
        ("-A par-bur", None),
        ("123. A par-bur", None),
        ("par", None),
        ("par-bur-mun", None),
        ("", None),
    ],
)
def test_usual_notations_are_read(text: str, written: str | None) -> None:
    order = parse(BOARD, text)
    assert (write(BOARD, order) if order else None) == written


def test_a_dislodged_unit_retreats_and_a_blocked_one_is_disbanded() -> None:
    position = place(BOARD, {"Germany": ["A mun", "A ber"], "Russia": ["A sil"], "France": ["F bel"]})
    given = {3: [parse(BOARD, "mun-sil"), parse(BOARD, "ber S mun-sil")]}
    outcome = step(BOARD, position, given)  # type: ignore[arg-type]
    assert outcome.position.phase == "S1901R"
    assert deciders(BOARD, outcome.position) == (5,)
    (gone,) = outcome.dislodged
    assert BOARD.places[gone.barred] == "mun"
    back = step(BOARD, outcome.position, {5: [parse(BOARD, "sil-mun")]})  # type: ignore[list-item]
    assert [result.why for result in back.results] == ["illegal: cannot retreat there"]
    assert back.position.phase == "F1901M"
    assert not back.position.units_of(5)
    away = step(BOARD, outcome.position, {5: [parse(BOARD, "sil-war")]})  # type: ignore[list-item]
    assert [BOARD.places[u.place] for u in away.position.units_of(5)] == ["war"]


def test_centres_change_hands_in_fall_only() -> None:
    position = place(BOARD, {"France": ["A bur", "F mao"]})
    spring = step(BOARD, position, {2: [parse(BOARD, "bur-bel")]})  # type: ignore[list-item]
    bel = BOARD.centres.index(BOARD.find("bel") or 0)
    assert spring.position.owners[bel] == 255
    fall = step(BOARD, spring.position, {})
    assert fall.position.owners[bel] == 2


def test_a_power_wins_with_eighteen_centres() -> None:
    owners = {"France": [BOARD.provinces[c] for c in BOARD.centres[:18]]}
    position = place(BOARD, {"France": ["A par"], "Russia": ["A mos"]}, "S1905M", owners)
    assert BOARD.winner(position) == 2
    assert deciders(BOARD, position) == ()
    assert Diplomacy().seats(position) == ()


def test_the_game_plays_scripted_years_and_keeps_its_promises() -> None:
    game = Diplomacy(last_year=1903)
    starts = [game.opening(split, number) for split in ("train", "test") for number in range(6)]
    assert len({problem.id for problem in starts}) == 12
    assert starts == [game.opening(split, number) for split in ("train", "test") for number in range(6)]
    for number, problem in enumerate(starts):
        state = game.start(problem)
        while seats := game.seats(state):
            script = ("random", "greedy")[number % 2]
            texts = {seat: game.scripted(script, state, seat, number) for seat in seats}
            actions = {seat: game.parse(state, seat, text) for seat, text in texts.items()}
            assert all(action.legal for action in actions.values())
            state = game.step(state, actions, 0)
        assert sum(game.values(state).values()) <= 34


def test_an_illegal_order_is_noted_and_the_unit_holds() -> None:
    game, state = Diplomacy(), BOARD.start
    action = game.parse(state, "France", "par-lon\nmar-bur\nhello\nBRE - MAO")
    assert action.text == "A mar-bur\nF bre-mao"
    assert action.note == "'hello' is not an order; A par-lon: cannot reach it"
    after = game.step(state, {"France": action}, 0)
    assert [BOARD.places[u.place] for u in after.units_of(2)] == ["bur", "mao", "par"]


def winter(units: list[str], centres: list[str]) -> Position:
    return place(BOARD, {"France": units}, "W1901A", {"France": centres})


@pytest.mark.parametrize(
    ("units", "centres", "text", "kept", "note"),
    [
        (["A par", "A bur"], ["par"], "waive\nbur D", "A bur D", "waive: no build left"),
        (["A par", "A bur"], ["par"], "mar B\nbur D", "A bur D", "mar B: no build left"),
        (["A par", "A bur"], ["par"], "bur D\npar D", "A bur D", "A par D: none left"),
        (["A par"], ["par", "mar"], "par D\nA mar B", "A mar B", "A par D: no disband left"),
        (["A par"], ["par", "mar"], "waive\nA mar B", "waive", "A mar B: none left"),
        (["A par"], ["par", "mar", "bre"], "A mar B\nF mar B", "A mar B", "F mar B: the unit has an order"),
    ],
)
def test_winter_orders_that_do_not_fit_the_number_of_centres(
    units: list[str], centres: list[str], text: str, kept: str, note: str
) -> None:
    """What `parse` calls legal is what `step` executes."""
    game, state = Diplomacy(), winter(units, centres)
    action = game.parse(state, "France", text)
    assert (action.text, action.note) == (kept, note)
    outcome = step(BOARD, state, {2: completed(state, text)})
    assert [write(BOARD, result.order) for result in outcome.results if result.success] == [kept]
    assert outcome.position == game.step(state, {"France": action}, 0)


def test_the_orders_of_the_instructions_are_legal() -> None:
    game = Diplomacy()
    winter_orders = ("A par B", "F stp/nc B", "par D", "waive")
    assert all(order in game.instructions for order in winter_orders)
    for power, held, centres, orders in (
        ("France", ["A bur"], ["par", "mar"], ("A par B", "waive")),
        ("Russia", ["A mos"], ["stp", "mos"], ("F stp/nc B",)),
        ("France", ["A par", "A bur"], ["par"], ("par D",)),
    ):
        state = place(BOARD, {power: held}, "W1901A", {power: centres})
        assert all(game.parse(state, power, order).note == "" for order in orders)


def completed(state: Position, text: str) -> list[Order]:
    legality = Legality(BOARD, state)
    return [legality.complete(order) for order in parse_orders(BOARD, text).orders]


@settings(max_examples=25, deadline=None)
@given(seeds, st.lists(st.sampled_from([*WORDS, "waive", "bud", "mos", ";", "\n"]), max_size=60).map(" ".join))
def test_any_completion_is_read_and_played_in_every_phase(seed: int, text: str) -> None:
    game, draw = Diplomacy(), random.Random(seed)
    for position, orders in random_game(seed, 12):
        state, texts = position, {}
        for seat in game.seats(state):
            listed = [write(BOARD, order) for order in orders[BOARD.power(seat) or 0]]
            texts[seat] = draw.choice([text, f"{text};waive", ";".join([*listed, *listed]), "waive;" * 3])
        actions = {seat: game.parse(state, seat, written) for seat, written in texts.items()}
        game.step(state, actions, 0)
        for seat, action in actions.items():
            assert game.parse(state, seat, action.text).move == action.move
