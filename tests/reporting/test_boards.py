"""Boards of Diplomacy as SVG: layouts without overlaps, and signs that say what became of the orders."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from page_checks import Page, check
from plan_samples import FULL_QUESTION, THRESHOLD, full_plan_sample, plan, played_plans
from run_samples import begin, commit, played, rollout, state

from benchmarks.pages.draw_plans import PICTURE, picture
from pvg.games.diplomacy.board import Board, place
from pvg.games.diplomacy.game import prompt_text
from pvg.games.diplomacy.orders import Order, parse, parse_orders, write
from pvg.games.diplomacy.phases import step
from pvg.games.diplomacy.position import Position
from pvg.games.diplomacy.standard import mini_board, standard_board
from pvg.records import Role
from pvg.reporting import board as board_module
from pvg.reporting.board import TILE, DrawnOrder, board_svg, crossed, described, free_bend, spoken, unit_point
from pvg.reporting.board import _bent as bent
from pvg.reporting.board_places import LAYOUTS
from pvg.reporting.plans_on_board import full_plan, mini_orders, section
from pvg.reporting.table import page

BOARDS = [standard_board(), mini_board()]
NAME_WIDTH, NAME_HEIGHT = 8.0, 12.0  # pixels: of one letter at most, and of a line


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_every_province_has_a_place_and_no_two_tiles_overlap(board: Board) -> None:
    layout = LAYOUTS[board.name]
    assert sorted(layout.places) == sorted(board.provinces)
    width, height = layout.size
    for name in board.provinces:
        x, y = layout.centres[name]
        assert TILE[0] / 2 < x < width - TILE[0] / 2
        assert TILE[1] / 2 < y < height - TILE[1] / 2
    for one, other in itertools.combinations(board.provinces, 2):
        (x0, y0), (x1, y1) = layout.centres[one], layout.centres[other]
        assert abs(x0 - x1) > TILE[0] + 2 or abs(y0 - y1) > TILE[1] + 2, (one, other)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_no_two_names_overlap_in_the_drawing(board: Board) -> None:
    drawn = Page(draw(board, board.start, ""))
    places = [
        (float(str(found["x"])), float(str(found["y"])))
        for name, found in drawn.tags
        if name == "text" and "x" in found
    ]
    names = [text for text in drawn.texts if text in board.provinces]
    assert sorted(names) == sorted(board.provinces)
    spans = [(x, y) for x, y in places if (x, y) != (13.0, 15.0)]  # without the coasts beside fleets
    assert len(spans) == len(board.provinces)
    for (x0, y0), (x1, y1) in itertools.combinations(spans, 2):
        assert abs(x0 - x1) > 3 * NAME_WIDTH or abs(y0 - y1) > NAME_HEIGHT


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_no_border_crosses_the_tile_of_a_third_province(board: Board) -> None:
    layout = LAYOUTS[board.name]
    for province, near in enumerate(board.touching):
        for other in (q for q in near if q > province):
            one, two = board.provinces[province], board.provinces[other]
            line = bent(unit_point(layout, one), unit_point(layout, two), free_bend(board.name, one, two))
            assert crossed(layout, line, {one, two}) == set(), (one, two)


def draw(board: Board, position: Position, text: str) -> str:
    """The position with all orders of the text, adjudicated."""
    owner = {board.province_of[unit.place]: unit.power for unit in position.unit_list()}
    owner |= {board.province_of[found.unit.place]: found.unit.power for found in position.dislodged_list()}
    orders: dict[int, list[Order]] = {}
    for order in parse_orders(board, text).orders:
        orders.setdefault(owner.get(board.province_of[order.place], 2), []).append(order)
    outcome = step(board, position, orders)
    drawn = [DrawnOrder(r.order, r.success, r.why, f"power-{r.power}") for r in outcome.results]
    return board_svg(
        board, position, drawn, ident="x", title="A title", description="Words.", dislodged=outcome.dislodged
    )


def looks(svg: str) -> list[str]:
    return [str(found["class"]) for name, found in Page(svg).tags if name == "path" and found.get("class")]


def test_a_bounce_a_cut_support_and_a_dislodgement_are_marked() -> None:
    board = mini_board()
    units = {"White": ["A a", "A b"], "Black": ["A d", "A e", "A f"]}
    position = place(board, units)
    cut = looks(draw(board, position, "a-d;b S a-d;d H;f-b"))
    assert cut.count("failure") == 3  # a bounces, b is cut, f bounces
    assert cut.count("burst") == 0
    assert "order support power-0 failed" in cut
    assert "order power-1" in cut  # d holds
    gone = looks(draw(board, position, "a-d;b S a-d;d H;e-h"))
    assert gone.count("burst") == 1
    assert gone.count("failure") == 0  # a hold that is dislodged has the burst alone


def test_a_free_centre_does_not_take_the_colour_of_the_card_around_the_board() -> None:
    """The card of a sneaky plan sets --c. A board resets it, and only signs of a power or side set it again."""
    css = (Path(board_module.__file__).parent / "templates" / "board.css").read_text(encoding="utf-8")
    (rule,) = re.findall(r"^\.board \{([^}]*)\}", css, re.MULTILINE)
    assert "--c: initial;" in rule
    position = place(standard_board(), {"France": ["A par"]}, owners={"France": ["par"]})
    centres = [look for look in looks(draw(standard_board(), position, "")) if look.startswith("centre")]
    assert sorted(set(map(str.strip, centres))) == ["centre", "centre power-2"]


def test_moves_in_opposite_directions_are_apart() -> None:
    board = mini_board()
    svg = draw(board, place(board, {"White": ["A d"], "Black": ["A e"]}), "d-e;e-d")
    moves = [str(found["d"]) for name, found in Page(svg).tags if name == "path" and found.get("class") == "halo"]
    assert len(moves) == 2
    heights = [float(re.split("[Q ]", move)[3]) for move in moves]  # of the control points
    assert abs(heights[0] - heights[1]) > 10


def test_a_retreat_starts_beside_the_unit_that_dislodged_it() -> None:
    board = mini_board()
    position = place(board, {"White": ["A a", "A b"], "Black": ["A d"]})
    after = step(board, position, {0: parse_orders(board, "a-d;b S a-d").orders}).position
    assert after.stage == "R"
    svg = draw(board, after, "d-g")
    assert looks(svg).count("burst") == 1
    assert "order power-1" in looks(svg)
    start = next(
        str(found["d"]) for name, found in Page(svg).tags if name == "path" and found.get("class") == "order power-1"
    )
    x, y = map(float, re.match(r"M([\d.]+) ([\d.]+)", start).groups())  # type: ignore[union-attr]
    unit = unit_point(LAYOUTS["mini"], "d")
    assert 0 < math.dist((x, y), unit) < 40


def test_a_drawing_has_a_title_a_description_and_names_as_text() -> None:
    svg = draw(standard_board(), standard_board().start, "A par-bur;F lon-nth;A mun-bur")
    drawn = Page(svg)
    assert drawn.wrong == []
    (whole,) = [found for name, found in drawn.tags if name == "svg"]
    assert whole["aria-labelledby"] == "x-title x-desc"
    assert {"x-title", "x-desc"} <= {found.get("id") for _, found in drawn.tags}
    assert {"A title", "Words.", "par", "Paris"} <= set(drawn.texts)
    assert len(svg) < 25_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A par-bur", "par moves to bur"),
        ("A lon-bre via", "lon moves to bre by convoy"),
        ("F eng C lon-bre", "eng convoys lon to bre"),
        ("A par S mar-bur", "par supports mar to bur"),
        ("A par S mar", "par supports mar"),
        ("A par H", "par holds"),
        ("F stp/nc B", "builds a fleet in stp/nc"),
        ("A par D", "par is disbanded"),
        ("waive", "no build"),
    ],
)
def test_orders_in_words(text: str, words: str) -> None:
    board = standard_board()
    order = parse(board, text)
    assert order is not None
    assert spoken(board, order) == words
    assert described(board, DrawnOrder(order, False, "bounced")).endswith(" (bounced)")


# --- plans of a run -------------------------------------------------------------------------------------------------


def test_mini_orders_read_the_notation_of_the_task() -> None:
    board = mini_board()
    orders = mini_orders(board, "d.;e+d;ga;h+ga")
    assert orders is not None
    assert [spoken(board, order) for order in orders] == [
        "d holds",
        "e supports d",
        "g moves to a",
        "h supports g to a",
    ]
    for text in ("", "d", "d.;", "zz", "d.;x+d", "d!"):
        assert mini_orders(board, text) is None


def test_a_plan_is_shown_with_its_score_and_its_refuting_reply(tmp_path: Path) -> None:
    found = section(played_plans(tmp_path, rounds=2), "diplomacy_mini", {0: THRESHOLD, 1: THRESHOLD}, 2)
    shown = check(page("plans", [], [found]))
    assert shown.text.count("A flawed plan that the verifier accepts") == 2  # one in each round
    newest = shown.text[: shown.text.index("Round 0")]
    assert "A flawed plan that the verifier accepts sneaky score +2.500" in newest
    assert "refuting reply d holds f moves to b bounced" in newest
    assert "Afterwards no unit of the planner stands in d. refuted by d.;fb" in newest
    assert newest.count("Afterwards a unit of the planner stands in d. sound") == 2
    assert "broken" not in shown.text
    ids = [found["id"] for _, found in shown.tags if "id" in found]
    assert len(ids) == len(set(ids))


def test_plans_of_the_role_that_aims_at_them_come_first(tmp_path: Path) -> None:
    """A failed helpful plan with a higher score does not displace the flaw that fooled the verifier."""
    failed = plan("failed", Role.HELPFUL, "abe/df>d?", "ad;b+ad;ef", "d.;fb", 9.0)
    fools = plan("fools", Role.SNEAKY, "adg/be>d?", "a.;d.;gh!bd;e+bd", "bd;e+bd", 2.5)
    run = begin(tmp_path)
    commit(run, state("complete", rounds=[{}]), {"checkpoint-00000": [failed, fools]})
    for each, shown in ((1, ["fools"]), (2, ["fools", "failed"])):
        drawn = check(page("plans", [], [section(run, "diplomacy_mini", {0: THRESHOLD}, each)]))
        labels = [
            str(found["aria-labelledby"]) for name, found in drawn.tags if name == "svg" and "aria-labelledby" in found
        ]
        assert [label.split("-title")[0] for label in labels] == [f"plan-{name}" for name in shown]


def test_a_plan_of_the_full_map_is_read_from_its_question(tmp_path: Path) -> None:
    note = "false claim in step 2: refuted by F bel-hol; F nwy-nth (sampled)"
    sample = full_plan_sample("A ruh-hol\nhol 1>0", note, correct=False)
    plan = full_plan(sample)
    assert plan is not None
    board = plan.board
    assert board.powers[plan.own] == "Germany"
    assert board.provinces[plan.target] == "hol"
    assert plan.text == "hol 1>0"
    assert [write(board, order) for order in plan.orders] == ["A ruh-hol"]
    replies = {board.powers[power]: [write(board, order) for order in orders] for power, orders in plan.reply.items()}
    assert replies == {"France": ["F bel-hol"], "England": ["F nwy-nth"]}
    for power, name in enumerate(board.powers):  # the position is that of the question
        if plan.position.units_of(power):
            assert prompt_text(board, plan.position, power).split("\n")[1:6] == FULL_QUESTION.split("\n")[1:6], name
    assert full_plan(rollout("x", Role.SNEAKY, correct=False, score=1.0)) is None

    run = begin(tmp_path)
    proven = full_plan_sample(
        "A ruh-hol\nA kie S ruh-hol\nhol 2>1", "sampled: 99 replies refute no claim", correct=True
    )
    commit(run, state("complete", rounds=[{}]), {"checkpoint-00000": [sample, proven]})
    shown = check(page("plans", [], [section(run, "diplomacy_plan", {0: 0.0}, 2)]))
    assert "A flawed plan that the verifier accepts" in shown.text
    assert "A plan without a known refutation that the verifier accepts" in shown.text
    assert "refuting reply nwy moves to nth bel moves to hol" in shown.text


def test_the_picture_of_the_docs_is_up_to_date() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture()  # make it with: python -m benchmarks.pages.draw_plans


def test_a_plan_in_another_form_is_not_drawn(tmp_path: Path) -> None:
    run = played(tmp_path)
    assert not any(section(run, "diplomacy_mini", {}, 2).body)


def test_other_runs_do_not_load_the_boards(tmp_path: Path) -> None:
    played(tmp_path, "first")
    code = (
        "import sys; from pathlib import Path; from pvg.store import RunDirectory\n"
        "from pvg.reporting.run_page import collect, run_page; from pvg.reporting.run_summary import read_run\n"
        f"run = RunDirectory.open({str(tmp_path / 'first')!r}, Path('runs'))\n"
        "text = run_page(collect(run, read_run(run), 2))\n"
        "assert '--power-0' not in text\n"
        "assert not [name for name in sys.modules if name.startswith('pvg.reporting') and 'board' in name]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
