"""Invariant of pvg.tasks.task: the grader of each task reads the form that its prompts ask for.

For each kind of task, and each kind of prompts that it allows: a correct solution in the documented form is graded
correct, near misses are graded wrong, and prompts in words say the form.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "game"))
from tiny_chat import SUMS, chatting

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.errors import ConfigurationError
from pvg.game.roles import prompt_renderer
from pvg.game.task_check import checks_of
from pvg.records import Problem, Role
from pvg.tasks import open_task
from pvg.tasks.reasoning_gym import ORDERED_BY_HASH, UNSAFE_GRADERS, WORDING
from pvg.tasks.task import KnownSolution, Task, correct_solution, wording_of, wrong_answer, wrong_solutions

pytestmark = pytest.mark.slow

WORDS, ALL = ("chat", "text"), ("tag", "plain", "chat", "text")
GSM8K = [{"question": f"Ann has {n} nuts and finds 3. How many?", "answer": f"Sum.\n#### {n + 3}"} for n in range(60)]
ROWS = {
    "exact": [{"question": f"Name word {n}.", "answer": f"word {n}"} for n in range(60)],
    "number": [{"question": f"What is {n} + 3?", "answer": n + 3} for n in range(60)],
    "choice": [{"question": f"Which is {n}?", "answer": "ABCD"[n % 4]} for n in range(60)],
    "regex": [{"question": f"Which color is {n}?", "answer": ("red", "blue", "green")[n % 3]} for n in range(60)],
    "expression": [{"question": f"Make {n} + 3.", "answer": f"{n} + 3"} for n in range(60)],
}
REGEX = {"pattern": r"^Color: (\w+)$", "form": "End with a line 'Color: ' and the color."}
SIZES = {"problems": 24, "test_problems": 6}
TASKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "modchain": ({"kind": "modchain", **SIZES}, ALL),
    "modchain modulo 3": ({"kind": "modchain", "modulus": 3, **SIZES}, ALL),
    "gsm8k": ({"kind": "gsm8k", "path": "GSM8K"}, ALL),
    **{f"data {grader}": ({"kind": "data", "path": grader, "grader": grader}, ALL) for grader in ROWS},
    "code": ({"kind": "code", "sandbox": "reduced", **SIZES}, ALL),
    "diplomacy_mini": ({"kind": "diplomacy_mini", **SIZES}, ("tag", "plain")),
    "diplomacy_plan": ({"kind": "diplomacy_plan", **SIZES, "problems": 8}, ALL),
    "custom": ({"kind": "custom", "source": "own.py:Sums"}, ALL),
}
CASES = [(name, style) for name, (_, styles) in TASKS.items() for style in styles]


def experiment_of(section: dict[str, Any], style: str) -> Experiment:
    game = {"reward": "correctness", "sneaky_share": 0.0} if style == "plain" else {}
    return build_experiment({"task": section, "prompts": style, "game": game})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    (made / "GSM8K").mkdir()
    for split, rows in (("train", GSM8K[:40]), ("test", GSM8K[40:])):
        (made / "GSM8K" / f"{split}.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    for grader, rows in ROWS.items():
        (made / f"{grader}.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    (made / "own.py").write_text(SUMS)
    return made


def section_in(folder: Path, section: dict[str, Any]) -> dict[str, Any]:
    changed = dict(section)
    if section["kind"] == "gsm8k":
        changed["path"] = str(folder / "GSM8K")
    elif section["kind"] == "data":
        changed["path"] = str(folder / f"{section['path']}.jsonl")
        changed |= REGEX if section["grader"] == "regex" else {}
    elif section["kind"] == "custom":
        changed["source"] = f"{folder / 'own.py'}:Sums"
    return changed


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[Any]:
    """Opens each task once."""
    with ExitStack() as stack:
        kept: dict[str, Task] = {}

        def open_(name: str) -> Task:
            if name not in kept:
                section = experiment_of(section_in(folder, TASKS[name][0]), "tag").task
                kept[name] = open_task(section)
                if isinstance(kept[name], AbstractContextManager):
                    stack.enter_context(kept[name])  # type: ignore[arg-type]
            return kept[name]

        yield open_


def known_solutions(task: Task, problem: Problem, others: list[Problem]) -> list[KnownSolution]:
    right = correct_solution(task, problem)
    return [*([] if right is None else [right]), *wrong_solutions(task, problem, others)]


def first(task: Task) -> list[Problem]:
    return list(task.problems("train"))[:5]


@pytest.mark.parametrize(("name", "style"), CASES)
def test_the_documented_form_is_correct_and_near_misses_are_wrong(
    name: str, style: str, opened: Any, folder: Path
) -> None:
    task, experiment = opened(name), experiment_of(section_in(folder, TASKS[name][0]), style)
    render = prompt_renderer(experiment.prompts, tokenizer := chatting())
    problems = first(task)
    for problem in problems:
        prompts = [tokenizer.decode(render(problem, role)) for role in Role]
        assert all(problem.question in prompt for prompt in prompts)
        assert (prompts[0] != prompts[1]) == (style != "plain")
        if style in WORDS:
            _assert_the_prompt_says_the_form(problem, prompts[0])
        for solution in known_solutions(task, problem, problems):
            if solution.certain:
                assert task.grade(problem, solution.text).correct == solution.correct, solution
    if name != "data regex":  # whose form only the user knows
        assert correct_solution(task, problems[0]) is not None


def _assert_the_prompt_says_the_form(problem: Problem, prompt: str) -> None:
    wording = wording_of(problem)
    assert wording.instructions[Role.HELPFUL] in prompt
    if wording.form:
        marker = wording.form.partition("{answer}")[0].strip()
        assert marker in wording.instructions[Role.HELPFUL]
        assert marker in wording.answers[Role.HELPFUL].splitlines()[-1]
        assert marker in wording.answers[Role.SNEAKY].splitlines()[-1]


@pytest.mark.parametrize("name", TASKS)
def test_the_checks_of_a_task_pass(name: str, opened: Any, folder: Path) -> None:
    style = "chat" if "chat" in TASKS[name][1] else "tag"
    experiment, task = experiment_of(section_in(folder, TASKS[name][0]), style), opened(name)
    failed = [check for check in checks_of(experiment, task, None) if check.passed is False]
    assert failed == []


def test_another_answer_of_the_same_form_is_wrong(opened: Any) -> None:
    """For the tasks whose problems have one correct answer."""
    for name in ("gsm8k", "data exact", "data number", "data choice", "data expression", "custom"):
        task = opened(name)
        problem, *others = first(task)
        uncertain = [each for each in known_solutions(task, problem, others) if not each.certain]
        assert uncertain, name
        assert not any(task.grade(problem, each.text).correct for each in uncertain), name
        grade = task.grade(problem, wording_of(problem).written(wrong_answer(task, problem, others)))
        assert (grade.correct, grade.well_formed) == (False, True), name


def test_a_plausible_wrong_answer_is_the_nearest_number_or_a_drawn_answer() -> None:
    def of(answer: str, *others: str, name: str = "p") -> str:
        task: Any = object()
        return wrong_answer(task, Problem(name, "?", answer), [Problem(each, "?", each) for each in others])

    assert of("18", "4", "18.0", "1,000", "21", "red") == "21"
    drawn = {of("red", "red", "blue", "tan", name=str(number)) for number in range(20)}
    assert drawn == {"blue", "tan"}
    for answer, others in (("red", ["red"]), ("", ["red"])):
        with pytest.raises(ConfigurationError, match="assigns a right and a wrong answer"):
            of(answer, *others)


# --- reasoning-gym ----------------------------------------------------------------------------------------------------

# Answers of one line and of many, numbers, words, lists and grids; graders of the package's own and the common one.
DATASETS = (
    *("chain_sum", "basic_arithmetic", "leg_counting", "gcd", "products", "simple_equations", "number_sorting"),
    *("letter_counting", "spell_backward", "word_sorting", "caesar_cipher", "base_conversion", "calendar_arithmetic"),
    *("syllogism", "family_relationships", "maze", "rotate_matrix", "countdown", "fraction_simplification"),
)


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_reference_answer_of_reasoning_gym_is_correct_as_its_prompt_asks(dataset: str) -> None:
    pytest.importorskip("reasoning_gym", reason="`make install`")
    section = {"kind": "reasoning_gym", "dataset": dataset, "problems": 10, "test_problems": 4}
    assert dataset not in ORDERED_BY_HASH
    assert dataset not in UNSAFE_GRADERS
    experiment = experiment_of(section, "chat")
    task, render = open_task(experiment.task), prompt_renderer(experiment.prompts, tokenizer := chatting())
    for problem in task.problems("train"):
        assert "<answer>" in tokenizer.decode(render(problem, Role.HELPFUL))
        solution = correct_solution(task, problem)
        assert solution is not None
        grade = task.grade(problem, f"Some steps.\n{solution.text}")
        assert (grade.correct, grade.well_formed) == (True, True), (problem, grade)
        for miss in ("", WORDING.written(""), WORDING.written("?"), "Some steps without an answer."):
            assert not task.grade(problem, miss).correct
