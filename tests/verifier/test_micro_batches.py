"""Cutting a batch of pairs: budget, every pair once, and clusters that stay whole."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pvg.verifier.losses import clusters, pairs_by_budget


def all_pairs(*problems):
    """Every (correct, incorrect) of problems given as (number of correct, number of incorrect) rows."""
    pairs, start = [], 0
    for correct, incorrect in problems:
        pairs += [(start + a, start + correct + b) for a in range(correct) for b in range(incorrect)]
        start += correct + incorrect
    return np.array(pairs, dtype=np.int32), start


def by_walking(pairs):
    """The rows that a chain of pairs connects, as sets."""
    found = []
    for pair in pairs.tolist():
        touched = [rows for rows in found if rows & set(pair)]
        found = [rows for rows in found if not rows & set(pair)] + [set(pair).union(*touched)]
    return found


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(10, 19)), min_size=1, max_size=25))
def test_clusters_are_what_chains_of_pairs_connect(pairs):
    pairs = np.array(pairs, dtype=np.int32)
    numbers = clusters(pairs, 20)
    expected = by_walking(pairs)
    for number in np.unique(numbers):
        assert set(pairs[numbers == number].reshape(-1).tolist()) in expected
    assert len(np.unique(numbers)) == len(expected)


@given(problems=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=6), data=st.data())
def test_each_solution_is_forwarded_once_where_problems_fit(problems, data):
    pairs, rows = all_pairs(*problems)
    lengths = np.array(data.draw(st.lists(st.integers(1, 20), min_size=rows, max_size=rows)), dtype=np.int64)
    order = np.array(data.draw(st.permutations(range(len(pairs)))))
    budget = data.draw(st.integers(160, 400))  # 8 rows of 20 tokens fit
    parts = pairs_by_budget(pairs[order], lengths, budget)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(pairs)))
    own_rows = [np.unique(pairs[order][part]) for part in parts]
    assert all(len(mine) * lengths[mine].max() <= budget for mine in own_rows)
    assert sum(map(len, own_rows)) == rows
    widest = [int(lengths[mine].max()) for mine in own_rows]
    assert widest == sorted(widest, reverse=True)


def test_a_problem_over_the_budget_is_cut():
    pairs, rows = all_pairs((4, 4), (1, 1))
    lengths = np.full(rows, 10, dtype=np.int64)
    parts = pairs_by_budget(pairs, lengths, 50)
    assert sorted(np.concatenate(parts).tolist()) == list(range(17))
    assert len(parts) > 2
    assert all(len(np.unique(pairs[part])) * 10 <= 50 for part in parts)
