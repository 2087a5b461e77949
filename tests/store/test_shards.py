"""Rollout shards: exact round trips, immutability, damage, recovery."""

from __future__ import annotations

import dataclasses
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from store_samples import flip_byte, names_below, rollout, write_shards

from pvg.errors import StateError
from pvg.records import Checks, Grade, Role, Rollout, SolverSolution, Timing, Turn, VersionSpan
from pvg.store.atomic import DamagedFileError
from pvg.store.shards import EXPERTS as EXPERTS_COLUMN
from pvg.store.shards import RolloutShards, ShardInfo, routed_experts

INT64 = st.integers(-(2**63), 2**63 - 1)
TOKENS = hnp.arrays(np.int32, st.integers(0, 6))
# Any 32 bits, so that NaNs with payloads, infinities and negative zeros are among them.
LOGPROBS = hnp.arrays(np.uint32, st.integers(0, 6)).map(lambda bits: bits.view(np.float32))
CHECKS = st.builds(Checks, st.floats(0, 1), st.floats(0, 1), st.booleans())
EXPERTS = hnp.arrays(st.sampled_from([np.uint8, np.uint16]), st.tuples(*[st.integers(0, 3)] * 3))
ROLLOUTS = st.builds(
    Rollout,
    id=st.text(),
    problem_id=st.text(),
    question=st.text(),
    reference=st.text(),
    role=st.sampled_from(Role),
    round=INT64,
    source=st.text(),
    step=INT64,
    group=INT64,
    prompt_ids=TOKENS,
    completion_ids=TOKENS,
    logprobs=LOGPROBS,
    spans=st.lists(st.builds(VersionSpan, INT64, INT64), max_size=3).map(tuple),
    finish_reason=st.sampled_from(["stop", "length"]),
    text=st.text(),
    grade=st.builds(Grade, st.booleans(), st.booleans(), st.none() | st.text(), st.text(), checks=st.none() | CHECKS),
    timing=st.builds(Timing, st.floats(allow_nan=False), st.floats(allow_nan=False)),
    score=st.none() | st.floats(),
    verifier_version=st.none() | st.text(),
    reward=st.none() | st.floats(),
    solver=st.none()
    | st.builds(SolverSolution, st.text(), st.text(), st.none() | st.text(), st.booleans(), st.booleans()),
    kept_answer=st.none() | st.booleans(),
    sr=st.none() | st.floats(),
    cir=st.none() | st.floats(),
    turns=st.lists(st.builds(Turn, INT64, st.booleans(), st.text()), max_size=3).map(tuple),
    routed_experts=st.none() | EXPERTS,
)


def bits(value: Any) -> Any:
    """`value` with its floats as bytes and its types beside it, so that == means the same in every bit."""
    if dataclasses.is_dataclass(value):
        return [(field.name, bits(getattr(value, field.name))) for field in dataclasses.fields(value)]
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, tuple):
        return tuple(bits(item) for item in value)
    return (type(value), np.float64(value).tobytes() if isinstance(value, float) else value)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(ROLLOUTS, max_size=5))
def test_every_field_comes_back_in_every_bit(rollouts: list[Rollout]) -> None:
    with TemporaryDirectory() as directory:
        shards = RolloutShards(Path(directory))
        info = shards.write(2, "train_prover-00017", rollouts)
        assert info.rows == len(rollouts)
        for shard in (info, Path(info.path)):
            assert [bits(r) for r in shards.read(shard)] == [bits(r) for r in rollouts]


def test_the_info_names_the_file_and_survives_json(tmp_path: Path) -> None:
    info = RolloutShards(tmp_path).write(2, "train_prover-00017", [rollout(0)])
    assert info.path == "rollouts/round-002/train_prover-00017.arrow"
    assert (info.round, info.label) == (2, "train_prover-00017")
    assert info.bytes == (tmp_path / info.path).stat().st_size
    assert ShardInfo.from_plain(info.plain()) == info


def test_a_shard_is_never_overwritten(tmp_path: Path) -> None:
    shards, (info,) = write_shards(tmp_path, [rollout(0)], parts=1)
    with pytest.raises(StateError, match="already exists"):
        shards.write(0, "mint-00000", [rollout(1)])
    shards.verify(info)


@pytest.mark.parametrize(
    "wrong",
    [
        {"routed_experts": np.zeros((2, 2), np.uint8)},
        {"routed_experts": np.zeros((2, 2, 2), np.int32)},
        {"logprobs": np.zeros(2, np.float64)},
        {"completion_ids": np.zeros(2, np.int64)},
        {"prompt_ids": np.zeros((1, 2), np.int32)},
    ],
)
def test_arrays_are_never_converted(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="must be"):
        RolloutShards(tmp_path).write(0, "mint-00000", [dataclasses.replace(rollout(0), **wrong)])
    assert names_below(tmp_path) == set()


def test_every_flipped_byte_and_every_cut_is_noticed(tmp_path: Path) -> None:
    shards, (info,) = write_shards(tmp_path, [rollout(i) for i in range(3)], parts=1)
    path = tmp_path / info.path
    whole = path.read_bytes()

    def columns(info: ShardInfo) -> object:
        return shards.sample_columns([info])

    def where(info: ShardInfo) -> object:
        return shards.read_where(info, ["r/"])

    for place in range(0, len(whole), 297):
        flip_byte(path, place)
        for use in (shards.verify, shards.read, shards.map, columns, where):
            with pytest.raises(DamagedFileError, match=r"mint-00000\.arrow is damaged: its checksum"):
                use(info)
        path.write_bytes(whole)
    for length in (0, 1, 8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        for use in (shards.verify, shards.read):
            with pytest.raises(DamagedFileError, match=f"{length} bytes instead of {len(whole)}"):
                use(info)
        with pytest.raises(DamagedFileError, match=r"mint-00000\.arrow"):
            shards.read(path)
    path.unlink()
    for use in (shards.verify, shards.read):
        with pytest.raises(DamagedFileError, match="missing"):
            use(info)


def numbers(tokens: int, layers: int = 2, k: int = 2, dtype: Any = np.uint8) -> Any:
    return np.random.default_rng(tokens).integers(0, 200, (tokens, layers, k)).astype(dtype)


def test_a_path_alone_never_brings_the_process_down(tmp_path: Path) -> None:
    """Without a checksum a flipped byte may go unnoticed, but offsets that point outside are refused, not followed."""
    shards, (info,) = write_shards(
        tmp_path, [dataclasses.replace(rollout(i), routed_experts=numbers(3 + i)) for i in range(3)], parts=1
    )
    path = tmp_path / info.path
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 101):
        path.write_bytes(whole)
        flip_byte(path, place)
        try:
            shards.read(Path(info.path))
        except StateError:
            refused += 1
    assert refused > 10


def test_other_arrow_files_and_other_schemas_are_refused(tmp_path: Path) -> None:
    """A run of an older pvg, whose rollouts have a column less, is not damaged."""
    foreign = pa.table({"a": [1]})
    newer = foreign.replace_schema_metadata({b"pvg.shard": b"99"})
    _, (info,) = write_shards(tmp_path, [rollout(0)], parts=1)
    older = pa.ipc.open_file(tmp_path / info.path).read_all()
    older = older.drop_columns([older.column_names[-1]])
    other = "is of another version of pvg"
    for table, message in ((foreign, "not a rollout shard"), (newer, other), (older, other)):
        with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(StateError, match=message):
            RolloutShards(tmp_path).read(Path("x.arrow"))


def test_recover_removes_exactly_what_no_commit_names(tmp_path: Path) -> None:
    shards, infos = write_shards(tmp_path, [rollout(i) for i in range(6)], parts=3)
    other = shards.write(1, "train_prover-00000", [rollout(9)])
    folder = tmp_path / "rollouts" / "round-000"
    (folder / ".tmp-mint-00003.arrow-0a1b2c3d").write_bytes(b"half")
    (folder / "notes.txt").touch()
    removed = shards.recover([infos[0], infos[2]])
    assert {str(path.relative_to(tmp_path)) for path in removed} == {
        infos[1].path,
        other.path,
        "rollouts/round-000/.tmp-mint-00003.arrow-0a1b2c3d",
    }
    assert names_below(tmp_path) == {infos[0].path, infos[2].path, "rollouts/round-000/notes.txt"}
    assert shards.recover([infos[0], infos[2]]) == []
    assert shards.write(0, "mint-00001", [rollout(2), rollout(3)]) == infos[1]


def test_a_mask_says_which_tokens_were_sampled() -> None:
    talk = dataclasses.replace(rollout(4), turns=(Turn(0, True, "a"), Turn(1, False, "?"), Turn(2, True, "")))
    assert talk.sampled_mask.tolist() == [True, False, True, True, True]
    assert (talk.sampled_tokens, rollout(4).sampled_tokens) == (4, 5)


def test_a_mapped_shard_gives_them_where_they_lie_and_takes_no_memory_for_them(tmp_path: Path) -> None:
    shards, large = RolloutShards(tmp_path), numbers(4096, 16, 8)
    info = shards.write(
        0, "train_prover-00000", [dataclasses.replace(rollout(i), routed_experts=large) for i in range(16)]
    )
    batch = shards.map(info)
    data = batch.column(EXPERTS_COLUMN).buffers()[2]
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
