"""A shard returns what translations and dialogues store, next to rows that have none of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from store_samples import rollout, translating

from pvg.records import Rollout, Turn
from pvg.store.shards import SCHEMA, RolloutShards

TALK = (Turn(0, True, "a"), Turn(1, False, "é?"), Turn(2, True, ""))


def with_experts(row: Rollout) -> Rollout:
    rows = len(row.prompt_ids) + len(row.completion_ids) - 1
    return replace(row, routed_experts=np.ones((rows, 1, 2), np.uint8))


ROWS = {
    "solver": [translating(rollout(1), 4), rollout(2), translating(rollout(3), 5, answer=None)],
    "turns": [replace(rollout(4), turns=TALK), rollout(2)],
    "all": [with_experts(replace(translating(rollout(4), 1, correct=True), turns=TALK)), rollout(0)],
    "experts": [with_experts(rollout(4)), rollout(0)],
    "nothing": [rollout(0)],
}


@pytest.mark.parametrize("name", ROWS)
def test_rollouts_come_back(name: str, tmp_path: Path) -> None:
    shards = RolloutShards(tmp_path)
    info = shards.write(0, "mint-00000", ROWS[name], by_row=True)
    assert [repr(found) for found in shards.read(info)] == [repr(row) for row in ROWS[name]]
    assert shards.solutions(info).row(0).text == ROWS[name][0].text  # the digests by row hold with the columns


def test_without_any_a_shard_is_what_it_always_was(tmp_path: Path) -> None:
    info = RolloutShards(tmp_path).write(0, "mint-00000", ROWS["nothing"])
    with pa.memory_map(str(tmp_path / info.path)) as source:
        assert pa.ipc.open_file(source).schema == SCHEMA


def test_a_mask_says_which_tokens_were_sampled() -> None:
    talk = replace(rollout(4), turns=TALK)  # five tokens
    assert talk.sampled_mask.tolist() == [True, False, True, True, True]
    assert talk.sampled_tokens == 4
    assert rollout(4).sampled_mask.tolist() == [True] * 5
    assert rollout(4).sampled_tokens == 5
