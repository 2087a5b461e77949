"""Solutions checked row by row: what is read is what was written, or an error, whatever byte is damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from store_samples import flip_byte, names_below, rollout

from pvg.store.atomic import DamagedFileError
from pvg.store.pairs import PairStream, PairView
from pvg.store.shards import RolloutShards, ShardInfo

ROWS = 6


def written(directory: Path, rows: int = ROWS) -> tuple[RolloutShards, ShardInfo]:
    shards = RolloutShards(directory)
    made = [rollout(i, problem=f"p{i // 4}", correct=i % 2 == 0) for i in range(rows)]
    return shards, shards.write(0, "mint-00000", made, by_row=True)


def everything(shards: RolloutShards, info: ShardInfo) -> tuple[object, ...]:
    """All that a view gives of a shard."""
    view = PairView(shards, [info])
    rows = [(q, t, ids.tobytes(), p) for q, t, ids, p, _ in view.rows(np.arange(info.rows))]
    labels = [a.tolist() for a in (view.rows_R, view.correct_R, view.problems_R, view.sources_R)]
    return rows, labels, view.problem_ids, view.sources


def test_rows_come_back_with_and_without_digests(tmp_path: Path) -> None:
    shards, info = written(tmp_path)
    plain = ShardInfo(info.path, info.rows, info.bytes, info.checksum)
    assert ShardInfo.from_plain(info.plain()) == info
    assert info.digests
    assert everything(shards, info) == everything(shards, plain)
    for i, row in enumerate(shards.read(info)):
        found = shards.solutions(info).row(i)
        assert (found.question, found.text, found.problem_id) == (row.question, row.text, row.problem_id)
        np.testing.assert_array_equal(found.completion_ids, row.completion_ids)
        found.completion_ids[:] = 7  # its own copy
        assert found.id == f"mint-00000, row {i}"  # what a message names it by


def test_a_flipped_byte_is_refused_or_was_not_used(tmp_path: Path) -> None:
    shards, info = written(tmp_path)
    path = tmp_path / info.path
    whole, expected = path.read_bytes(), everything(shards, info)
    refused = 0
    for place in range(0, len(whole), 7):
        flip_byte(path, place)
        try:
            assert everything(shards, info) == expected
        except DamagedFileError:
            refused += 1
        path.write_bytes(whole)
    assert refused > len(whole) // 7 // 10


@pytest.mark.parametrize("what", ["text 3", "question of p1?"])
def test_damage_is_noticed_where_it_is(tmp_path: Path, what: str) -> None:
    shards, info = written(tmp_path)
    path = tmp_path / info.path
    flip_byte(path, path.read_bytes().index(what.encode()))
    if what == "question of p1?":  # read on opening
        with pytest.raises(DamagedFileError, match="labels"):
            PairView(shards, [info])
        return
    view = PairView(shards, [info])
    view.rows(np.array([0, 1, 2, 4, 5]))
    for _ in range(2):
        with pytest.raises(DamagedFileError, match="row 3"):
            view.rows(np.array([2, 3]))


def test_the_digests_are_checked_themselves(tmp_path: Path) -> None:
    shards, info = written(tmp_path)
    path = tmp_path / info.digests_path
    whole = path.read_bytes()
    for damage in (whole[:-1], whole[:16], b"", bytes([whole[0] ^ 1]) + whole[1:]):
        path.write_bytes(damage)
        for use in (shards.verify, shards.solutions):
            with pytest.raises(DamagedFileError, match=r"mint-00000\.digests is damaged"):
                use(info)
    path.unlink()
    with pytest.raises(DamagedFileError, match="missing"):
        shards.solutions(info)
    path.write_bytes(whole)
    arrow = tmp_path / info.path
    arrow.write_bytes(arrow.read_bytes()[:-1])
    with pytest.raises(DamagedFileError, match="bytes instead of"):
        shards.solutions(info)
    arrow.unlink()
    with pytest.raises(DamagedFileError, match="missing"):
        shards.solutions(info)


def test_digests_live_and_die_with_their_shard(tmp_path: Path) -> None:
    shards, first = written(tmp_path)
    second = shards.write(0, "mint-00001", [rollout(9)], by_row=True)
    assert len(names_below(tmp_path)) == 4
    shards.recover([first])
    assert names_below(tmp_path) == {first.path, first.digests_path}
    assert shards.write(0, "mint-00001", [rollout(9)], by_row=True) == second


def test_a_shard_without_rows_has_digests_too(tmp_path: Path) -> None:
    shards, info = written(tmp_path, rows=0)
    assert PairView(shards, [info]).rows(np.array([], np.int64)) == []


def test_pairs_are_drawn_from_it(tmp_path: Path) -> None:
    shards, info = written(tmp_path, rows=8)
    view = PairView(shards, [info])
    pairs = PairStream(view, {"base": 1.0}, 0).draw(0, 20)
    for right, wrong in zip(view.rows(pairs.correct_rows_M), view.rows(pairs.incorrect_rows_M), strict=True):
        assert right.problem_id == wrong.problem_id
        assert int(right.text.split()[1]) % 2 == 0
        assert int(wrong.text.split()[1]) % 2 == 1
