"""Which published folders pvg_vllm lets into an engine: each check separately, against real files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_model import mark_stable
from safetensors.torch import save_file

from pvg.servers.server_side.pvg_vllm.accepted_weights import Refusal, adapter_folder, weight_files

Change = Callable[[Path], object]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def publish(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True)
    for number, file in enumerate(files):
        save_file({f"tensor{number}": torch.full((4, 3), float(number))}, folder / file)
    return mark_stable(folder, {file: (folder / file).stat().st_size for file in files})


def code_of(check: Callable[[Path, str], object], root: Path, name: str) -> tuple[int, str]:
    with pytest.raises(Refusal) as refused:
        check(root, name)
    assert refused.value.message
    return refused.value.status, refused.value.code


def test_the_files_of_a_published_folder_come_in_order(root: Path) -> None:
    publish(root / "run" / "v000001", "b.safetensors", "a.safetensors")
    folder = root.resolve() / "run" / "v000001"
    assert weight_files(root, "run/v000001") == [folder / "a.safetensors", folder / "b.safetensors"]


def test_links_inside_the_root_are_followed(root: Path) -> None:
    publish(root / "run" / "v000001", "a.safetensors")
    (root / "latest").symlink_to(root / "run" / "v000001")
    assert weight_files(root, "latest") == [root.resolve() / "run" / "v000001" / "a.safetensors"]


@pytest.mark.parametrize("name", ["", ".", "..", "../root/v", "v/../v", "/", "//v", "v\0", "v/.."])
def test_names_that_are_no_folder_below_the_root(root: Path, name: str) -> None:
    publish(root / "v", "a.safetensors")
    assert code_of(weight_files, root, name) == (403, "foreign_path")


def test_no_link_leads_out_of_the_root(root: Path, tmp_path: Path) -> None:
    outside = publish(tmp_path / "outside", "a.safetensors")
    (root / "whole").symlink_to(outside)
    publish(root / "file", "a.safetensors")
    (root / "file" / "a.safetensors").unlink()
    (root / "file" / "a.safetensors").symlink_to(outside / "a.safetensors")
    publish(root / "mark", "a.safetensors")
    (root / "mark" / "STABLE").unlink()
    (root / "mark" / "STABLE").symlink_to(outside / "STABLE")
    publish(tmp_path / "root-beside", "a.safetensors")  # begins like the root, and is none of it
    (root / "beside").symlink_to(tmp_path / "root-beside")
    for name in ["whole", "file", "mark", "beside"]:
        assert code_of(weight_files, root, name) == (403, "foreign_path")


CHANGES: dict[str, tuple[Change, tuple[int, str]]] = {
    "no STABLE": (lambda v: (v / "STABLE").unlink(), (422, "not_stable")),
    "STABLE is no JSON": (lambda v: (v / "STABLE").write_bytes(b"\xff{"), (422, "not_stable")),
    "STABLE of another version": (lambda v: mark_stable(v, {"a.safetensors": 1}, version=2), (422, "not_stable")),
    "STABLE names nothing": (lambda v: mark_stable(v, {}), (422, "not_stable")),
    "STABLE with a size of true": (lambda v: mark_stable(v, {"a.safetensors": True}), (422, "not_stable")),
    "STABLE is a folder": (lambda v: ((v / "STABLE").unlink(), (v / "STABLE").mkdir()), (422, "not_stable")),
    "another size": (lambda v: mark_stable(v, {"a.safetensors": 7}), (422, "not_stable")),
    "a file that is missing": (lambda v: mark_stable(v, {"b.safetensors": 7}), (422, "not_stable")),
    "a file that cannot be": (lambda v: mark_stable(v, {"\ud800.safetensors": 7}), (422, "not_stable")),
    "a file elsewhere": (lambda v: mark_stable(v, {"../v/a.safetensors": 7}), (403, "foreign_path")),
    "a named pickle": (lambda v: mark_stable(v, {"model.bin": 7}), (422, "not_safetensors")),
    "a pickle beside": (lambda v: (v / "training_args.bin").write_bytes(b"\x80"), (422, "not_safetensors")),
    "a pickle in capitals": (lambda v: (v / "MODEL.PT").write_bytes(b"\x80"), (422, "not_safetensors")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_folder_that_is_not_whole_is_refused(root: Path, what: str) -> None:
    change, expected = CHANGES[what]
    change(publish(root / "v", "a.safetensors"))
    assert code_of(weight_files, root, "v") == expected


def test_a_pickle_under_the_name_of_a_safetensors_file_is_refused(root: Path) -> None:
    folder = publish(root / "v", "a.safetensors")
    torch.save({"tensor": torch.zeros(3)}, folder / "a.safetensors")
    mark_stable(folder, {"a.safetensors": (folder / "a.safetensors").stat().st_size})
    assert code_of(weight_files, root, "v") == (422, "not_safetensors")


@pytest.mark.parametrize("keep", [4, -1])
def test_a_file_cut_short_and_then_marked_is_refused(root: Path, keep: int) -> None:
    folder = publish(root / "v", "a.safetensors")
    content = (folder / "a.safetensors").read_bytes()[:keep]
    (folder / "a.safetensors").write_bytes(content)
    mark_stable(folder, {"a.safetensors": len(content)})
    assert code_of(weight_files, root, "v") == (422, "not_safetensors")


def test_the_same_tensor_in_two_files_is_refused(root: Path) -> None:
    folder = publish(root / "v", "a.safetensors")
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    size = (folder / "a.safetensors").stat().st_size
    mark_stable(folder, {"a.safetensors": size, "b.safetensors": size})
    assert code_of(weight_files, root, "v") == (422, "not_safetensors")


def test_an_adapter_is_its_two_files(root: Path) -> None:
    folder = publish(root / "v", "adapter_model.safetensors")
    assert code_of(adapter_folder, root, "v") == (422, "not_stable")
    (folder / "adapter_config.json").write_text("{}")
    assert adapter_folder(root, "v") == folder.resolve()
    (folder / "adapter_model.bin").write_bytes(b"\x80")
    assert code_of(adapter_folder, root, "v") == (422, "not_safetensors")


def test_a_whole_model_is_no_adapter(root: Path) -> None:
    publish(root / "v", "model.safetensors")
    assert code_of(adapter_folder, root, "v") == (422, "not_safetensors")
