"""The plan game on the mini map: grades against an independent brute force, certificates, flaws, and questions."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.config.sections import AllSections
from pvg.config.task import DiplomacyMiniTask
from pvg.game.roles import prompt_renderer
from pvg.games.diplomacy_board import Position, mini_board, place
from pvg.games.diplomacy_movement import Order, adjudicate, occupant
from pvg.games.diplomacy_phases import Legality
from pvg.models.embedded_training import diplomacy_tokenizer
from pvg.models.tokenizer import Tokenizer
from pvg.records import Problem, Role
from pvg.tasks.diplomacy_mini import PROVINCES, DiplomacyMini, listed_problems, orders_of, plan_problem, replies_to

pytestmark = pytest.mark.slow

TASK = DiplomacyMini(DiplomacyMiniTask())
NAMES = listed_problems()
OWN, ENEMY = 0, 1  # powers of the engine's board


def positions() -> list[tuple[str, str]]:
    """The own and enemy armies of every position."""
    return [
        ("".join(own), "".join(enemy))
        for own in itertools.combinations(PROVINCES, 3)
        for enemy in itertools.combinations([province for province in PROVINCES if province not in own], 2)
    ]


def usable_problems(own: str, enemy: str) -> set[str]:
    """The problems of a position that can be listed (pvg.tasks.diplomacy_mini.listed_problems)."""
    tables = {f"{own}/{enemy}>{target}": replies_to(plan_problem(f"{own}/{enemy}>{target}")) for target in PROVINCES}
    holding = ";".join(f"{army}." for army in own)
    return {
        name
        for name, table in tables.items()
        if table.sound_P.any()
        and not table.sound_P[table.plans[holding]]
        and (table.stands_PR[:, 0] & ~table.sound_P).any()
    }


def board_position(own: str, enemy: str) -> Position:
    return place(mini_board(), {"White": [f"A {army}" for army in own], "Black": [f"A {army}" for army in enemy]})


def engine_order(text: str) -> Order:
    """The engine's order for `d.`, `de`, `d+e` or `d+eb`."""
    numbers = [PROVINCES.index(letter) for letter in text if letter in PROVINCES]
    if text.endswith("."):
        return Order("hold", numbers[0])
    if "+" not in text:
        return Order("move", numbers[0], target=numbers[1])
    return Order("support", numbers[0], target=numbers[2] if len(numbers) == 3 else -1, origin=numbers[1])


def stands(problem: Problem, plan: str, reply: str) -> bool:
    """Whether an own army stands in the target, by the engine."""
    own, enemy = problem.metadata["own"], problem.metadata["enemy"]
    texts = [*plan.split(";"), *reply.split(";")]
    orders = {PROVINCES.index(text[0]): engine_order(text) for text in texts}
    moved = adjudicate(mini_board(), board_position(own, enemy), orders)
    return occupant(moved.units, mini_board(), PROVINCES.index(problem.metadata["target"])) == OWN


def plain(order: Order) -> str:
    """The text of an engine's order in the notation of the mini map."""
    here = PROVINCES[order.place]
    if order.act == "hold":
        return f"{here}."
    if order.act == "move":
        return here + PROVINCES[order.target]
    return f"{here}+{PROVINCES[order.origin]}" + (PROVINCES[order.target] if order.target >= 0 else "")


def test_the_orders_are_those_of_the_engine_without_supports_for_the_other_side() -> None:
    for own, enemy in random.Random(0).sample(positions(), 40):
        for power, side in ((OWN, own), (ENEMY, enemy)):
            for at, found in Legality(mini_board(), board_position(own, enemy)).orders_of(power).items():
                army = PROVINCES[at]
                legal = {plain(order) for order in found if order.origin < 0 or PROVINCES[order.origin] in side}
                assert set(orders_of(army, side.replace(army, ""))) == legal


@pytest.mark.drill
def test_arrays_and_the_engine_agree_in_all_of_some_positions() -> None:
    """Every plan against every reply, and every target."""
    for own, enemy in random.Random(2).sample(positions(), 2):
        problems = [plan_problem(f"{own}/{enemy}>{target}") for target in PROVINCES]
        tables = [replies_to(problem) for problem in problems]
        board, position = mini_board(), board_position(own, enemy)
        for (row, plan), (column, reply) in itertools.product(
            enumerate(tables[0].plan_texts), enumerate(tables[0].reply_texts)
        ):
            orders = {PROVINCES.index(text[0]): engine_order(text) for text in [*plan.split(";"), *reply.split(";")]}
            units = adjudicate(board, position, orders).units
            found = [occupant(units, board, place_) == OWN for place_ in range(len(PROVINCES))]
            assert found == [bool(table.stands_PR[row, column]) for table in tables], (own, enemy, plan, reply)


def test_sound_means_that_no_reply_works_tried_one_by_one() -> None:
    draw = random.Random(3)
    seen = set()
    for name in draw.sample(NAMES, 12):
        problem = plan_problem(name)
        table = replies_to(problem)
        sound = [plan for plan, row in table.plans.items() if table.sound_P[row]]
        for plan in [draw.choice(sound), *draw.sample(table.plan_texts, 3)]:
            refuting = [reply for reply in table.replies if not stands(problem, plan, reply)]
            grade = TASK.grade(problem, plan)
            assert (grade.well_formed, grade.answer) == (True, plan)
            assert grade.correct == (not refuting)
            assert grade.note == (f"refuted by {refuting[0]}" if refuting else "")
            seen.add(grade.correct)
    assert seen == {True, False}


# --- a worked problem (docs/diplomacy.md) -----------------------------------------------------------------------------

WORKED = plan_problem("ade/bg>d")


@pytest.mark.parametrize(
    ("text", "correct", "note", "flaw", "certified"),
    [
        ("a.;d.;e.", False, "refuted by bd;g+bd", 2, False),
        ("ab;d.;e.", False, "refuted by bd;g+bd", 2, False),
        ("ab;d.;e.!bd;g+bd", False, "refuted by bd;g+bd", 2, True),
        ("ab;d.;e.!b+gd;gd", False, "refuted by bd;g+bd", 2, False),  # the attack from a cuts this support
        ("ab;d.;e.!bd", False, "refuted by bd;g+bd", 2, False),
        ("a.;d.;e+d", True, "", None, False),
        ("a.;d.;e+d!bd;g+bd", True, "", None, False),
        ("ab;d.;eg", True, "", None, False),
    ],
)
def test_the_worked_problem(text: str, correct: bool, note: str, flaw: int | None, certified: bool) -> None:
    grade = TASK.grade(WORKED, text)
    assert grade.well_formed
    assert (grade.correct, grade.note) == (correct, note)
    assert TASK.flaw(WORKED, text) == flaw
    assert grade.checks is not None
    assert grade.checks.certified == certified


@pytest.mark.parametrize("style", ["tag", "plain"])
def test_an_answer_in_the_documented_format_is_correct_for_every_style(style: str) -> None:
    """The prompts of the two styles that the task allows end with the question, and the answer follows."""
    tokenizer = Tokenizer(diplomacy_tokenizer())
    problem = next(iter(TASK.problems("test")))
    for role in Role:
        prompt = tokenizer.decode(prompt_renderer(AllSections(prompts=style).prompts, tokenizer)(problem, role))
        assert prompt.endswith(problem.question)
        table = replies_to(problem)
        plan = next(plan for plan, row in table.plans.items() if table.sound_P[row])
        assert tokenizer.decode(tokenizer.encode(plan)) == plan
        assert TASK.grade(problem, plan).correct
        assert not TASK.grade(problem, plan[:-1]).correct


def test_problems_are_listed_as_they_are_computed_and_are_drawn_once() -> None:
    some = random.Random(4).sample(positions(), 30)
    listed = {name for own, enemy in some for name in NAMES if name.startswith(f"{own}/{enemy}>")}
    assert listed == set().union(*(usable_problems(own, enemy) for own, enemy in some))
    assert len(set(NAMES)) == len(NAMES)
    train, test = list(TASK.problems("train")), list(TASK.problems("test"))
    assert not {p.id for p in train} & {p.id for p in test}
    assert (len(train), len(test)) == (DiplomacyMiniTask().problems, DiplomacyMiniTask().test_problems)
    assert [p.id for p in TASK.problems("train")] == [p.id for p in train]
    fewer = DiplomacyMini(DiplomacyMiniTask(problems=10))
    assert list(fewer.problems("test")) == test
    assert list(fewer.problems("train")) == train[:10]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(NAMES), st.randoms(use_true_random=False))
def test_the_first_bad_order_is_the_one_after_which_nothing_helps(name: str, draw: random.Random) -> None:
    problem = plan_problem(name)
    table = replies_to(problem)
    plan = draw.choice(table.plan_texts)
    flaw = TASK.flaw(problem, plan)
    ends = TASK.cuts(plan)
    assert [plan[start:end] for start, end in TASK.steps(plan)] == [f"{o};" for o in plan.split(";")[:-1]] + [
        plan.split(";")[-1]
    ]
    sound = [text for text, row in table.plans.items() if table.sound_P[row]]
    if flaw is None:
        assert plan in sound
        return
    before, after = plan[: ends[flaw - 1] if flaw else 0], plan[: ends[flaw]]
    assert any(text.startswith(before) for text in sound)
    whole = f"{after.removesuffix(';')};"  # without the end, the last order e+d would also be the beginning of e+dg
    assert not any(f"{text};".startswith(whole) for text in sound)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(NAMES), st.randoms(use_true_random=False))
def test_a_certificate_counts_if_the_plan_works_unopposed_and_the_reply_refutes_it(
    name: str, draw: random.Random
) -> None:
    problem = plan_problem(name)
    table = replies_to(problem)
    row, column = draw.randrange(len(table.plans)), draw.randrange(len(table.replies))
    plan, reply = table.plan_texts[row], table.reply_texts[column]
    assert table.reply_texts[0] == ";".join(f"{army}." for army in problem.metadata["enemy"])
    grade, bare = TASK.grade(problem, f"{plan}!{reply}"), TASK.grade(problem, plan)
    assert grade.checks is not None
    assert bare.checks is not None
    assert grade.checks.certified == bool(table.stands_PR[row, 0] and not table.stands_PR[row, column])
    assert grade.checks.passed == pytest.approx(np.mean(table.stands_PR[row]))
    assert not bare.checks.certified
    assert (grade.correct, grade.note) == (bare.correct, bare.note)
    assert not (grade.correct and grade.checks.certified)
    # The verifier reads the same with and without it, also when a question follows.
    assert TASK.shown(f"{plan}!{reply}") == TASK.shown(plan) == plan
    assert TASK.shown(f"{plan}!{reply}?{reply}=+") == f"{plan}?{reply}=+"


@settings(deadline=None)
@given(st.text(max_size=60) | st.text(alphabet="abcdefgh/>?.;+-=!", max_size=40))
def test_any_text_gets_a_grade_and_has_steps(text: str) -> None:
    grade = TASK.grade(WORKED, text)
    assert grade.well_formed or not grade.correct
    assert grade.well_formed != grade.note.startswith("malformed: ")
    places = TASK.steps(text)
    assert all(start < end for start, end in places)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(places))
    assert TASK.flaw(WORKED, text) is None or not grade.correct
    assert bool(TASK.questions(WORKED, text)) == grade.well_formed


def test_the_answer_to_what_if_is_the_engines() -> None:
    problem = plan_problem(NAMES[5])
    table = replies_to(problem)
    plan = next(plan for plan, row in table.plans.items() if table.stands_PR[row, 0] and not table.sound_P[row])
    questions = TASK.questions(problem, f"{plan}!bd")
    assert questions == [f"?{reply}" for reply in table.replies]
    told = {question: TASK.answer(problem, plan, question) for question in questions}
    assert set(told.values()) == {"=+", "=-"}
    for question, answer in told.items():
        assert (answer == "=+") == stands(problem, plan, question.removeprefix("?"))
