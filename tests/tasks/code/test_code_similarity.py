"""How alike programs are, against counts made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pvg.tasks import code_problems
from pvg.tasks.code_problems import normalised, similarities, windows


def similarity(code: str, other: str) -> float:
    return code_problems.similarity(windows(code), windows(other))


ONE = "def f(n):\n    return n + 1"


def test_similarity_by_hand() -> None:
    # ONE is def v0 ( v1 ) : return v1 + 1: 10 tokens, 7 windows of four.
    assert similarity(ONE, ONE) == 1.0
    # n - 1: the last two windows hold the sign, and are other ones: 5 of 7.
    assert similarity(ONE, ONE.replace("+", "-")) == pytest.approx(5 / 7)
    # n + 2: one window is another: 6 of 7.
    assert similarity(ONE, ONE.replace("1", "2")) == pytest.approx(6 / 7)
    assert similarity(ONE, "") == 0.0
    assert similarity("", "# nothing\n") == 1.0
    assert similarity("x", "y") == 1.0  # a single name, fewer tokens than a window
    assert similarity("x", "1") == 0.0


def test_names_comments_and_layout_do_not_count() -> None:
    renamed = 'def other(value):\n  """Says nothing."""\n  return value+1 # done\n'
    assert similarity(renamed.replace('  """Says nothing."""\n', ""), ONE) == 1.0
    assert similarity(renamed, ONE) < 1.0  # a text is a token
    assert similarity("def f(n): return max(n)", "def f(n): return min(n)") < 1.0  # Python's own names do count


def test_groups_and_references_by_hand() -> None:
    minus, two = ONE.replace("+", "-"), ONE.replace("1", "2")
    codes, references = [ONE, minus, "", two, two], [ONE, ONE, ONE, two, ONE]
    groups_N = np.array([0, 0, 0, 1, 2], dtype=np.int32)

    assert similarities(codes, references, groups_N).tolist() == pytest.approx([1.0, 5 / 7, 0.0, 1.0, 6 / 7])
    assert similarities(codes, [two] * 5, groups_N)[1] == pytest.approx(5 / 7)  # of its group: ONE and minus
    assert similarities([], [], np.zeros(0, np.int32)).shape == (0,)


@pytest.mark.timeout(60)  # a lexer of quadratic time would take minutes over these
@pytest.mark.parametrize(
    ("piece", "tokens"),
    [
        ('"', 8334),  # texts in three quotes each, and an empty one
        ("'''", 25_000),
        ("\\", 50_000),
        ("#", 0),
        ("r'", 25_000),
        ("**", 50_000),
        ("((((", 200_000),
        ("'\\", 2),  # a text to the end, and its last backslash
    ],
)
def test_long_texts_that_may_stall_a_lexer_are_read(piece: str, tokens: int) -> None:
    assert len(normalised(piece * 50_000)) == tokens
