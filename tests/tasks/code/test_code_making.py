"""The problems that pvg makes: distinct, the same in every process, and with references that keep their promises."""

from __future__ import annotations

import ast

import pytest

from pvg.config.task import CodeTask
from pvg.errors import ConfigurationError
from pvg.records import Problem
from pvg.tasks.code_problems import code_of
from pvg.tasks.code_templates import HIDDEN_TESTS, made_problems, templates

pytestmark = pytest.mark.slow

SECTION = CodeTask()


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return [*made_problems(SECTION, "train"), *made_problems(SECTION, "test")]


def test_tests_fit_the_problems_own_check_and_differ(problems: list[Problem]) -> None:
    for problem in problems:
        code = code_of(problem)
        valid: dict[str, object] = {}
        exec(code.check, valid)
        cases = [ast.literal_eval(test.case) for test in code.tests]
        assert all(valid["valid"](*case) is True for case in cases), problem.id  # type: ignore[operator]
        assert len({test.case for test in code.tests}) == len(code.tests)
        assert len(code.visible) == SECTION.visible_tests
        assert len(code.hidden) == HIDDEN_TESTS
        # A constant is no solution.
        assert len({repr(test.output) for test in code.tests}) > 1, problem.id
        assert "$" not in problem.question + problem.answer


def test_test_problems_stay_when_others_are_asked_for() -> None:
    fewer = CodeTask(problems=10)
    assert made_problems(fewer, "test") == made_problems(SECTION, "test")
    assert made_problems(fewer, "train") == made_problems(SECTION, "train")[:10]
    with pytest.raises(ConfigurationError, match="generated problems"):
        made_problems(CodeTask(problems=5000), "train")


def by_hand(name: str, given: list[object], **values: int) -> object:
    template = next(template for template in templates() if template.name == name)
    space: dict[str, object] = {}
    exec(template.filled(template.reference, values), space)
    return space[name](*given)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "given", "values", "expected"),
    [
        ("sum_of_multiples", [[3, 4, 6, -9]], {"k": 3}, 0),
        ("every_kth", [[1, 2, 3, 4, 5]], {"k": 2}, [2, 4]),
        ("rotate_left", [[1, 2, 3]], {"k": 4}, [2, 3, 1]),
        ("longest_run", [[5, 6, 1, 7, 8, 9]], {"t": 5}, 3),
        ("pairs_with_sum", [[1, 2, 3, 2]], {"s": 4}, 2),
        ("largest_window", [[1, -5, 4, 3]], {"k": 2}, 7),
        ("alternating_sum", [[1, 2, 3, 4]], {"k": 2}, -2),
        ("drop_copies", [[1, 1, 1, 2]], {"k": 2}, [1, 1, 2]),
        ("capped_sum", [[4, 4, -3]], {"c": 5}, 2),
        ("first_reaching", [[1, 2, 3]], {"s": 3}, 1),
        ("chunk_sums", [[1, 2, 3]], {"k": 2}, [3, 3]),
        ("peaks", [[0, 3, 0, 1, 0]], {"d": 2}, 1),
        ("near_median", [[1, 5, 6, 20]], {"d": 1}, 2),
        ("weighted_digits", [123], {"w": 10}, 24),
        ("digits_in_base", [10], {"b": 3}, [1, 0, 1]),
        ("steps_to_one", [6], {"a": 1, "m": 20}, 4),
        ("count_divisors", [12], {"d": 3}, 4),
        ("next_multiple", [6], {"k": 3}, 9),
        ("steps_down", [12], {"t": 1}, 4),
        ("shift_letters", ["az"], {"k": 1}, "ba"),
        ("squeeze", ["aaabb"], {"k": 2}, "aabb"),
        ("count_runs", ["aabab"], {"k": 2}, 1),
        ("mirrored_ends", ["abca"], {"k": 2}, 1),
        ("balanced_prefix", ["(()"], {"d": 1}, 1),
        ("merge_close", [[1, 9, 2]], {"g": 3}, 2),
        ("best_gain", [[3, 1, 5, 9]], {"k": 1}, 4),
        ("swap_neighbours", [[1, 2, 3]], {"k": 2}, [2, 1, 3]),
        ("majority", [[1, 1, 2]], {"p": 50}, [1]),
    ],
)
def test_references_by_hand(name: str, given: list[object], values: dict[str, int], expected: object) -> None:
    assert by_hand(name, given, **values) == expected
