"""Diplomacy in a report: the drawing of boards, and the sections of plans and of games."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from page_checks import Page, check
from plan_samples import FULL_QUESTION, THRESHOLD, full_plan_sample, plan, played_plans
from run_samples import begin, commit, rollout, state, tell

from pvg.games.diplomacy import Diplomacy, prompt_text
from pvg.games.diplomacy_board import Board, Position, mini_board, place, standard_board
from pvg.games.diplomacy_movement import Order, parse_orders, write
from pvg.games.diplomacy_phases import step
from pvg.games.game import GameRules
from pvg.games.negotiation import Negotiation
from pvg.records import Role
from pvg.reporting.boards import board_svg, full_plan, games_section, mini_text, newest_games, plans_section
from pvg.reporting.table import page
from pvg.rollout.interaction import GameRecord, PlayedGame, SeatDecision, game_record, game_start


def draw(board: Board, position: Position, text: str) -> str:
    """The position with all orders of the text, adjudicated."""
    owner = {board.province_of[unit.place]: unit.power for unit in position.unit_list()}
    owner |= {board.province_of[found.unit.place]: found.unit.power for found in position.dislodged_list()}
    orders: dict[int, list[Order]] = {}
    for order in parse_orders(board, text).orders:
        orders.setdefault(owner.get(board.province_of[order.place], 2), []).append(order)
    return board_svg(board, position, step(board, position, orders), "A <title>")


def looks(svg: str) -> list[str]:
    return [str(found["class"]) for name, found in Page(svg).tags if name == "path" and found.get("class")]


@pytest.mark.parametrize("board", [standard_board(), mini_board()], ids=lambda board: board.name)
def test_each_province_has_its_own_tile_and_name(board: Board) -> None:
    drawn = Page(draw(board, board.start, ""))
    assert drawn.wrong == []
    assert sorted(text for text in drawn.texts if text in board.provinces) == sorted(board.provinces)
    tiles = [(float(str(tag["x"])), float(str(tag["y"]))) for name, tag in drawn.tags if name == "rect"]
    assert len(tiles) == len(board.provinces)
    for (x0, y0), (x1, y1) in itertools.combinations(tiles, 2):
        assert abs(x0 - x1) >= 52 or abs(y0 - y1) >= 44


def test_a_bounce_a_cut_support_a_dislodgement_and_a_retreat_are_marked() -> None:
    board = mini_board()
    position = place(board, {"White": ["A a", "A b"], "Black": ["A d", "A e", "A f"]})
    cut = draw(board, position, "a-d;b S a-d;d H;f-b")
    assert looks(cut).count("failure") == 3  # a bounces, b is cut, f bounces
    assert "order support power-0 failed" in looks(cut)
    assert ' dislodged"' not in cut
    gone = draw(board, position, "a-d;b S a-d;d H;e-h")
    assert gone.count(' dislodged"') == 1
    after = step(board, position, {0: parse_orders(board, "a-d;b S a-d").orders}).position
    assert after.stage == "R"
    retreat = draw(board, after, "d-g")
    assert retreat.count(' dislodged"') == 1
    assert "order move power-1" in looks(retreat)


def test_a_drawing_says_its_units_and_orders_and_escapes_texts() -> None:
    svg = draw(standard_board(), standard_board().start, "A par-bur;F lon-nth;A mun-bur")
    (whole,) = [found for name, found in Page(svg).tags if name == "svg"]
    assert "A par-bur (bounced)" in str(whole["aria-label"])
    assert "A &lt;title&gt;" in svg
    assert len(svg) < 30_000


# --- plans of a run -------------------------------------------------------------------------------------------------


def test_orders_of_the_mini_task_are_written_in_the_notation_of_games() -> None:
    assert mini_text("d.;e+d;ga;h+ga") == "A d H;A e S d;A g-a;A h S g-a"
    assert mini_text("d;zz;x+d;d!") == ""


def test_a_plan_is_shown_with_its_score_and_its_refuting_reply(tmp_path: Path) -> None:
    found = plans_section(played_plans(tmp_path, rounds=2), "diplomacy_mini", {0: THRESHOLD, 1: THRESHOLD}, 2)
    shown = check(page("plans", [], [found]))
    assert "A flawed plan that the verifier accepts sneaky score +2.500" in shown.text
    assert "refuting reply A d H A f-b (bounced)" in shown.text
    assert "no unit of the planner stands in the target. refuted by d.;fb" in shown.text
    assert "broken" not in shown.text


def test_plans_of_the_role_that_aims_at_them_come_first(tmp_path: Path) -> None:
    """A failed helpful plan with a higher score does not displace the flaw that fooled the verifier."""
    failed = plan("plan-x", Role.HELPFUL, "abe/df>d?", "ad;b+ad;ef", "d.;fb", 9.0)
    fools = plan("plan-y", Role.SNEAKY, "adg/be>d?", "a.;d.;gh!bd;e+bd", "bd;e+bd", 2.5)
    run = begin(tmp_path)
    commit(run, state("complete", rounds=[{}]), {"checkpoint-00000": [failed, fools]})
    for each, expected in ((1, ["plan-y"]), (2, ["plan-y", "plan-x"])):
        text = check(page("plans", [], [plans_section(run, "diplomacy_mini", {0: THRESHOLD}, each)])).text
        assert [name for name in text.split() if name.startswith("plan-")] == expected


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
    commit(run, state("complete", rounds=[{}]), {"checkpoint-00000": [sample]})
    shown = check(page("plans", [], [plans_section(run, "diplomacy_plan", {0: 0.0}, 2)]))
    assert "A flawed plan that the verifier accepts" in shown.text
    assert "refuting reply F nwy-nth F bel-hol" in shown.text


# --- games of a run -------------------------------------------------------------------------------------------------


def record(name: str, game: Any, round_: int = 0, policy: str = "") -> GameRecord:
    """A game of scripts, with `policy` as the seat of the policy."""
    start = game_start(game, game.opening("train", 0))
    states, decisions = [start.state], []
    while seats := game.seats(states[-1]):
        number, state = len(states) - 1, states[-1]
        texts = {seat: game.scripted("greedy", state, seat, number) for seat in seats}
        actions = {seat: game.parse(state, seat, text) for seat, text in texts.items()}
        decisions += [SeatDecision(seat, number, state, actions[seat], None, 1) for seat in seats]
        states.append(game.step(state, actions, number))
    played: PlayedGame[Any] = PlayedGame(start, 0, 0, tuple(states), tuple(decisions), "over")
    rules: GameRules[Any] = game
    players = {seat: "policy" if seat == policy else "greedy" for seat in game.values(states[0])}
    return game_record(round_, name, rules, played, players)


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = record("diplomacy", Diplomacy(last_year=1901), policy="France")
    run = begin(tmp_path)
    tell(run, {"kind": "game", "time": 1.0, **written.plain()}, {"kind": "game", **written.plain()})
    assert newest_games(run) == [written]  # recorded twice, shown once
    assert [phase.phase for phase in written.phases][:2] == ["S1901M", "F1901M"]
    assert written.phases[-1].phase == ""
    assert len(written.phases[0].decisions) == 7


def test_a_game_of_diplomacy_is_drawn_phase_by_phase(tmp_path: Path) -> None:
    run = begin(tmp_path)
    old, new = (record("diplomacy", Diplomacy(last_year=1901), round_, "France") for round_ in (0, 1))
    tell(run, *({"kind": "game", **game.plain()} for game in (old, new)))
    shown = check(page("games", [], [games_section(run, 2)]))
    assert "Round 1: diplomacy" in shown.text
    assert "Round 0" not in shown.text
    assert "France: policy" in shown.text
    phases = [phase for phase in new.phases if phase.decisions]
    boards = [found for name, found in shown.tags if name == "svg" and found.get("role") == "img"]
    assert len(boards) == len(phases)
    assert all(f"{phase.phase}: {len(phase.decisions)} decision" in shown.text for phase in phases)


def test_another_game_has_tables(tmp_path: Path) -> None:
    run = begin(tmp_path)
    game = record("negotiation", Negotiation())
    tell(run, {"kind": "game", **game.plain()})
    shown = check(page("games", [], [games_section(run, 2)]))
    assert game.phases[0].decisions[0].text in shown.text
