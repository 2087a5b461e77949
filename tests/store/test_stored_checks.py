"""What executing solutions has shown, in shards: back as it was, and not there where nothing was executed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from store_samples import rollout

from pvg.records import Checks, Rollout
from pvg.store.shards import RolloutShards


def checked(i: int, checks: Checks | None, experts: bool = False) -> Rollout:
    one = rollout(i)
    routed = np.zeros((2, 1, 1), np.uint8) if experts else None
    return dataclasses.replace(one, grade=dataclasses.replace(one.grade, checks=checks), routed_experts=routed)


@pytest.mark.parametrize("experts", [False, True])
def test_checks_come_back_with_and_without_experts(tmp_path: Path, experts: bool) -> None:
    rows = [
        checked(0, Checks(1.0, 1 / 3, True), experts),
        checked(1, None, experts),
        checked(2, Checks(0.0, 0.1, False)),
    ]
    shards = RolloutShards(tmp_path)
    info = shards.write(0, "mint-00000", rows, by_row=True)
    found = shards.read(info)
    assert [one.grade for one in found] == [one.grade for one in rows]
    assert [one.routed_experts is None for one in found] == [one.routed_experts is None for one in rows]
    assert shards.solutions(info).row(2).text == "text 2"
