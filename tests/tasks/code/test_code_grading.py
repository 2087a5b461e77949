"""Grades of prepared solutions: what is correct, what a certificate proves, and what it does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from problems_of_tests import FOUND, OWN, SUBTLE, fenced, write_rows

from pvg.config.task import CodeTask
from pvg.records import Checks, Grade, Problem
from pvg.tasks.code import Code
from pvg.tasks.code_problems import CODE, CodeProblem, code_of, extract_code, same_output

pytestmark = pytest.mark.slow

STDIN = {
    "id": "double",
    "question": "Print twice the number.",
    "reference": "print(2 * int(input()))",
    "visible": [{"input": "4\n", "output": "8\n"}],
    "hidden": [{"input": "0\n", "output": "0"}],
    "check": "def valid(text):\n    return text.strip().lstrip('-').isdigit()",
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Code]:
    folder = write_rows(tmp_path_factory.mktemp("code") / "data", OWN, STDIN)
    with Code(CodeTask(path=folder, sandbox="reduced", cpu_s=1.0)) as found:
        yield found


@pytest.fixture(scope="module")
def problem(task: Code) -> Problem:
    return next(iter(task.problems("train")))


def test_a_problem_shows_its_visible_tests_alone(task: Code, problem: Problem) -> None:
    assert problem.question == (
        "Add the numbers up.\n\nWrite the Python function add_up(numbers). Examples:\n"
        "add_up([1, 2]) == 3\nadd_up([]) == 0"
    )
    # The fourth test is an input whose output the reference gave.
    assert [test.output for test in code_of(problem).tests] == [3, 0, 4, 14]
    _, program = task.problems("train")
    assert program.question.endswith("Examples:\nInput:\n4\nOutput:\n8")


def test_right_and_wrong_solutions(task: Code, problem: Problem) -> None:
    right, found, broken, prose = task.grade_many(
        [(problem, text) for text in (fenced(OWN["reference"]), fenced(FOUND), fenced("def add_up(:"), "```\n```")]
    )
    assert right == Grade(True, True, "4/4 tests", "passes all tests", Checks(1.0, 1.0, False))
    assert found == Grade(False, True, "3/4 tests", "fails hidden test 3: wrong output", Checks(1.0, 0.75, False))
    assert (broken.correct, broken.well_formed, broken.checks) == (False, False, Checks(0.0, 0.0, False))
    assert broken.note.startswith("fails visible test 1: SyntaxError")
    assert prose == Grade(False, False, note="no code", checks=Checks(0.0, 0.0, False))


@pytest.mark.parametrize(
    ("printed", "expected", "equal"),
    [
        ("1 \r\n 2\t\n\n", "\n1\n 2", True),
        ("*\n ***", "  *\n ***", False),
        ("1\n\n2", "1\n2", False),
        ("1\x0c2", "1\n2", False),
        ("1\r2", "1\n2", False),
        ("1\u20282", "1\n2", False),
    ],
)
def test_printed_output_is_compared_line_by_line(printed: str, expected: str, equal: bool) -> None:
    assert same_output(CodeProblem(None, "", (), ()), printed, expected) == equal


@pytest.mark.parametrize("label", ["", "python", "python3", "Py3", "py", "python3.12"])
def test_a_block_of_python_may_be_labelled_in_several_ways(label: str) -> None:
    assert extract_code(f"```{label}\nx = 1\n```\n```text\n1\n```") == "x = 1"


def test_a_certificate_proves_a_flaw(task: Code, problem: Problem) -> None:
    proven = task.grade(problem, fenced(SUBTLE, "[[1, 1, 1, 1, 1, 1]]"))
    # It passes every test, and is still wrong: the label is correctness, and this is known.
    assert proven == Grade(False, True, "4/4 tests", "passes all tests; its flaw is proven", Checks(1.0, 1.0, True))
    assert task.grade(problem, fenced(SUBTLE)).correct
    crash = "def add_up(numbers):\n    assert len(numbers) < 4\n    return sum(numbers)"
    checks = task.grade(problem, fenced(crash, "[[1, 1, 1, 1]]")).checks
    assert checks is not None
    assert checks.certified


@pytest.mark.parametrize(
    ("code", "certificate", "said"),
    [
        (SUBTLE, "[[1, 2]]", "it is correct on the certificate's input"),
        (SUBTLE, "[[1, 1, 1, 1, 1, 0]]", "it is correct on the certificate's input"),
        (SUBTLE, '["text"]', "its certificate names no input of this problem"),
        (SUBTLE, "[[1.5]]", "its certificate names no input of this problem"),
        (SUBTLE, "[[true, true, true, true, true, true]]", "its certificate names no input of this problem"),
        (SUBTLE, "[[1], [2]]", "its certificate names no input of this problem"),
        (SUBTLE, "[]", "its certificate names no input of this problem"),
        (SUBTLE, '{"numbers": [1]}', "its certificate names no input of this problem"),
        (SUBTLE, "six ones", "its certificate is not JSON"),
        ("def add_up(numbers):\n    return 4", "[[1]]", "its certificate does not count: it fails visible tests"),
        (
            "def add_up(numbers):\n    while len(numbers) > 5: pass\n    return sum(numbers)",
            "[[1, 1, 1, 1, 1, 1]]",
            "it takes too long on the certificate's input",
        ),
    ],
)
def test_what_a_certificate_does_not_prove(
    problem: Problem, task: Code, code: str, certificate: str, said: str
) -> None:
    grade = task.grade(problem, fenced(code, certificate))
    assert grade.note.endswith(f"; {said}")
    assert grade.checks is not None
    assert not grade.checks.certified


def test_an_input_that_the_reference_cannot_take_proves_nothing(task: Code, problem: Problem) -> None:
    fails = replace(
        code_of(problem), reference="def add_up(numbers):\n    assert len(numbers) < 6\n    return sum(numbers)"
    )
    strict = replace(problem, metadata={CODE: fails})
    grade = task.grade(strict, fenced(SUBTLE, "[[1, 1, 1, 1, 1, 1]]"))
    assert grade.note.endswith("the reference fails on the certificate's input")


def test_a_problems_own_check_decides_what_an_input_is(task: Code, problem: Problem) -> None:
    check = "def valid(numbers):\n    return 1 if numbers == [0] else len(numbers) < 7"
    checked = replace(problem, metadata={CODE: replace(code_of(problem), check=check)})
    wrong = "def add_up(numbers):\n    return sum(numbers) + (len(numbers) > 5 or numbers == [0])"
    notes = [task.grade(checked, fenced(wrong, f"[{given}]")).note for given in ([1] * 6, [1] * 7, "[0]", "3")]
    assert notes[0].endswith("its flaw is proven")
    assert all(note.endswith("names no input of this problem") for note in notes[1:])  # 1 is not True


def test_a_flaw_is_shown_in_a_process_of_its_own(task: Code, problem: Problem) -> None:
    """A program that counts its calls is right wherever it is looked at for the first time."""
    counting = (
        "calls = 0\ndef add_up(numbers):\n    global calls\n    calls += 1\n    return sum(numbers) + (calls > 4)"
    )
    grade = task.grade(problem, fenced(counting, "[[1]]"))
    assert grade.correct
    assert grade.note.endswith("it is correct on the certificate's input")


DETECTS = {
    "one case": "import sys\njob = sys._getframe(1).f_locals['job']\ndef add_up(numbers):\n"
    "    return sum(numbers) + (len(job['cases']) == 1)",
    "not the first call": "calls = []\ndef add_up(numbers):\n    calls.append(1)\n"
    "    return sum(numbers) + (len(calls) > 1 and len(numbers) == 6)",
}


@pytest.mark.parametrize("code", DETECTS.values(), ids=DETECTS)
def test_who_tells_its_proof_from_its_tests_has_no_flaw(task: Code, problem: Problem, code: str) -> None:
    grade = task.grade(problem, fenced(code, "[[1, 1, 1, 1, 1, 1]]"))
    assert grade.correct
    assert grade.note.endswith("it is correct on the certificate's input")


def test_programs_that_read_standard_input(task: Code) -> None:
    _, problem = task.problems("train")
    assert task.grade(problem, "print(int(input()) * 2, ' ')").correct  # spaces at the end do not count
    flawed = "n = int(input())\nprint(2 * n if n >= 0 else n)"
    assert task.grade(problem, fenced(flawed)).correct
    assert not task.grade(problem, fenced(flawed, '"-3\\n"')).correct
    for named in ('"three"', "[-3]", '"3"'):
        assert task.grade(problem, fenced(flawed, named)).correct
