"""Which weights a server accepts: the order of their labels, and the files in their folder.

Labels are `SESSION/VERSION` (see pvg.servers.publishing). A label after `broken:` names weights that failed to load
completely: the engine does not have them.

A folder must be complete, published, and below the configured root, with safetensors only. Its publisher writes
`STABLE` last: {"version": 1, "files": {"model.safetensors": {"bytes": 845264}}}. The functions that check a folder may
block on the disk, so call them from a thread.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open


class Refusal(Exception):
    """Becomes a reply of `status` with {"error": {"code", "message"}}."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.code = code
        self.message = message


BROKEN = "broken:"


@dataclass(frozen=True, slots=True)
class ServedLabel:
    """Version `version` of the weights of a session that began `began_ns` nanoseconds after 1970."""

    began_ns: int
    tail: str
    version: int

    @property
    def session(self) -> str:
        return f"{self.began_ns:x}-{self.tail}"

    def __str__(self) -> str:
        return f"{self.session}/{self.version}"

    @classmethod
    def parse(cls, text: str) -> ServedLabel | None:
        """The label in `text`; None for any text that is not pvg's, such as vLLM's "default"."""
        session, separator, version = text.partition("/")
        began, dash, tail = session.partition("-")
        try:
            found = cls(int(began, 16), tail, int(version))
        except ValueError:
            return None
        return found if separator and dash and found.version >= 0 and str(found) == text else None


def check_order(current: str, new: ServedLabel) -> None:
    """Raises a Refusal for weights that must not replace `current`, the engine's weight version: an older version of
    the same session, or any version of an older session. Any version of a session may replace its broken weights."""
    broken = current.startswith(BROKEN)
    there = ServedLabel.parse(current.removeprefix(BROKEN))
    if there is None:
        return
    check_session(there, new)
    if there.session == new.session and new.version < there.version and not broken:
        raise Refusal(
            409,
            "version_backwards",
            f"The server has version {there.version} of this session, but was sent {new.version}.",
        )


def check_session(there: ServedLabel, new: ServedLabel) -> None:
    """Raises a Refusal if the session of `new` began before that of `there`."""
    if there.session != new.session and new.began_ns < there.began_ns:
        raise Refusal(
            409, "older_session", f"The server has weights of session {there.session}, which began after {new.session}."
        )


# --- folders ---------------------------------------------------------------------------------------------------------

STABLE = "STABLE"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PICKLED = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})
UNREACHABLE = (OSError, RuntimeError, ValueError)  # missing; circular links; an invalid file name
MOST_STABLE_BYTES = 1 << 20


def weight_files(root: Path, name: str) -> list[Path]:
    """The safetensors files of the weights published in the folder `name` of `root`, with links resolved.

    Raises a Refusal: foreign_path, not_stable, not_safetensors.
    """
    folder = _folder(root, name)
    sizes = _published(root, folder)
    for file in sizes:
        if not file.endswith(".safetensors"):
            raise Refusal(422, "not_safetensors", f"{name} names {file}, but only *.safetensors are weights.")
    return _checked_files(root, folder, sizes)


def adapter_folder(root: Path, name: str) -> Path:
    """The folder `name` of `root` with a published adapter, links resolved. Raises the refusals of weight_files."""
    folder = _folder(root, name)
    sizes = _published(root, folder)
    for file in sizes:
        if file not in (ADAPTER_FILE, ADAPTER_CONFIG):
            raise Refusal(
                422, "not_safetensors", f"{name} names {file}: an adapter is {ADAPTER_FILE} and {ADAPTER_CONFIG}."
            )
    if ADAPTER_FILE not in sizes:
        raise Refusal(422, "not_stable", f"{name}/{STABLE} does not name {ADAPTER_FILE}.")
    _regular(root, folder, ADAPTER_CONFIG)
    _checked_files(root, folder, sizes)
    return folder


def _folder(root: Path, name: str) -> Path:
    path = PurePosixPath(name)
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts:
        raise Refusal(403, "foreign_path", f"{name!r} is not a folder below the root of the weights.")
    try:
        folder = (root / name).resolve(strict=True)
    except UNREACHABLE as error:
        raise Refusal(422, "not_stable", f"There is no folder {name!r} below the root of the weights.") from error
    _below(root, folder, name)
    if not folder.is_dir():
        raise Refusal(422, "not_stable", f"{name!r} is not a folder.")
    return folder


def _below(root: Path, path: Path, name: str) -> None:
    if root.resolve() not in path.parents:
        raise Refusal(403, "foreign_path", f"{name!r} leads outside of the root of the weights.")


def _regular(root: Path, folder: Path, file: str) -> tuple[Path, int]:
    """The file with links resolved, and its size in bytes."""
    try:
        path = (folder / file).resolve(strict=True)
        found = path.stat()
    except UNREACHABLE as error:
        raise Refusal(422, "not_stable", f"{folder.name} has no {file}.") from error
    _below(root, path, f"{folder.name}/{file}")
    if not stat.S_ISREG(found.st_mode):
        raise Refusal(422, "not_stable", f"{folder.name}/{file} is not a regular file.")
    return path, found.st_size


def _published(root: Path, folder: Path) -> Mapping[str, int]:
    """Sizes in bytes by file name, from STABLE. Refuses a folder that also contains pickled files."""
    path, size = _regular(root, folder, STABLE)
    if size > MOST_STABLE_BYTES:
        raise Refusal(422, "not_stable", f"{folder.name}/{STABLE} has {size} bytes.")
    try:
        sizes = _sizes(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise Refusal(422, "not_stable", f"{folder.name}/{STABLE} cannot be read: {error}") from error
    for file in sizes:
        if file in ("", ".", "..") or "\0" in file or PurePosixPath(file).name != file:
            raise Refusal(
                403, "foreign_path", f"{folder.name}/{STABLE} names {file!r}, which is not a file of this folder."
            )
    for file in os.listdir(folder):
        if PurePosixPath(file.lower()).suffix in PICKLED:
            raise Refusal(
                422, "not_safetensors", f"{folder.name} contains {file}: weights are safetensors, never pickled."
            )
    return sizes


def _sizes(stable: Any) -> Mapping[str, int]:
    """Raises ValueError for content that is not a valid STABLE."""
    if not isinstance(stable, dict) or stable.get("version") != 1:
        raise ValueError("it is not of version 1")
    files = stable.get("files")
    if not isinstance(files, dict) or not files:
        raise ValueError("it names no files")
    sizes = {}
    for name, facts in files.items():
        size = facts.get("bytes") if isinstance(facts, dict) else None
        if not isinstance(size, int) or isinstance(size, bool):
            raise ValueError(f"it gives no size of {name}")
        sizes[name] = size
    return sizes


def _checked_files(root: Path, folder: Path, sizes: Mapping[str, int]) -> list[Path]:
    paths: list[Path] = []
    seen: set[str] = set()
    for file, published in sorted(sizes.items()):
        path, size = _regular(root, folder, file)
        if size != published:
            raise Refusal(
                422, "not_stable", f"{folder.name}/{file} has {size} bytes, but was published with {published}."
            )
        if file.endswith(".safetensors"):
            try:
                tensors = _tensor_names(path)
            except (OSError, SafetensorError) as error:
                raise Refusal(
                    422, "not_safetensors", f"{folder.name}/{file} is not a safetensors file: {error}"
                ) from error
            if twice := seen & tensors:
                raise Refusal(422, "not_safetensors", f"{folder.name} contains {min(twice)} twice.")
            seen |= tensors
            paths.append(path)
    return paths


def _tensor_names(path: Path) -> set[str]:
    """Raises SafetensorError for a truncated file, or another format under this name."""
    with safe_open(path, framework="pt") as file:
        return set(file.keys())
