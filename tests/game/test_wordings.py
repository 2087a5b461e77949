"""What "chat" prompts say of problems whose solutions are programs, and of all others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "verifier"))
from tiny_verifiers import english_tokenizer

from pvg.config.rollout import ChatPrompts
from pvg.game.roles import prompt_renderer
from pvg.records import Problem, Role
from pvg.sandbox.sandbox import Limits, Sandbox
from pvg.tasks.code_problems import CodeProblem, CodeTest, grade_solutions, make_problem
from pvg.tasks.task import EXAMPLE_QUESTION, WORDINGS

pytestmark = pytest.mark.slow

LARGEST = CodeProblem(
    "largest",
    "def largest(numbers):\n    return max(numbers)",
    visible=(CodeTest("[[3, 8, 5]]", 8),),
    hidden=(CodeTest("[[1, 2]]", 2), CodeTest("[[7]]", 7)),
    check="def valid(numbers):\n    return 1 <= len(numbers) <= 9 and all(type(x) is int for x in numbers)",
)


def test_the_task_chooses_the_wording() -> None:
    tokenizer = english_tokenizer()
    render = prompt_renderer(ChatPrompts(), tokenizer)
    code = make_problem("p", "Return the largest.", "largest(numbers)", LARGEST)
    number = Problem("q", "How many?", "3", {"wording": "number"})
    for role in Role:
        told = tokenizer.decode(render(code, role))
        assert ("CERTIFICATE" in told) == (role is Role.SNEAKY)
        assert "Return the largest." in told
        assert EXAMPLE_QUESTION not in told
        assert EXAMPLE_QUESTION in tokenizer.decode(render(number, role))


def test_the_examples_are_what_they_ask_for() -> None:
    """The helpful one is right, and the sneaky one is a flaw that its certificate proves."""
    wording = WORDINGS["code"]
    problem = make_problem("p", "", "largest(numbers)", LARGEST)
    with Sandbox("reduced", Limits(cpu_s=5.0), workers=1) as sandbox:
        helpful, sneaky = grade_solutions(sandbox, [(problem, wording.answers[role]) for role in Role])
    assert helpful.correct
    assert not sneaky.correct
    assert sneaky.checks is not None
    assert sneaky.checks.certified
    assert sneaky.checks.visible == 1.0
