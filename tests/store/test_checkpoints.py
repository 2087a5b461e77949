"""Checkpoints: bit-exact tensors, damage, foreign formats, pruning."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from store_samples import flip_byte, names_below

from pvg.errors import StateError
from pvg.store.atomic import DamagedFileError
from pvg.store.checkpoints import META_FILE, TENSORS_FILE, prune, read_checkpoint, verify_checkpoint, write_checkpoint

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    flat = tensor.contiguous().reshape(-1)
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_comes_back_in_every_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """Random bytes as contents: NaNs with payloads and negative zeros included."""
    generator = np.random.default_rng(0)
    size = torch.empty(0, dtype=dtype).element_size()

    def some(*shape: int) -> torch.Tensor:
        count = int(np.prod(shape))
        return torch.from_numpy(generator.integers(0, 256, count * size, np.uint8)).view(dtype).reshape(shape)

    tensors = {
        "matrix": some(3, 4),
        "scalar": some(1).reshape(()),
        "empty": torch.empty(0, 5, dtype=dtype),
        "model.deep.name": some(7),
    }
    meta = {"step": 3, "learning_rate": 1e-4, "nested": {"é": [1, None, True]}}
    write_checkpoint(tmp_path, "c", tensors, meta)
    found, found_meta = read_checkpoint(tmp_path, "c")
    assert found_meta == meta
    assert {name: raw(tensor) for name, tensor in found.items()} == {name: raw(t) for name, t in tensors.items()}


def test_bool_parameters_views_and_shared_memory(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "bool": torch.tensor([True, False]),
        "transposed": base.T,
        "row": base[1],
        "whole": base,
        "again": base,
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    write_checkpoint(tmp_path, "c", tensors, {})
    found, _ = read_checkpoint(tmp_path, "c")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    found["whole"].add_(1)  # what is read is the reader's own
    assert torch.equal(read_checkpoint(tmp_path, "c")[0]["whole"], base)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_weights_have_the_permissions_of_other_files(tmp_path: Path, umask: int) -> None:
    """safetensors writes files that only their owner can read, so that colleagues could not open a run."""
    before = os.umask(umask)
    try:
        folder = write_checkpoint(tmp_path, "first", {"a": torch.ones(2)}, {}, files={"config.json": b"{}"})
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o666 & ~umask}
    assert len(names_below(folder)) == 3


def test_checkpoints_never_change_and_names_stay_inside(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "c", {"w": torch.zeros(2)}, {})
    with pytest.raises(StateError, match="never change"):
        write_checkpoint(tmp_path, "c", {"w": torch.ones(2)}, {})
    for name in ("../c", "", ".tmp-c", "a/b"):
        with pytest.raises(ValueError, match="cannot be the name"):
            write_checkpoint(tmp_path, name, {}, {})
    with pytest.raises(ValueError, match="must be plain JSON"):
        write_checkpoint(tmp_path, "d", {}, {"loss": float("nan")})
    assert names_below(tmp_path) == {f"c/{TENSORS_FILE}", f"c/{META_FILE}"}


@pytest.mark.parametrize("file", [TENSORS_FILE, META_FILE])
def test_damage_is_noticed_wherever_it_is(tmp_path: Path, file: str) -> None:
    path = write_checkpoint(tmp_path, "c", {"w": torch.arange(20.0)}, {"step": 1}) / file
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        flip_byte(path, place)
        with pytest.raises(DamagedFileError, match=file):
            read_checkpoint(tmp_path, "c")
        path.write_bytes(whole)
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedFileError, match=file):
            verify_checkpoint(tmp_path, "c")
    path.unlink()
    with pytest.raises(DamagedFileError, match="missing"):
        read_checkpoint(tmp_path, "c")
    with pytest.raises(DamagedFileError, match="the folder is missing"):
        read_checkpoint(tmp_path, "absent")


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "optimizer.pkl", "weights.npy"])
def test_a_folder_with_any_other_format_is_refused(tmp_path: Path, name: str) -> None:
    path = write_checkpoint(tmp_path, "c", {"w": torch.zeros(2)}, {})
    torch.save({"w": torch.ones(2)}, path / name)
    with pytest.raises(DamagedFileError, match="pvg unpickles nothing") as caught:
        read_checkpoint(tmp_path, "c")
    assert name in caught.value.message


def test_a_listed_file_belongs_to_the_checkpoint_and_its_damage_is_noticed(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "c", {"w": torch.zeros(2)}, {}, files={"config.json": b"{}"})
    assert (path / "config.json").read_bytes() == b"{}"
    assert read_checkpoint(tmp_path, "c")[1] == {}
    (path / "config.json").write_bytes(b"[]")
    with pytest.raises(DamagedFileError, match=r"config\.json is damaged: its checksum differs"):
        read_checkpoint(tmp_path, "c")
    (path / "config.json").unlink()
    with pytest.raises(DamagedFileError, match="missing"):
        read_checkpoint(tmp_path, "c")


def test_prune_keeps_what_is_named_and_nothing_else(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_checkpoint(tmp_path, name, {}, {})
    (tmp_path / ".tmp-d-0a1b2c3d").mkdir()
    (tmp_path / ".tmp-d-0a1b2c3d" / TENSORS_FILE).write_bytes(b"half")
    (tmp_path / "notes.txt").touch()
    removed = prune(tmp_path, {"a", "c", "gone"})
    assert {path.name for path in removed} == {"b", ".tmp-d-0a1b2c3d"}
    assert {path.name for path in tmp_path.iterdir()} == {"a", "c", "notes.txt"}
    assert prune(tmp_path / "absent", set()) == []


def test_prune_removes_of_a_link_only_the_link(tmp_path: Path) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    for name in ("old", "new"):
        write_checkpoint(disk, name, {}, {})
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        (tmp_path / "checkpoints" / name).symlink_to(disk / name)
    kept.mkdir()
    (tmp_path / "checkpoints" / ".tmp-x-0a1b2c3d").symlink_to(kept)
    prune(tmp_path / "checkpoints", {"new"})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["new"]
    assert kept.is_dir()
    assert verify_checkpoint(disk, "old") == verify_checkpoint(tmp_path / "checkpoints", "new") == {}


def test_prune_goes_on_where_another_host_removes_the_same_files(tmp_path: Path, monkeypatch) -> None:
    """A driver that has lost the run may wake up while it prunes."""
    for name in ("a", "b", "c"):
        write_checkpoint(tmp_path, name, {}, {})
    (tmp_path / ".tmp-d-0a1b2c3d").mkdir()
    (tmp_path / ".tmp-e-0a1b2c3d").write_bytes(b"half")
    remove, rename = shutil.rmtree, Path.rename

    def removed_meanwhile(path: Path) -> None:
        if path.name.startswith(".tmp-d"):
            remove(path)
            (tmp_path / ".tmp-e-0a1b2c3d").unlink()
        remove(path)

    def renamed_meanwhile(path: Path, target: Path) -> Path:
        if path.name == "b":
            remove(path)
        return rename(path, target)

    monkeypatch.setattr(shutil, "rmtree", removed_meanwhile)
    monkeypatch.setattr(Path, "rename", renamed_meanwhile)
    prune(tmp_path, {"c"})
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("pvg.store.checkpoints.write_synced", refuse)
    with pytest.raises(OSError, match="Input/output"):
        write_checkpoint(tmp_path, "c", {"w": torch.zeros(2)}, {})
    assert list(tmp_path.iterdir()) == []
