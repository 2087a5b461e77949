"""What is an input of a problem that defines no check."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvg.tasks.code_problems import CodeProblem, CodeTest, case_of, fits, laid_out_alike, within


def problem(entry: str | None, *cases: str, check: str = "") -> CodeProblem:
    tests = tuple(CodeTest(case, None) for case in cases)
    return CodeProblem(entry, "", tests[:1], tests[1:], check=check)


@pytest.mark.parametrize(
    ("samples", "inside", "outside"),
    [
        ([1, 5], [1, 3, 5], [-1, 0, 6, 2.0, True, "3", None]),
        ([1.5, 2], [2, 1.75], [3, 1.0, float("inf"), float("nan")]),
        (["ab", "abca"], ["cab"], ["a", "abcab", "abd", "\ud800b"]),
        ([[3, 1], [4, 1, 5, 1]], [[5, 1, 1], [1, 3]], [[1], [], [1] * 5, [0, 1], [1.5, 1], "ab"]),
        ([[1, 2], [2, 5, 5]], [[1, 5]], [[5, 1]]),  # all are sorted
        ([[2, 1, 3], [3, 2]], [[1, 3, 2]], [[1, 1, 2]]),  # nothing comes twice
        ([[[3], [2, 1]], [[1, 2], [3]]], [[[3, 2], [1]]], [[[1], [9]], [1, 2]]),
        ([{"a": 1}, {"b": 4}], [{"b": 2}], [{"c": 1}, {"a": 5}, {}, {"a": "1"}]),
        ([None, True], [None, True], [False, 1]),
    ],
)
def test_between_the_tests(samples: list[Any], inside: list[Any], outside: list[Any]) -> None:
    assert [value for value in inside if not (fits(value, samples) and within(value, samples))] == []
    assert [value for value in outside if fits(value, samples) and within(value, samples)] == []


@given(st.lists(st.lists(st.integers() | st.text(max_size=3) | st.booleans(), max_size=4), min_size=1, max_size=4))
def test_a_test_lies_within_the_tests(samples: list[Any]) -> None:
    for sample in samples:
        writable = all(not isinstance(x, str) or x.isascii() for x in sample)
        assert within(sample, samples)
        assert fits(sample, samples) or not writable


def test_out_of_its_domain_a_right_program_may_fail() -> None:
    positive = problem("f", "[1]", "[3]", "[7]")
    assert case_of(positive, [5]) == "[5]"
    assert [case_of(positive, value) for value in ([-1], [8], [], [5, 5], "5")] == [None] * 5
    assert case_of(replace(positive, check="def valid(n): return True"), [-1]) == "[-1]"


# n, then n numbers of 0 to 9.
COUNTED = ["2\n5 7\n", "3\n6 9 4\n"]
TABLE = ["2 3\n#.#\n..#\n", "1 3\n...\n"]


@pytest.mark.parametrize(
    ("samples", "inside", "outside"),
    [
        (["4\n", "10\n", "-4\n"], ["3\n", "-2\n"], ["3\n4\n", "3 4\n", "11\n", "x\n", "1_0\n", "03\n", "3", ""]),
        (COUNTED, ["2\n5 8\n", "3\n5 8 4\n"], ["3\n5 8\n", "2\n5 8 4\n", "2\n5 10\n", "2\n5  8\n", "1\n5\n"]),
        (TABLE, ["2 3\n###\n...\n", "1 3\n.#.\n"], ["1 3\n###\n...\n", "2 3\n##\n...\n", "1 3\nx..\n"]),
        (["1 5\n", "4 20\n"], ["3 19\n", "2 6\n"], ["1 21\n", "4 3\n"]),  # the second is never smaller
        (["0.5\n", "2.25\n"], ["1.125\n"], ["1\n", "1e0\n", "2.3\n", "nan\n"]),
    ],
)
def test_texts_for_standard_input(samples: list[str], inside: list[str], outside: list[str]) -> None:
    assert [text for text in [*inside, *samples] if not laid_out_alike(text, samples)] == []
    assert [text for text in outside if laid_out_alike(text, samples)] == []
    code = problem(None, *samples)
    assert [case_of(code, text) for text in inside] == inside
    assert [case_of(code, text) for text in outside] == [None] * len(outside)
