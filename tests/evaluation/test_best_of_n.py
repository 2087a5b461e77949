"""Best-of-n against the enumeration of all subsets, ties drawn at random."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.evaluation.measures import balanced, natural


def won(scores, correct):
    """The chance that one of the solutions with the highest score, drawn at random, is correct."""
    best = [c for s, c in zip(scores, correct, strict=True) if s == max(scores)]
    return sum(best) / len(best)


def enumerated_balanced(scores, correct, n):
    right = [s for s, c in zip(scores, correct, strict=True) if c]
    wrong = [s for s, c in zip(scores, correct, strict=True) if not c]
    half = n // 2
    chances = [
        won(a + b, [True] * half + [False] * half)
        for a in itertools.combinations(right, half)
        for b in itertools.combinations(wrong, half)
    ]
    return sum(chances) / len(chances) if chances else None


def enumerated_natural(scores, correct, n):
    chosen = [
        won([scores[i] for i in rows], [correct[i] for i in rows])
        for rows in itertools.combinations(range(len(scores)), n)
    ]
    return sum(chosen) / len(chosen) if chosen else None


problems = st.lists(st.tuples(st.integers(-2, 2), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(problems, st.sampled_from([2, 4, 6]))
def test_balanced_is_the_mean_over_all_choices(rows, n):
    scores, correct = [float(s) for s, _ in rows], [c for _, c in rows]
    found, expected = balanced(np.array(scores), np.array(correct), n), enumerated_balanced(scores, correct, n)
    assert (found is None) == (expected is None)
    assert found is None or found == pytest.approx(expected, abs=1e-12)


@settings(max_examples=150, deadline=None)
@given(problems, st.integers(1, 5))
def test_natural_is_the_mean_over_all_choices(rows, n):
    scores, correct = [float(s) for s, _ in rows], [c for _, c in rows]
    found, expected = natural(np.array(scores), np.array(correct), n), enumerated_natural(scores, correct, n)
    assert (found is None) == (expected is None)
    assert found is None or found == pytest.approx(expected, abs=1e-12)
