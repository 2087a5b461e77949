"""Checkpoints: a folder with `tensors.safetensors`, `meta.json`, and files that meta.json lists, written atomically.

Invariants: nothing is unpickled, so a folder with any other file is refused. Every bit is read back as it was written,
for every dtype of safetensors. A damaged checkpoint is never loaded.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from pvg.errors import StateError
from pvg.store.atomic import (
    check_file,
    damaged,
    expected_file,
    make_directory,
    new_folder,
    read_stored,
    remove_temporaries,
    remove_tree,
    sync_directory,
    temporary_beside,
    write_synced,
)

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "pvg.checkpoint.1"
TENSORS_FILE = "tensors.safetensors"
META_FILE = "meta.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def write_checkpoint(
    directory: Path,
    name: str,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    before: Callable[[], None] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Store `tensors` (any shapes, devices and dtypes) and `meta` (plain JSON data) as `directory/name`, durably.

    Returns the folder. It becomes part of the run when a commit names it. `before` is called just before it gets its
    name; if it raises, no files remain. `files`: more files of the folder, by name, such as a model's config.json.
    Tensors that share memory are stored separately. Raises StateError if the checkpoint exists, MissingRequirementError
    if the disk is full (no files remain), ValueError if `meta` is not plain JSON data.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot be the name of a checkpoint.")
    path = directory / name
    if path.exists():
        raise StateError(
            f"The checkpoint {path} already exists, and checkpoints never change.", "Recover the run first."
        )
    if orjson.loads(orjson.dumps(meta)) != meta:
        raise ValueError("The meta of a checkpoint must be plain JSON data, which reads back unchanged.")
    make_directory(directory)
    with new_folder(path, before) as folder:
        size, digest = _write_tensors(folder / TENSORS_FILE, tensors)
        body: dict[str, Any] = {"format": FORMAT, "tensors": {"bytes": size, "sha256": digest}, "meta": meta}
        if files:
            body["files"] = {file: hashlib.sha256(data).hexdigest() for file, data in files.items()}
            for file, data in files.items():
                write_synced(folder / file, data)
        write_synced(folder / META_FILE, orjson.dumps({**body, "checksum": _checksum(body)}))
    return path


def read_checkpoint(directory: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The (tensors, meta) of `directory/name`, on the CPU. Raises DamagedFileError; see verify_checkpoint."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    meta = verify_checkpoint(directory, name)
    path = directory / name / TENSORS_FILE
    try:
        return load_file(path), meta
    except SafetensorError as error:
        raise damaged(path, str(error)) from None


def verify_checkpoint(directory: Path, name: str) -> dict[str, Any]:
    """Check the files of `directory/name` against their checksums without loading torch; returns the meta.

    Raises DamagedFileError with the file that is missing, truncated, changed, or not part of a checkpoint.
    """
    folder = directory / name
    if not folder.is_dir():
        raise damaged(folder, "the folder is missing")
    body = _read_meta(folder / META_FILE)
    listed: dict[str, str] = body.get("files", {})
    for entry in sorted(folder.iterdir()):
        if entry.name not in (TENSORS_FILE, META_FILE, *listed):
            only = " and ".join([TENSORS_FILE, META_FILE]) if not listed else f"what {META_FILE} lists"
            raise damaged(entry, f"a checkpoint has only {only}; pvg unpickles nothing")
    for file, sha256 in listed.items():
        check_file(folder / file, None, sha256)
    check_file(folder / TENSORS_FILE, body["tensors"]["bytes"], body["tensors"]["sha256"])
    meta: dict[str, Any] = body["meta"]
    return meta


def read_checkpoint_meta(directory: Path, name: str) -> tuple[str, dict[str, Any]]:
    """The sha256 of the tensors of `directory/name` in hex, and its meta. Does not read the tensors. Raises
    DamagedFileError."""
    body = _read_meta(directory / name / META_FILE)
    return body["tensors"]["sha256"], body["meta"]


def check_size(directory: Path, name: str) -> None:
    """Check that the tensors of `directory/name` have the size that its meta.json says, without reading them. Raises
    DamagedFileError."""
    folder = directory / name
    check_file(folder / TENSORS_FILE, _read_meta(folder / META_FILE)["tensors"]["bytes"])


def prune(directory: Path, keep: set[str]) -> list[Path]:
    """Remove checkpoints that are not in `keep`, and temporary files of dead writers; returns their paths.

    `keep`: the names in every commit that may still be resumed (FileStateStore.commits), not only in the newest.
    """
    if not directory.is_dir():
        return []
    removed = remove_temporaries(directory)
    for path in sorted(directory.iterdir()):
        if path.is_dir() and NAME.fullmatch(path.name) and path.name not in keep:
            # Rename first, so that a half-removed folder does not look like a checkpoint.
            trash = temporary_beside(path)
            try:
                path.rename(trash)
            except FileNotFoundError:  # a driver on another host, which has lost the run, has just removed it
                continue
            remove_tree(trash)
            removed.append(path)
    if removed:
        sync_directory(directory)
    return removed


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    from safetensors.torch import save_file

    save_file(_separate(tensors), path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, without shared memory, as safetensors requires."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        address = dense.untyped_storage().data_ptr()
        separate[name] = dense.clone() if address in seen else dense
        seen.add(address)
    return separate


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        with expected_file(path):
            body = orjson.loads(read_stored(path))
    except orjson.JSONDecodeError as error:
        raise damaged(path, f"not valid JSON ({error})") from None
    if not isinstance(body, dict) or body.pop("checksum", None) != _checksum(body):
        raise damaged(path, "it does not match its checksum")
    if body["format"] != FORMAT:
        raise StateError(
            f"{path} has format {body['format']}, but this pvg reads {FORMAT}.", "Read it with the pvg that wrote it."
        )
    return body


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()
