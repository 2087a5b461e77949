"""Rectangles and token budgets."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.errors import ConfigurationError
from pvg.models.packing import pad_right, token_budget_batches


def test_pads_to_the_right_with_the_pad_id():
    rows = [np.array([5, 6, 7], dtype=np.int32), np.array([8], dtype=np.int32), np.array([], dtype=np.int32)]
    ids_BL, lengths_B = pad_right(rows, 9, torch.device("cpu"))
    assert ids_BL.dtype == torch.int64
    assert ids_BL.tolist() == [[5, 6, 7], [8, 9, 9], [9, 9, 9]]
    assert lengths_B.tolist() == [3, 1, 0]


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=60), st.integers(40, 200))
def test_batches_hold_every_row_once_within_the_budget(lengths, budget):
    batches = token_budget_batches(lengths, budget)
    assert sorted(np.concatenate(batches).tolist() if batches else []) == list(range(len(lengths)))
    for rows in batches:
        assert len(rows) * max(lengths[row] for row in rows) <= budget


def test_batches_by_hand():
    # Longest first: 5 | 4 4 (8 <= 9, a third would make 12) | 3 1, and equal lengths in their own order.
    batches = token_budget_batches([4, 1, 5, 3, 4], 9)
    assert [rows.tolist() for rows in batches] == [[2], [0, 4], [3, 1]]


def test_a_row_over_the_budget_is_named():
    with pytest.raises(ConfigurationError, match=r"11 tokens \(row 1\) is over the token budget of 10"):
        token_budget_batches([3, 11], 10)
