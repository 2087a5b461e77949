"""The style probe finds a style where there is one; the flaw is where the score falls most."""

from __future__ import annotations

import numpy as np
import pytest

from pvg.evaluation.measures import FEATURES, credit, features, folds_of, probe
from pvg.verifier.intervals import draws

PROBLEMS = 24


def probed(solutions, helpful, problems):
    fold_P = folds_of([f"p{p}" for p in range(PROBLEMS)], 4)
    rows_NF = features([np.array(s, dtype=np.int32) for s in solutions], 2)
    return probe(rows_NF, np.array(helpful), np.array(problems), fold_P, draws(PROBLEMS, 200, 0))


def test_rows_are_presence_scaled_to_length_one():
    rows_NF = features([np.array([5, 5, 5], dtype=np.int32), np.array([], dtype=np.int32)], 2)
    assert rows_NF.shape == (2, FEATURES)
    # "5" and "5 5", each once however often it comes
    assert sorted(rows_NF[0][rows_NF[0] > 0]) == pytest.approx([0.5**0.5] * 2)
    assert not rows_NF[1].any()


def test_a_word_that_only_one_role_writes_separates_the_roles():
    generator = np.random.default_rng(0)
    rows = [(p, role) for p in range(PROBLEMS) for role in (True, False) for _ in range(4)]
    solutions = [[*generator.integers(0, 9, 6), 50 if role else 51] for _, role in rows]
    found = probed(solutions, [role for _, role in rows], [p for p, _ in rows])
    assert found.value == 1.0


def test_what_only_the_problem_tells_does_not_help_on_other_problems():
    # In each problem all solutions are of one role, and share a token of the problem's own.
    rows = [(p, p % 2 == 0) for p in range(PROBLEMS) for _ in range(4)]
    found = probed([[100 + p, 7] for p, _ in rows], [role for _, role in rows], [p for p, _ in rows])
    assert abs(found.value - 0.5) < 0.25


def test_the_largest_fall_by_hand():
    # Scores of the empty solution and of three prefixes: falls 0.5, 2.5, -1.
    prefixes = np.array([1.0, 0.5, -2.0, -1.0])
    assert [credit(prefixes, step) for step in range(3)] == [0.0, 1.0, 0.0]


def test_ties_share_the_credit():
    assert credit(np.array([3.0, 2.0, 1.0]), 0) == 0.5
    with pytest.raises(ValueError, match="step 2 is not one of the 2 steps"):
        credit(np.array([3.0, 2.0, 1.0]), 2)
