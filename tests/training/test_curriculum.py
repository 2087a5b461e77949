"""Curricula: weights and buckets by hand, shares that are kept exactly, and draws that repeat nothing needlessly."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.game.orders import bucket_counts, buckets_of, draw_from_buckets

EDGES = (0.2, 0.8)
SHARES = (0.25, 0.5, 0.25)


def counts(sizes: list[int], shares: tuple[float, ...], count: int, offset: float = 0.0) -> list[int]:
    return bucket_counts(np.array(sizes), np.array(shares), count, offset).tolist()


def test_buckets_by_hand() -> None:
    rates = np.array([0.0, 0.19, 0.2, 0.79, 0.8, 1.0, math.nan])
    assert buckets_of(rates, EDGES).tolist() == [0, 0, 1, 1, 2, 2, 1]


def test_counts_by_hand() -> None:
    assert counts([9, 9, 9], SHARES, 8) == [2, 4, 2]
    # The hard bucket is empty: the others stand 2 to 1.
    assert counts([0, 90, 90], SHARES, 9) == [0, 6, 3]
    # It holds one, of two that it should give: seven are left, 2 to 1, which is 4.67 and 2.33.
    assert counts([1, 9, 9], SHARES, 8, 0.0) == [1, 4, 3]
    assert counts([1, 9, 9], SHARES, 8, 0.5) == [1, 5, 2]
    # What a bucket of share 0 holds is for when the others are exhausted.
    assert counts([2, 9, 2], (0.5, 0.0, 0.5), 7) == [2, 3, 2]
    # 15 * 0.2 / (0.2 + 0.4) is a little less than 5: still the 5 of the first bucket, and no 11th of the last.
    assert counts([5, 5, 9, 10], (0.2, 0.3, 0.4, 0.4), 29) == [5, 5, 9, 10]
    with pytest.raises(ValueError, match="cannot draw 8 of 7 problems"):
        counts([1, 6], (0.5, 0.5), 8)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    raw=st.lists(st.integers(0, 10), min_size=5, max_size=5),
    data=st.data(),
)
def test_counts_sum_up_and_never_exceed_what_there_is(sizes, raw, data) -> None:
    shares = np.array(raw[: len(sizes)]) / 10
    count = data.draw(st.integers(0, sum(sizes)))
    offsets = [place / 16 for place in range(16)]
    found = np.array([counts(sizes, tuple(shares), count, offset) for offset in offsets])
    assert (found.sum(axis=1) == count).all()
    assert (found >= 0).all()
    assert (found <= np.array(sizes)).all()
    assert (found.max(axis=0) - found.min(axis=0) <= 1).all()  # rounded down or up
    if shares.sum() and all(size >= count for size in sizes):  # no bucket is exhausted
        exact = count * shares / shares.sum()
        assert (np.abs(found - exact) < 1.0 + 1e-9).all()
        assert np.abs(found.mean(axis=0) - exact).max() <= 1 / 16 + 1e-9  # without bias over the offsets


def test_draws_keep_the_shares_and_are_alike_within_a_bucket() -> None:
    buckets_P = np.array([0] * 4 + [1] * 20 + [2] * 40)
    seen: Counter[int] = Counter()
    for number in range(300):
        drawn = draw_from_buckets(buckets_P, SHARES, 8, np.random.default_rng(number))
        assert len(set(drawn)) == 8
        assert Counter(buckets_P[drawn].tolist()) == {0: 2, 1: 4, 2: 2}
        seen.update(drawn)
    for bucket, each in ((0, 300 * 2 / 4), (1, 300 * 4 / 20), (2, 300 * 2 / 40)):
        for place in np.flatnonzero(buckets_P == bucket):
            assert abs(seen[int(place)] - each) < 6 * math.sqrt(each)
    assert (
        len({tuple(buckets_P[draw_from_buckets(buckets_P, SHARES, 8, np.random.default_rng(n))]) for n in range(9)}) > 1
    )
