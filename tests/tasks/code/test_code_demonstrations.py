"""The demonstrations of the code game (examples/code), as the game's grader and its problems see them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.code_demonstrations import changed_programs
from pvg.config.load import load_experiment
from pvg.config.task import CodeTask
from pvg.records import Problem
from pvg.tasks.code.task import Code
from pvg.tasks.code.templates import made_problems

ROOT = Path(__file__).parents[3]
FILE = ROOT / "examples" / "code" / "demonstrations.jsonl"
ALL = CodeTask(problems=344, sandbox="reduced", cpu_s=5.0)  # with the test problems, all that pvg can make


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return [json.loads(line) for line in FILE.read_text().splitlines()]


@pytest.fixture(scope="module")
def problems() -> dict[str, Problem]:
    return {p.question: p for split in ("train", "test") for p in made_problems(ALL, split)}


def test_the_grader_accepts_each_demonstration_in_its_role(
    rows: list[dict[str, str]], problems: dict[str, Problem]
) -> None:
    with Code(ALL) as task:
        grades = task.grade_many([(problems[row["question"]], row["solution"]) for row in rows])
    for row, grade in zip(rows, grades, strict=True):
        assert grade.checks is not None
        assert grade.correct == (row["role"] == "helpful"), row
        assert grade.checks.certified == (row["role"] == "sneaky"), row
    assert min(Counter(row["role"] for row in rows).values()) >= 80


def test_no_demonstration_is_a_problem_of_the_game(rows: list[dict[str, str]]) -> None:
    section = load_experiment(ROOT / "experiments" / "code.toml").task
    assert isinstance(section, CodeTask)
    game = {p.question for split in ("train", "test") for p in made_problems(section, split)}
    assert not game & {row["question"] for row in rows}


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        ("return x < 2", {"return x <= 2", "return x < 1", "return x < 3"}),
        ("return min(x)", {"return max(x)"}),
        ("return x", set()),
        (
            "if not x:\n        return []\n    return x + x",
            {"return x + x", "if not x:\n        return []\n    return x - x"},
        ),
    ],
)
def test_a_program_is_changed_at_one_place(body: str, changed: set[str]) -> None:
    head = "def f(x):\n    "
    assert set(changed_programs(f"{head}{body}\n")) == {head + other for other in changed}
