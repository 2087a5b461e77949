"""Answers as plain data, and when two are the same."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvg.sandbox.inside.program import NotPlainError, plain, same

pytestmark = pytest.mark.slow

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text(max_size=2), inner, max_size=3)
        | st.frozensets(st.integers(), max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_a_value_is_the_same_as_itself_on_the_other_side_of_a_pipe(value) -> None:
    sent = json.loads(json.dumps(plain(value)))
    assert same(sent, plain(value))
    assert same(plain(value), sent)


@pytest.mark.parametrize(
    ("left", "right", "alike"),
    [
        (1, 1.0, True),
        (1, True, False),
        (0.1 + 0.2, 0.3, True),
        (10**30, 10**30 + 1, False),
        (10**400, 1e308, False),
        (10**16 + 1, 1e16, False),
        (3, 3.0000000000000004, True),
        (1, 1.0000001, False),
        (1.0, 1.0000001, True),
        (7, math.inf, False),
        ((1, 2), [1, 2], True),
        ([1, 2], [2, 1], False),
        ({1, 2}, {2, 1}, True),
        ({1: 2, 3: 4}, {3: 4, 1: 2}, True),
        ({1: 2}, {"1": 2}, False),
        ({1}, [1], False),
        (None, 0, False),
        (math.nan, math.nan, True),
        (math.inf, -math.inf, False),
    ],
)
def test_by_hand(left, right, alike) -> None:
    assert same(plain(left), plain(right)) is alike
    assert same(plain(right), plain(left)) is alike


def test_objects_that_a_program_defines_are_no_answers() -> None:
    class Everything(int):
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    for value in (Everything(3), [Everything(3)], {"a": Everything(3)}, object(), b"bytes", 1j, range(3)):
        with pytest.raises(NotPlainError, match="is not a valid answer"):
            plain(value)


def test_a_list_that_holds_itself() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(RecursionError):
        plain(endless)
