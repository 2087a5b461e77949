"""The screen before reasoning-gym's graders: what passes is harmless to `eval`, what is meant honestly passes."""

import pytest

from pvg.tasks.reasoning_gym import LONGEST_ANSWER, refusal

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
        ("chain_sum", "0.33333333333333333"),
        ("rush_hour", "F+1 K+10 M-1"),
        ("rubiks_cube", "U R2 F'"),
        ("kakurasu", "1 0\n0 1"),
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
        ("rush_hour", "A+400000"),
        ("rubiks_cube", "U2000"),
        ("coin_flip", "1e800000"),
        ("coin_flip", "1/1E-99_9999"),
        ("chain_sum", "9999999999999"),
        ("kakurasu", "1.9 0.9\n0.9 1.9"),
    ],
)
def test_dangerous_answers_do_not(dataset, answer):
    assert refusal(dataset, answer, REFERENCE) != ""
