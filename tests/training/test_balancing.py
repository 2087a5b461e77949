"""Balanced micro-batches: as few as the token budget allows, of like size, never with more padding."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_policy import policy_batch

from pvg.models.packing import token_budget_batches
from pvg.training.forward import ForwardSettings, balanced_batches, batch_positions, forward_batches


def by_length(lengths, budget):
    lengths_N = np.asarray(lengths)

    def positions(rows):
        return len(rows) * int(lengths_N[rows].max())

    found = balanced_batches(partial(token_budget_batches, lengths_N), positions, budget, max(lengths, default=0))
    return [rows.tolist() for rows in found]


@pytest.mark.parametrize(
    ("lengths", "budget", "expected"),
    [
        ([], 10, []),
        ([3, 5], 10, [[1, 0]]),  # one micro-batch stays one
        ([4] * 10, 28, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]),  # 7 and 3 before
        ([4] * 9, 16, [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),  # 4, 4 and 1 before
        ([10, 10, 1, 1, 1, 1], 30, [[0, 1], [2, 3, 4, 5]]),  # 10, 10 and a 1 that is padded to 10 before
        # The even cut [10, 10, 10], [9, 1, 1, 1] would be 66 positions instead of 43.
        ([10, 10, 10, 9, 1, 1, 1], 40, [[0, 1, 2, 3], [4, 5, 6]]),
        ([12, 2, 2], 12, [[0], [1, 2]]),  # the longest row has the budget for itself
    ],
)
def test_by_hand(lengths, budget, expected):
    assert by_length(lengths, budget) == expected


@settings(deadline=None)
@given(data=st.data(), shared=st.booleans(), repeated=st.booleans())
def test_every_row_once_as_few_as_before_and_no_more_positions(data, shared, repeated):
    completions = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=40))
    budget = data.draw(st.integers(36, 300))
    most = None if repeated else data.draw(st.none() | st.integers(1, 9))
    prompts = [data.draw(st.integers(1, 3)) for _ in completions]
    sequences = [
        [prompt] * (2 * prompt) + [0 if repeated else 9 + number] * rest
        for number, (prompt, rest) in enumerate(zip(prompts, completions, strict=True))
    ]
    batch = policy_batch(sequences, [2 * prompt for prompt in prompts], [1.0] * len(sequences))
    limits = ForwardSettings(1.0, budget, 0, shared_prompts=shared)
    rows = np.arange(len(batch))
    greedy = forward_batches(batch, rows, limits, most)
    even = forward_batches(batch, rows, limits, most, balanced=True)
    assert sorted(np.concatenate(even).tolist()) == rows.tolist()
    assert len(even) == len(greedy)  # in this order of rows fewer is not possible: see below
    before, after = ([batch_positions(batch.select(part), limits) for part in parts] for parts in (greedy, even))
    assert max(after) <= budget
    assert sum(after) <= sum(before)
    assert all(len(part) <= (most or 40) for part in even)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(9, 40))
def test_there_is_no_cut_into_fewer(lengths, budget):
    """Over all cuts of the sorted rows into consecutive parts."""
    ordered = sorted(lengths, reverse=True)
    fewest = [0]
    for end in range(1, len(ordered) + 1):
        fits = [fewest[start] for start in range(end) if (end - start) * ordered[start] <= budget]
        fewest.append(1 + min(fits))
    assert len(by_length(lengths, budget)) == fewest[-1]
