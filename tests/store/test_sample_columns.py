"""Statistics of stored rollouts, read from columns: the same as of the rollouts themselves."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from store_samples import rollout, translating, write_shards

from pvg.records import Checks, Grade, Rollout, Turn
from pvg.store.samples import SampleColumns
from pvg.store.shards import RolloutShards, columns_in_memory

TALK = (Turn(0, True, "a"), Turn(2, False, "?"), Turn(3, True, "b"))
ONE_TURN = (Turn(0, True, "a"),)


def graded(i: int, correct: bool, well_formed: bool, checks: Checks | None = None) -> Rollout:
    return replace(rollout(i), grade=Grade(correct, well_formed, checks=checks))


PLAIN = [
    graded(0, True, True),
    graded(1, False, True),
    replace(graded(2, False, False), finish_reason="length"),
    graded(3, False, False),
]
EXECUTED = [
    graded(0, False, True, Checks(1.0, 0.5, False)),
    graded(1, False, True, Checks(1.0, 1 / 3, True)),
    graded(3, False, True, Checks(0.1, 0.0, False)),
    graded(5, True, True, Checks(1.0, 1.0, False)),
    graded(7, False, True),  # not executed, beside others that were
]
TALKED = [
    replace(rollout(4), turns=TALK),  # five tokens: 2 sampled, 1 told, 2 sampled
    translating(rollout(3), 5),
    replace(rollout(9), turns=TALK),
    replace(rollout(4), turns=ONE_TURN),
    rollout(2),
]


def assert_same(found: SampleColumns, expected: SampleColumns) -> None:
    for field in fields(SampleColumns):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(expected, field.name), field.name)
        assert getattr(found, field.name).dtype == getattr(expected, field.name).dtype


@pytest.mark.parametrize("rows", [PLAIN, EXECUTED, TALKED, [*PLAIN, *EXECUTED, *TALKED], []])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_columns_of_shards_are_those_of_their_rollouts(rows: list[Rollout], parts: int, tmp_path: Path) -> None:
    shards, infos = write_shards(tmp_path, rows, parts)
    found = shards.sample_columns(infos)
    assert len(found) == len(rows)
    assert_same(found, columns_in_memory(rows))
    assert found.proven_N.tolist() == [row.proven for row in rows]
    assert found.flaws_N.tolist() == [row.is_flaw for row in rows]
    assert found.tokens_N.tolist() == [row.sampled_tokens for row in rows]


def test_by_hand() -> None:
    found = columns_in_memory([*PLAIN, *TALKED])
    assert found.truncated_N.tolist() == [False, False, True] + [False] * 6
    assert found.flaws_N[:4].tolist() == [False, True, False, False]
    assert found.tokens_N[4:].tolist() == [4, 4, 4, 5, 3]
    assert found.answers_N.tolist() == [-1] * 4 + [2, -1, 2, 0, -1]


def test_rollouts_are_found_by_the_beginning_of_their_ids(tmp_path: Path) -> None:
    rows = [replace(row, id=f"000/fresh/{number:05d}/{row.id}") for row in TALKED for number in (0, 1, 10)]
    shards = RolloutShards(tmp_path)
    info = shards.write(0, "train_prover-00000", [*rows, *PLAIN])
    found = shards.read_where(info, ["000/fresh/00001", "000/fresh/00010"])
    assert [repr(row) for row in found] == [repr(row) for row in rows if not row.id.startswith("000/fresh/00000")]
    assert shards.read_where(info, ["000/fresh/00002"]) == []
