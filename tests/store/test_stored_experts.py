"""Routed experts in shards: back in every bit, read in place, and absent where no rollout has any."""

from __future__ import annotations

import dataclasses
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from store_samples import flip_byte, rollout

from pvg.errors import StateError
from pvg.records import RoutedExperts
from pvg.store.atomic import DamagedFileError
from pvg.store.shards import EXPERTS, RolloutShards, routed_experts

SHAPES = hnp.array_shapes(min_dims=3, max_dims=3, min_side=0, max_side=4)
EXPERT_ROWS = st.none() | hnp.arrays(np.uint8, SHAPES) | hnp.arrays(np.uint16, SHAPES)


def carrying(i: int, experts: RoutedExperts | None) -> Any:
    return dataclasses.replace(rollout(i), routed_experts=experts)


def numbers(tokens: int, layers: int = 2, k: int = 2, dtype: Any = np.uint8) -> Any:
    return np.random.default_rng(tokens).integers(0, 200, (tokens, layers, k)).astype(dtype)


def test_a_mapped_shard_gives_them_where_they_lie_and_takes_no_memory_for_them(tmp_path: Path) -> None:
    shards, large = RolloutShards(tmp_path), numbers(4096, 16, 8)
    info = shards.write(0, "train_prover-00000", [carrying(i, large) for i in range(16)])
    batch = shards.map(info)
    data = batch.column(EXPERTS).buffers()[2]
    tracemalloc.start()
    try:
        found = routed_experts(batch)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < large.nbytes / 4  # of 16 times as much
    places = [row.__array_interface__["data"][0] for row in found if row is not None]
    assert places == [data.address + i * large.nbytes for i in range(16)]
    with pytest.raises(ValueError, match="read-only"):
        found[0][:] = 0  # type: ignore[index]
    assert info.bytes < 16 * large.nbytes + 20_000  # nothing but themselves on the disk


@pytest.mark.parametrize("wrong", [np.zeros((2, 2), np.uint8), np.zeros((2, 2, 2), np.int32)])
def test_they_are_never_converted(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Routed experts must be uint8 or uint16 with three dimensions"):
        RolloutShards(tmp_path).write(0, "mint-00000", [carrying(0, wrong)])


def test_damage_is_noticed_and_never_followed(tmp_path: Path) -> None:
    shards = RolloutShards(tmp_path)
    info = shards.write(0, "mint-00000", [carrying(i, numbers(3 + i)) for i in range(3)])
    path = tmp_path / info.path
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 89):
        path.write_bytes(whole)
        flip_byte(path, place)
        with pytest.raises(DamagedFileError):
            shards.read(info)
        try:
            shards.read(Path(info.path))
        except StateError:
            refused += 1
    assert refused > 5
