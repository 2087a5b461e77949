"""Batches as arrays, and minibatches of them."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_policy import policy_batch

from pvg.records import Grade, Role, Rollout, Turn, VersionSpan
from pvg.training.batch import MinibatchSource, batch_of, minibatches


def example():
    return policy_batch([[1, 2, 3], [4, 5, 6, 7], [8, 9]], [1, 3, 1], [0.5, -1.0, 2.0], sampled=[[-1, -2], [-3], [-4]])


def test_layout_on_positions():
    batch = example()
    assert len(batch) == 3
    assert batch.lengths_N.tolist() == [3, 4, 2]
    assert batch.completion_lengths_N.tolist() == [2, 1, 1]
    on_positions = batch.on_positions(batch.sampled_logprobs)
    assert on_positions.tolist() == [[0, -1, -2, 0], [0, 0, 0, -3], [0, -4, 0, 0]]
    assert on_positions.dtype == np.float32


def test_selecting_rows_takes_every_column_along():
    batch = replace(example(), reference_logprobs=[np.full(n, n, dtype=np.float32) for n in (2, 1, 1)])
    picked = batch.with_weights(np.array([1, 2, 3], dtype=np.float32)).select(np.array([2, 0]))
    assert [row.tolist() for row in picked.sequences] == [[8, 9], [1, 2, 3]]
    assert [row.tolist() for row in picked.sampled_logprobs] == [[-4], [-1, -2]]
    assert [row.tolist() for row in picked.reference_logprobs] == [[1], [2, 2]]
    assert picked.advantages_N.tolist() == [2.0, 0.5]
    assert picked.row_weights_N.tolist() == [3, 1]
    assert picked.group_ids_N.tolist() == [2, 0]


def test_rollouts_become_rows_and_an_environments_tokens_have_no_log_probs():
    def sampled(number, role, tokens, **others):
        who = (str(number), "problem", "1+1?", "2", role, 0, "base", 0, 7 - number)
        ids = (np.arange(number + 1, dtype=np.int32), np.array(tokens, dtype=np.int32))
        spans = (VersionSpan(0, 5), VersionSpan(1, 3 + number))
        logprobs = -np.arange(len(tokens), dtype=np.float32)
        return Rollout(*who, *ids, logprobs, spans, "stop", "", Grade(correct=True, well_formed=True), **others)

    plain = sampled(0, Role.HELPFUL, [4, 5])
    turns = (Turn(0, True, ""), Turn(1, False, ""), Turn(3, True, ""))
    dialogue = sampled(1, Role.SNEAKY, [6, 7, 8, 9], turns=turns)
    batch = batch_of([plain, dialogue], np.array([0.5, -1.0], dtype=np.float32))
    assert [row.tolist() for row in batch.sequences] == [[0, 4, 5], [0, 1, 6, 7, 8, 9]]
    assert [row.tolist() for row in batch.sampled_logprobs] == [[0, -1], [0, -3]]
    assert [mask.tolist() for mask in batch.sampled_masks] == [[True, True], [True, False, False, True]]
    found = batch.prompt_lengths, batch.group_ids_N, batch.role_ids_N, batch.versions_N
    assert [column.tolist() for column in found] == [[1, 2], [7, 6], [Role.HELPFUL.number, Role.SNEAKY.number], [3, 4]]
    alone = batch_of([plain], np.zeros(1, dtype=np.float32))
    assert (alone.sampled_masks, alone.routed_experts) == (None, None)

    experts = replace(plain, routed_experts=np.zeros((2, 1, 1), dtype=np.uint8))
    assert len(batch_of([experts] * 2, np.zeros(2, dtype=np.float32)).routed_experts) == 2
    with pytest.raises(ValueError, match="only 1 of 2 rollouts have routed experts"):
        batch_of([experts, plain], np.zeros(2, dtype=np.float32))


def numbered(groups, roles):
    """Rows whose only token is their number."""
    rows = len(groups)
    return policy_batch([[row, 0] for row in range(rows)], [1] * rows, [0.0] * rows, groups=groups, roles=roles)


def numbers(batch):
    return [int(row[0]) for row in batch.sequences]


def test_minibatches_keep_groups_whole_and_share_the_roles_out():
    # Groups 0, 1 helpful, 2, 3 sneaky, two rows each, one role after the other: each half gets one group of each role.
    halves = minibatches(numbered([0, 0, 1, 1, 2, 2, 3, 3], [1, 1, 1, 1, 0, 0, 0, 0]), 2)
    assert [numbers(half) for half in halves] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_fewer_groups_than_parts_are_dealt_out_by_row():
    parts = minibatches(numbered([0, 0, 0, 0, 1, 1, 1, 1], [1] * 8), 4)
    assert [len(part) for part in parts] == [2, 2, 2, 2]
    many, by_group = minibatches(numbered([0, 1] * 40, [1] * 80), 3), [*range(0, 80, 2), *range(1, 80, 2)]
    assert [numbers(part) for part in many] == [sorted(by_group[part::3]) for part in range(3)]  # on every machine
    with pytest.raises(ValueError, match="cannot make 9 minibatches of 8 rows"):
        minibatches(numbered([0] * 8, [1] * 8), 9)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), min_size=1, max_size=30), st.data())
def test_minibatches_hold_every_row_once(rows, data):
    groups, roles = zip(*rows, strict=True)
    n = data.draw(st.integers(1, len(rows)))
    parts = minibatches(numbered(groups, roles), n)
    assert len(parts) == n
    assert all(len(part) for part in parts)
    assert sorted(number for part in parts for number in numbers(part)) == list(range(len(rows)))
    if len(set(rows)) >= n:
        for row in set(rows):
            assert sum(row in zip(part.group_ids_N, part.role_ids_N, strict=True) for part in parts) == 1


def test_a_source_hands_out_each_batch_in_parts():
    class Two:
        left = 2

        async def next_batch(self):
            self.left -= 1
            return numbered([0, 0, 1, 1], [1] * 4) if self.left >= 0 else None

    async def play():
        source = MinibatchSource(Two(), 2)
        found = []
        while (part := await source.next_batch()) is not None:
            found.append((numbers(part), source.pending))
        return found

    assert asyncio.run(play()) == [([0, 1], 1), ([2, 3], 0)] * 2
