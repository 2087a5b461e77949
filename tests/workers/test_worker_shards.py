"""Shards: each row in exactly one, groups whole, similar work, and sums that are those of the whole batch."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pvg.training.batch import PolicyBatch
from pvg.verifier.data import VerifierBatch
from pvg.workers.engine import shard_of
from pvg.workers.models import balanced, pair_shards, policy_shards


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_shards_differ_by_at_most_the_largest_item(sizes, shards):
    shard_K = balanced(np.array(sizes, dtype=np.int64), shards)
    loads = np.bincount(shard_K, weights=sizes, minlength=shards) if sizes else np.zeros(shards)
    assert loads.max() - loads.min() <= max(sizes, default=0)


def test_both_roles_of_a_mint_are_spread_over_the_workers():
    """The groups of a mint alternate between the roles."""
    for workers in (2, 3, 4, 8):
        for role in (0, 1):
            own = [shard_of(group, workers) for group in range(role, 4 * workers * workers, 2)]
            counts = np.bincount(own, minlength=workers)
            assert counts.max() - counts.min() <= 1, (workers, role)


def policy_batch(groups: list[int], lengths: list[int], weights: list[float]) -> PolicyBatch:
    rows = len(groups)
    return PolicyBatch(
        sequences=[np.arange(length, dtype=np.int32) + row for row, length in enumerate(lengths)],
        prompt_lengths=np.ones(rows, np.int32),
        sampled_logprobs=[np.zeros(length - 1, np.float32) for length in lengths],
        reference_logprobs=None,
        advantages_N=np.arange(rows, dtype=np.float32),
        role_ids_N=np.array([group % 2 for group in groups], np.int8),
        group_ids_N=np.array(groups, np.int32),
        versions_N=np.zeros(rows, np.int32),
        row_weights_N=np.array(weights, np.float32),
    )


ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(2, 9), st.sampled_from([0.0, 0.5])), min_size=1, max_size=30)


@given(ROWS, st.integers(1, 5))
def test_each_weighted_row_is_in_one_shard_and_groups_stay_whole(rows, shards):
    batch = policy_batch(*map(list, zip(*rows, strict=True)))
    parts = policy_shards(batch, shards)
    assert len(parts) <= shards
    found = sorted(int(value) for part in parts for value in part.advantages_N)
    assert found == [row for row, (_, _, weight) in enumerate(rows) if weight]
    owners = [(int(group), number) for number, part in enumerate(parts) for group in np.unique(part.group_ids_N)]
    assert len({group for group, _ in owners}) == len(owners)


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(8, 15)), min_size=1, max_size=30, unique=True), st.integers(1, 4)
)
def test_each_pair_is_in_one_shard_and_no_solution_in_two(pairs, shards):
    batch = VerifierBatch(
        sequences=[np.full(3 + row % 4, row, np.int32) for row in range(16)],
        prompt_lengths_N=np.ones(16, np.int32),
        pairs_M2=np.array(pairs, np.int32),
        references_N=None,
        shares_M=np.arange(1, len(pairs) + 1, dtype=np.float32),
    )
    parts = pair_shards(batch, shards)
    assert sorted(int(share) for part in parts for share in part.shares_M) == list(range(1, len(pairs) + 1))
    owners = [int(row[0]) for part in parts for row in part.sequences]
    assert len(owners) == len(set(owners))
