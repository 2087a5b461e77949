"""Plans on the full map: the format in every prompt style, near misses, claims, flaws and sampled replies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "verifier"))
from tiny_verifiers import english_tokenizer

from pvg.config.sections import AllSections
from pvg.config.task import DiplomacyPlanTask
from pvg.game.roles import prompt_renderer
from pvg.games.diplomacy_board import Position, place, standard_board
from pvg.games.diplomacy_movement import parse
from pvg.records import Problem, Role
from pvg.tasks import open_task
from pvg.tasks.diplomacy_claims import Contest
from pvg.tasks.diplomacy_plan import DiplomacyPlan, plan_problem, plan_wording
from pvg.tasks.task import LocatesFlaws

pytestmark = pytest.mark.slow

BOARD = standard_board()


def section(**settings) -> DiplomacyPlanTask:
    return DiplomacyPlanTask(**{"problems": 5, "test_problems": 3, **settings})


@pytest.fixture(scope="module")
def task() -> DiplomacyPlan:
    return DiplomacyPlan(section())


def problem_of(position: Position, power: str, target: str) -> Problem:
    return plan_problem(BOARD, position, BOARD.powers.index(power), BOARD.provinces.index(target), "")


@pytest.fixture
def burgundy() -> Problem:
    """Two French armies can enter Burgundy, one German army too; another one can attack Marseilles."""
    return problem_of(place(BOARD, {"France": ["A gas", "A mar"], "Germany": ["A mun", "A pie"]}), "France", "bur")


@pytest.fixture
def example() -> Problem:
    position = place(BOARD, {"France": ["A gas", "A mar"], "Germany": ["A mun"]}, owners={"France": ["mar"]})
    return problem_of(position, "France", "bur")


@pytest.mark.parametrize("style", ["chat", "text", "plain", "tag"])
def test_a_plan_in_the_format_of_each_prompt_style_is_correct(
    task: DiplomacyPlan, example: Problem, style: str
) -> None:
    tokenizer = english_tokenizer()
    render = prompt_renderer(AllSections(prompts=style).prompts, tokenizer)
    helpful, sneaky = (tokenizer.decode(render(example, role)) for role in Role)
    assert all(example.question in text for text in (helpful, sneaky))
    documented = style in ("chat", "text")
    for part in ("'bur 2>1'", "one order per line", "A gas-bur\nA mar S gas-bur\nbur 2>1"):
        assert (part in helpful) == documented
    assert (helpful == sneaky) == (style == "plain")
    assert task.grade(example, plan_wording().answers[Role.HELPFUL]).correct


@pytest.mark.parametrize(
    "text",
    [
        "A gas-bur\nA mar S gas-bur\nbur 2>1",
        "a GAS - BUR; mar supports a gas -> bur; BUR 2 > 1",
        "\n  gas-bur \n\n mar S gas-bur\nBurgundy: 2>1.\n",
        "gas-bur\nmar S gas-bur\nbur 2>1\n",
        "gas-bur\nmar S gas-bur\nmar 1>0\nbur 2>1",
    ],
)
def test_tolerated_forms_of_a_sound_plan_are_correct(task: DiplomacyPlan, example: Problem, text: str) -> None:
    grade = task.grade(example, text)
    assert grade.correct
    assert grade.answer == "bur 2>1"
    assert grade.note.startswith("proven: ")
    assert task.flaw(example, text) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no orders and no claims"),
        ("gas-bur\nmar S gas-bur", "no claim for bur at the end"),
        ("gas-bur\nbur 2>1\nmar 1>0", "no claim for bur at the end"),
        ("gas-mun\nbur 2>1", "illegal order: cannot reach it (step 1)"),
        ("mun-bur\nbur 2>1", "illegal order: not your unit (step 1)"),
        ("bur 2>1\ngas-bur\nbur 2>1", "no claim after a claim (step 2)"),
        ("gas-bur\ngas H\nbur 1>0", "a second order for a unit (step 2)"),
        ("gas-bur\nbur 2>1\nbur 2>1", "a second claim for a province (step 3)"),
        ("I move to Burgundy.\nbur 2>1", "neither an order nor a claim (step 1)"),
        ("gas-bur\nbur 2<1", "neither an order nor a claim (step 2)"),
        ("gas H\n" * 100, "too long"),
    ],
)
def test_what_is_no_plan_is_malformed(task: DiplomacyPlan, example: Problem, text: str, reason: str) -> None:
    grade = task.grade(example, text)
    assert (grade.correct, grade.well_formed, grade.note) == (False, False, f"malformed: {reason}")
    assert task.flaw(example, text) is None


@pytest.mark.parametrize(
    ("text", "step", "reason"),
    [
        ("gas-bur\nbur 1>0", 1, "refuted by A mun-bur"),
        ("gas-bur\nmar S gas-bur\nbur 2>0", 2, "refuted by A mun-bur"),
        ("gas-bur\nmar S gas-bur\nbur 3>1", 2, "the orders give bur the strength 2"),
        ("gas-bur\nmar S gas-bur\nbur 2=1", 2, "a tie does not let a unit in"),
        ("gas-bur\nmar S gas-bur\nbur 2>2", 2, "2 is not more than 2"),
        ("gas-bur\nmar S gas-bur\npar 1>0\nbur 2>1", 2, "the orders give par the strength 0"),
        ("gas H\nmar H\nmar 2>0\nbur 1>0", 2, "the orders give mar the strength 1"),
    ],
)
def test_near_misses_are_wrong_at_their_first_false_claim(
    task: DiplomacyPlan, example: Problem, text: str, step: int, reason: str
) -> None:
    grade = task.grade(example, text)
    assert (grade.correct, grade.well_formed) == (False, True)
    assert grade.note == f"false claim in step {step + 1}: {reason}"
    assert isinstance(task, LocatesFlaws)
    assert task.flaw(example, text) == step
    assert text[: task.cuts(text)[step]].endswith(text.split("\n")[step])


def test_an_attack_that_cuts_the_support_refutes_a_plan(task: DiplomacyPlan, burgundy: Problem) -> None:
    text = "gas-bur\nmar S gas-bur\nmar 1=1\nbur 2>1"
    assert task.grade(burgundy, text).note == "false claim in step 4: refuted by A mun-bur; A pie-mar"
    orders = orders_of_text("mun-bur", "pie-mar", "gas-bur", "mar S gas-bur")
    contest = Contest(BOARD, burgundy.metadata["position"], orders)
    assert contest.stands(BOARD.provinces.index("bur")) == -1
    assert task.grade(burgundy, "mar-bur\ngas S mar-bur\nbur 2>1").correct


def orders_of_text(*texts: str):
    orders = [parse(BOARD, text) for text in texts]
    return {BOARD.province_of[order.place]: order for order in orders if order is not None}


def test_a_unit_that_holds_keeps_its_province_on_a_tie(task: DiplomacyPlan) -> None:
    problem = problem_of(place(BOARD, {"France": ["A bur"], "Germany": ["A mun"]}), "France", "bur")
    assert task.grade(problem, "bur 1=1").correct
    assert task.grade(problem, "bur H\nbur 1=1").correct
    assert task.grade(problem, "bur 1>1").note == "false claim in step 1: 1 is not more than 1"
    assert not task.grade(problem, "bur 1>0").correct


def test_more_replies_than_the_limit_are_sampled_and_never_called_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """England defends Belgium against so many units that their replies exceed the limit."""
    position = place(
        BOARD, {"England": ["A bel", "F nth", "F eng"], "France": ["A pic", "A bur"], "Germany": ["A ruh", "F hol"]}
    )
    problem = problem_of(position, "England", "bel")
    text = "nth S bel\neng S bel\nbel 3>2"
    assert DiplomacyPlan(section()).grade(problem, text).note.startswith("false claim in step 3: refuted by ")
    monkeypatch.setattr("pvg.tasks.diplomacy_plan.MOST_REPLIES", 40)
    note = DiplomacyPlan(section()).grade(problem, text).note
    assert "proven" not in note
    assert "sampled" in note
    assert DiplomacyPlan(section()).grade(problem, text).note == note


def test_every_problem_has_a_proven_and_a_refuted_plan(task: DiplomacyPlan) -> None:
    for split in ("train", "test"):
        for problem in task.problems(split):
            assert task.grade(problem, problem.answer).note.startswith("proven: ")
            attempt = problem.answer.splitlines()
            target = attempt[-1].split()[0]
            assert problem.question.endswith(f"in {target}, whatever the others order.")
            assert problem.metadata["position"].stage == "M"


def test_problems_are_the_same_in_every_task_and_disjoint_between_splits(task: DiplomacyPlan) -> None:
    again = open_task(section(problems=2))
    train, test = [p.id for p in task.problems("train")], [p.id for p in task.problems("test")]
    assert [p.id for p in again.problems("train")] == train[:2]
    assert [p.id for p in again.problems("test")] == test
    assert len({*train, *test}) == len(train) + len(test)
