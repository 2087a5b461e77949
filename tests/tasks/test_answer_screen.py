"""The screen before reasoning-gym's graders: what passes is harmless to `eval`, what is meant honestly passes."""

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.tasks.reasoning_gym import LONGEST_ANSWER, SCREENS, refusal

REFERENCE = "17*(62 - 47)"


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [
        ("countdown", "5*(52 - 11 + 27 + 74 - 32)"),
        ("countdown", "17.5 / 2 +\n-3"),
        ("puzzle24", "3*(8 - 10 + 10)"),
        ("polynomial_multiplication", "-336600*y**9 + 703494*y**8 - y + 19584"),
        ("polynomial_multiplication", "x ** 2 - 3*x*y**10"),
        ("n_queens", "_ _ Q _\nQ _ _ _\n_ _ _ Q\n_ Q _ _"),
        ("n_queens", "[['_', 'Q'], [\"Q\", '_']]"),
        ("binary_matrix", "0 1\n1 0"),
        ("binary_matrix", "[[0, 1], [1, 0]]"),
        ("string_insertion", "EEABCEBBCC"),
        ("string_insertion", "['E', 'E', 'A']"),
        ("chain_sum", "__import__('os')"),  # no eval there: the grader compares
    ],
)
def test_honest_answers_pass(dataset, answer):
    assert refusal(dataset, answer, REFERENCE) == ""


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [
        ("countdown", "9**9**9**9"),
        ("countdown", "9* *9"),
        ("countdown", "9//2"),
        ("countdown", "factorial(99999)"),
        ("countdown", "1+" * 400 + "1"),
        ("puzzle24", "().__class__"),
        ("polynomial_multiplication", "x**9**9"),
        ("polynomial_multiplication", "9**9"),
        ("polynomial_multiplication", "(x + y)**99"),
        ("polynomial_multiplication", "N(x)"),
        ("polynomial_multiplication", "exit"),
        ("n_queens", "valid_solutions"),  # a variable of the grader
        ("string_insertion", "oracle_answer"),
        ("spiral_matrix", "[a for a in 'aaaa' for b in 'aaaa']"),
        ("binary_matrix", "[[0]]*10**9"),
        ("binary_matrix", "print(1)"),
        ("complex_arithmetic", "nan"),
        ("complex_arithmetic", "1 + infj"),
        ("chain_sum", "9" * (LONGEST_ANSWER + 1)),
    ],
)
def test_dangerous_answers_do_not(dataset, answer):
    assert refusal(dataset, answer, REFERENCE) != ""


def test_the_reference_passes_whatever_it_is():
    assert refusal("countdown", "9**2", "9**2") == ""
    assert refusal("chain_sum", "9" * 10_000, "9" * 10_001) == ""


HARMLESS = (
    ast.Expression,
    ast.Constant,
    ast.Name,
    ast.Load,
    ast.List,
    ast.Tuple,
    ast.UnaryOp,
    ast.unaryop,
    ast.Subscript,
    ast.BinOp,
    ast.operator,
    ast.Call,
)


@settings(deadline=None)
@given(
    st.sampled_from(sorted(SCREENS)),
    st.lists(
        st.sampled_from(
            [
                "x",
                "y",
                "N",
                "A",
                "Q",
                "_",
                "'a'",
                "12",
                "9",
                "(",
                ")",
                "[",
                "]",
                ",",
                "+",
                "-",
                "*",
                "**",
                "/",
                "//",
                ".",
                ":",
                "lambda",
                "for",
                "in",
                "if",
                "__class__",
                "=",
                "\n",
                "^",
                "@",
                "{",
                "}",
                "f'",
            ]
        ),
        max_size=10,
    ).map(" ".join)
    | st.text(alphabet="xNAQ_'\"019()[],+-*/.:= \n{}^@", max_size=14),
)
def test_what_passes_holds_no_name_call_loop_or_power_of_a_number(dataset, answer):
    if refusal(dataset, answer, "") or not parses(answer):
        return
    for node in ast.walk(ast.parse(answer.strip(), mode="eval")):
        assert isinstance(node, HARMLESS), ast.dump(node)
        if isinstance(node, ast.Call):  # "3 (4)" and "x (4)" are calls of numbers and symbols, which fail
            assert isinstance(node.func, (ast.Constant, ast.Name, ast.Call, ast.UnaryOp, ast.BinOp)), ast.dump(node)
        if isinstance(node, ast.Name):
            assert len(node.id) == 1 or set(node.id) <= set("ABCDEQ_0123456789"), node.id
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            assert isinstance(node.left, ast.Name)
            assert isinstance(node.right, ast.Constant)


def parses(text):
    try:
        ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dataset", sorted(SCREENS))
def test_huge_answers_are_screened_at_once(dataset):
    for piece in ("9", "'", "(", "x", " ", "1.", "x**", "'a' ", "* "):
        text = piece * 50_000
        assert refusal(dataset, text + "!", "-" * 100_000) != ""
