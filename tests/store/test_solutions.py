"""Solutions read one by one from a shard: they are what was written, or an error, whatever byte is damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from store_samples import flip_byte, rollout

from pvg.store.atomic import DamagedFileError
from pvg.store.pairs import PairStream, PairView
from pvg.store.shards import RolloutShards, ShardInfo


def written(directory: Path, rows: int = 6) -> tuple[RolloutShards, ShardInfo]:
    shards = RolloutShards(directory)
    made = [rollout(i, problem=f"p{i // 4}", correct=i % 2 == 0) for i in range(rows)]
    return shards, shards.write(0, "mint-00000", made)


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    shards, info = written(tmp_path)
    assert ShardInfo.from_plain(info.plain()) == info
    for i, row in enumerate(shards.read(info)):
        found = shards.solutions(info).row(i)
        assert (found.question, found.text, found.problem_id) == (row.question, row.text, row.problem_id)
        np.testing.assert_array_equal(found.completion_ids, row.completion_ids)
        assert found.completion_ids.dtype == np.int32
        found.completion_ids[:] = 7  # its own copy
        assert found.id == f"mint-00000, row {i}"  # what a message names it by


def test_a_shard_with_a_flipped_byte_is_refused(tmp_path: Path) -> None:
    shards, info = written(tmp_path)
    path = tmp_path / info.path
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 9):
        flip_byte(path, place)
        with pytest.raises(DamagedFileError, match="checksum"):
            PairView(shards, [info])
        path.write_bytes(whole)


def test_pairs_are_drawn_from_it(tmp_path: Path) -> None:
    shards, info = written(tmp_path, rows=8)
    view = PairView(shards, [info])
    pairs = PairStream(view, {"base": 1.0}, 0).draw(0, 20)
    for right, wrong in zip(view.rows(pairs.correct_rows_M), view.rows(pairs.incorrect_rows_M), strict=True):
        assert right.problem_id == wrong.problem_id
        assert int(right.text.split()[1]) % 2 == 0
        assert int(wrong.text.split()[1]) % 2 == 1
