"""Outcomes: hand-made phases with known results, the format, near misses, and the first wrong step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "verifier"))
from tiny_verifiers import english_tokenizer

from pvg.config.sections import AllSections
from pvg.config.task import DiplomacyOutcomeTask
from pvg.game.roles import prompt_renderer
from pvg.games.diplomacy.orders import parse
from pvg.games.diplomacy.setup import place
from pvg.games.diplomacy.standard import standard_board
from pvg.records import Problem, Role
from pvg.tasks import LocatesFlaws, open_task
from pvg.tasks.diplomacy.outcome import DiplomacyOutcome, outcome_problem, outcome_wording
from pvg.tasks.task import SplitsSteps

BOARD = standard_board()


def made(units: dict[str, list[str]], orders: list[str], province: str) -> Problem:
    found = [parse(BOARD, text) for text in orders]
    by_province = {BOARD.province_of[order.place]: order for order in found if order is not None}
    assert len(by_province) == len(orders)
    return outcome_problem(BOARD, place(BOARD, units), by_province, BOARD.provinces.index(province))


@pytest.fixture(scope="module")
def task() -> DiplomacyOutcome:
    return DiplomacyOutcome(DiplomacyOutcomeTask(problems=30, test_problems=10))


@pytest.fixture
def burgundy() -> Problem:
    units = {"France": ["A gas", "A mar"], "Germany": ["A mun"]}
    return made(units, ["A gas-bur", "A mar S gas-bur", "A mun-bur"], "bur")


SOLUTION = "A gas-bur 2>1 ok\nA mar S gas-bur ok\nA mun-bur 1<2 bounced\nAnswer: Fra"


@pytest.mark.parametrize(
    ("units", "orders", "province", "lines"),
    [
        (
            {"France": ["A par"], "Germany": ["A mun"]},
            ["A par-bur", "A mun-bur"],
            "bur",
            "1=1 bounced;1=1 bounced;nobody",
        ),
        (
            {"France": ["A bur", "A mar"], "Germany": ["A mun", "A ruh"]},
            ["A mar S bur", "A mun-bur", "A ruh S mun-bur"],
            "bur",
            "ok;ok;2=2 bounced;ok;Fra",
        ),
        (
            {"France": ["A bur"], "Germany": ["A mun", "A ruh"]},
            ["A mun-bur", "A ruh S mun-bur"],
            "bur",
            "dislodged;2>1 ok;ok;Ger",
        ),
        (  # an attack on the supporting unit cuts its support
            {"France": ["A bur", "A bel"], "Germany": ["A mun", "A ruh"]},
            ["A bel-ruh", "A mun-bur", "A ruh S mun-bur"],
            "bur",
            "1=1 bounced;ok;1=1 bounced;cut;Fra",
        ),
        (  # head to head: the supports of both count
            {"France": ["A bur", "A mar"], "Germany": ["A mun"]},
            ["A bur-mun", "A mun-bur"],
            "mun",
            "1=1 bounced;ok;1=1 bounced;Ger",
        ),
        ({"England": ["A lon", "F nth"]}, ["A lon-nwy", "F nth C lon-nwy"], "nwy", "1>0 ok;ok;Eng"),
        ({"England": ["A lon", "F nth"]}, ["A lon-nwy"], "nwy", "0=0 no convoy;ok;nobody"),
        ({"France": ["A par", "A gas"]}, ["A par S gas-bur"], "bur", "ok;unmatched;nobody"),
        (  # a power's support does not help to drive out its own unit
            {"France": ["A bur", "A mar"], "Germany": ["A mun"]},
            ["A mar S mun-bur", "A mun-bur"],
            "bur",
            "ok;ok;1=1 bounced;Fra",
        ),
        (  # if that unit leaves, the support counts
            {"France": ["A bur", "A mar"], "Germany": ["A mun"]},
            ["A bur-par", "A mar S mun-bur", "A mun-bur"],
            "bur",
            "1>0 ok;ok;2>0 ok;Ger",
        ),
        (  # nor does it drive out its own unit itself
            {"France": ["A bur", "A mar", "A gas"]},
            ["A mar-bur", "A gas S mar-bur"],
            "bur",
            "ok;ok;0<1 bounced;Fra",
        ),
        (  # a convoyed army that bounces has its strength in its goal, also if it is driven out
            {"England": ["A lon", "F eng"], "France": ["A par"], "Germany": ["A wal", "F nth"]},
            ["A lon-bre", "F eng C lon-bre", "A par-bre", "A wal-lon", "F nth S wal-lon"],
            "bre",
            "ok;1=1 dislodged;1=1 bounced;ok;2>1 ok;nobody",
        ),
        (  # an army changes places by its own power's convoy, also without "via"
            {"England": ["A bel", "F nth"], "Germany": ["A hol"]},
            ["A bel-hol", "F nth C bel-hol", "A hol-bel"],
            "bel",
            "1>0 ok;ok;1>0 ok;Ger",
        ),
    ],
)
def test_known_phases_have_known_results(
    task: DiplomacyOutcome, units: dict[str, list[str]], orders: list[str], province: str, lines: str
) -> None:
    problem = made(units, orders, province)
    *results, answer = lines.split(";")
    text = problem.metadata["solution"].text.splitlines()
    assert text[-1] == f"Answer: {answer}"
    assert all(line.endswith(f" {result}") for line, result in zip(text[:-1], results, strict=True))
    grade = task.grade(problem, "\n".join(text))
    assert (grade.correct, grade.well_formed, grade.note) == (True, True, "")


@pytest.mark.parametrize("style", ["chat", "text", "plain", "tag"])
def test_a_solution_in_the_format_of_each_prompt_style_is_correct(
    task: DiplomacyOutcome, burgundy: Problem, style: str
) -> None:
    tokenizer = english_tokenizer()
    render = prompt_renderer(AllSections(prompts=style).prompts, tokenizer)
    prompts = [tokenizer.decode(render(burgundy, role)) for role in Role]
    assert all(burgundy.question in prompt for prompt in prompts)
    assert ("Answer: nobody" in prompts[0]) == (style in ("chat", "text"))
    helpful, sneaky = (task.grade(burgundy, outcome_wording().answers[role]) for role in Role)
    assert outcome_wording().question == burgundy.question
    assert outcome_wording().answers[Role.HELPFUL] == SOLUTION
    assert (helpful.correct, helpful.note) == (True, "")
    assert (sneaky.correct, sneaky.well_formed, sneaky.note) == (False, True, "wrong result in step 1")


def test_the_page_shows_this_example(burgundy: Problem) -> None:
    page = (Path(__file__).parents[3] / "docs" / "diplomacy.md").read_text(encoding="utf-8")
    assert f"```\n{burgundy.question}\n```" in page
    assert f"```\n{SOLUTION}\n```" in page


def test_tolerated_forms_are_read(task: DiplomacyOutcome, burgundy: Problem) -> None:
    text = " gas -> bur 2 > 1 OK.\n\nmar supports gas-bur ok; MUN-BUR 1<2 Bounced\nanswer: France."
    grade = task.grade(burgundy, text)
    assert (grade.correct, grade.note, grade.answer) == (True, "", "Fra")


@pytest.mark.parametrize(
    ("old", "new", "correct", "flaw"),
    [
        ("2>1", "2>0", True, 0),
        ("2>1 ok", "1=1 bounced", True, 0),
        ("gas-bur ok", "gas-bur cut", True, 1),
        ("1<2", "1=2", True, 2),
        ("A mar S gas-bur ok\n", "", True, 1),
        ("A mun-bur 1<2 bounced\n", "", True, 2),
        ("A mun-bur 1<2 bounced\n", "A mun-bur 1<2 bounced\nA mun-bur 1<2 bounced\n", True, 3),
        ("A mar S", "A mun S", True, 1),
        ("Answer: Fra", "Answer: Ger", False, 3),
        ("Answer: Fra", "Answer: nobody", False, 3),
    ],
)
def test_near_misses_are_wrong_at_the_changed_step(
    task: DiplomacyOutcome, burgundy: Problem, old: str, new: str, correct: bool, flaw: int
) -> None:
    text = SOLUTION.replace(old, new, 1)
    assert isinstance(task, LocatesFlaws)
    assert isinstance(task, SplitsSteps)
    grade = task.grade(burgundy, text)
    assert (grade.correct, grade.well_formed) == (correct, True)
    assert task.flaw(burgundy, text) == flaw
    lines = text.splitlines()
    assert [text[start:end] for start, end in task.steps(text)] == lines[:-1]
    assert text[: task.cuts(text)[flaw]].endswith(lines[flaw])
    assert grade.note == ("wrong final answer" if flaw == len(lines) - 1 else f"wrong result in step {flaw + 1}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Answer: Fra",
        SOLUTION.replace("Answer: Fra", "Fra"),
        SOLUTION.replace("Answer: Fra", "Answer: Spain"),
        SOLUTION.replace(" 2>1 ok", " ok"),
        SOLUTION.replace("gas-bur ok", "gas-bur 1>0 ok"),
        SOLUTION.replace("bounced", "lost"),
        f"{SOLUTION}\nDone.",
        f"Let me see.\n{SOLUTION}",
        "A gas-bur 2>1 ok\n" * 100 + "Answer: Fra",
        "A " * 100_000,
    ],
)
def test_other_texts_are_malformed(task: DiplomacyOutcome, burgundy: Problem, text: str) -> None:
    grade = task.grade(burgundy, text)
    assert (grade.correct, grade.well_formed) == (False, False)
    assert task.cuts(text) == []
    assert task.flaw(burgundy, text) is None


@pytest.mark.parametrize("board", ["standard", "mini"])
def test_the_exact_solution_of_every_problem_is_flawless(board: str) -> None:
    task = open_task(DiplomacyOutcomeTask(board=board, problems=40, test_problems=10, most_units=6))
    problems = [*task.problems("test"), *task.problems("train")]
    assert len({problem.id for problem in problems}) == 50
    for problem in problems:
        solution = problem.metadata["solution"]
        grade = task.grade(problem, solution.text)
        assert (grade.correct, grade.note) == (True, "")
        assert len(solution.orders) <= 6
        for order, line in zip(solution.orders, solution.lines, strict=True):  # the numbers decide a move
            if order.act == "move":
                assert (">" in line) == line.endswith(" ok"), problem.question
    again = open_task(DiplomacyOutcomeTask(board=board, problems=3, test_problems=10, most_units=6))
    assert [p.id for p in again.problems("train")] == [p.id for p in problems[10:13]]


@pytest.mark.timeout(60)  # a pattern of quadratic time would take minutes
@pytest.mark.parametrize("text", ["A gas-bur" + " " * 50_000 + "x", " 1<1" * 50_000])
def test_long_lines_take_linear_time(task: DiplomacyOutcome, burgundy: Problem, text: str) -> None:
    assert task.steps(text) == task.cuts(text) == []
    assert task.flaw(burgundy, text) is None
    assert not task.grade(burgundy, text).well_formed
