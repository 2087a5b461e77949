"""Tensors into a safetensors file, one at a time: at no moment is there a second copy of the model in memory.

    size = write_tensors(folder / "model.safetensors", model.state_dict(), torch.bfloat16)

A tensor on a GPU is cast there and copied once; one on the CPU that has the right dtype already is written as it lies.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from pvg.errors import ConfigurationError, StateError, system_module
from pvg.servers.labels import Label, Session
from pvg.store.atomic import (
    TEMPORARY_PREFIX,
    disk_full_explained,
    make_directory,
    sync_directory,
    temporary_beside,
    write_synced,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# The format's names of torch's dtypes.
FORMAT_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called `name`, with or without "torch.". Raises ConfigurationError for one no weights can have."""
    import torch

    short = name.removeprefix("torch.")
    dtype: torch.dtype | None = getattr(torch, short, None) if short in FORMAT_NAMES else None
    if dtype is None or not dtype.is_floating_point:
        raise ConfigurationError(f"The servers' dtype is {name!r}, in which no weights can be published.")
    return dtype


def untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the further names of tensors that are one and the same memory: a tied weight keeps its first name."""
    seen: set[Any] = set()
    kept = {}
    for name, tensor in tensors.items():
        memory = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        )
        if tensor.numel() and memory in seen:
            continue
        seen.add(memory)
        kept[name] = tensor
    return kept


def wire_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """What `tensor` is published as: `dtype`, where it holds floating-point numbers; else as it is."""
    return dtype if tensor.is_floating_point() else tensor.dtype


def write_tensors(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """Create `path` with `tensors`, floating-point ones cast to `dtype`, tied ones once; fsync; return its bytes.

    Raises the OSError of a write that fails, and leaves what was written: for files inside a temporary folder.
    """
    # Wide dtypes first, so that every tensor is aligned without gaps, which the format forbids.
    chosen = sorted(untied(tensors).items(), key=lambda item: (-wire_dtype(item[1], dtype).itemsize, item[0]))
    with open(path, "xb", buffering=0) as file:
        _write(file.fileno(), _header(chosen, dtype))
        for _, tensor in chosen:
            _write(file.fileno(), _content(tensor, dtype))
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def _header(chosen: list[tuple[str, Tensor]], dtype: torch.dtype) -> bytes:
    """The length of the description in 8 bytes, then the description in JSON, filled up to a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in chosen:
        kind = wire_dtype(tensor, dtype)
        begin, end = end, end + tensor.numel() * kind.itemsize
        entries[name] = {
            "dtype": FORMAT_NAMES[str(kind).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = orjson.dumps(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _content(tensor: Tensor, dtype: torch.dtype) -> memoryview:
    import torch

    dense = tensor.detach().to(wire_dtype(tensor, dtype)).cpu().contiguous().reshape(-1)
    return dense.view(torch.uint8).numpy().data if dense.numel() else memoryview(b"")


def _write(descriptor: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


# Versions of weights as folders that servers read: there as a whole or not at all.
#
#     root/RUN/v000012-5f3c09ab/      version 12 of the session whose tail is 5f3c09ab
#         model.safetensors           or adapter_model.safetensors and adapter_config.json
#         STABLE                      written last: the weight files and their sizes
#     root/RUN/.session-5f3c09ab      locked for as long as that session lives
#
# Invariants: a folder without the name of a temporary is whole and durable. A session removes the versions that it
# made itself, and what sessions of the same run left that are dead, which their lock tells; nothing else, nothing
# outside of root/RUN, and it follows no links.

STABLE = "STABLE"
STABLE_VERSION = 1
LOCK_PREFIX = ".session-"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # of a run, and of a session's tail
_VERSION = re.compile(  # whole, or being written or removed
    rf"(?P<half>{re.escape(TEMPORARY_PREFIX)})?v\d{{6,}}-(?P<tail>[A-Za-z0-9][A-Za-z0-9._]*)(?(half)-[0-9a-f]{{8}})"
)


class VersionFolders:
    """The versions of one session. Takes the session's lock at once; `close` gives it back. All calls block."""

    def __init__(self, root: Path, run: str, session: Session) -> None:
        """Raises ConfigurationError for a run name that could lead out of `root`, or a place that is taken."""
        for name in (run, session.tail):
            if not _NAME.fullmatch(name):
                raise ConfigurationError(
                    f"{name!r} cannot name a folder of weights.",
                    "Use letters, digits, dots, dashes and underscores, and begin with a letter or a digit.",
                )
        self.session = session
        self.run = run
        self.folder = Path(os.path.abspath(root)) / run
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            raise ConfigurationError(
                f"{self.folder} is a file or a link, and weights of the run {run} would go there.",
                "Give the run another name, or set weights.root to another folder.",
            )
        make_directory(self.folder)
        self._lock_path = self.folder / f"{LOCK_PREFIX}{session.tail}"
        self._lock: int | None = _take_lock(self._lock_path)
        self._made: dict[int, str] = {}

    @property
    def made(self) -> tuple[int, ...]:
        """The versions of this session that are still there, oldest first."""
        return tuple(sorted(self._made))

    def name(self, label: Label) -> str:
        """What servers know the version by: its path below the root. KeyError for one that is not there."""
        return f"{self.run}/{self._made[label.version]}"

    def write(self, label: Label, fill: Callable[[Path], Mapping[str, int]]) -> None:
        """Make the version of `label`. `fill` writes its files into an empty folder, synced, and returns the size of
        each that holds weights. Raises StateError when the version is there, MissingRequirementError when the disk is
        full; whatever fails, nothing is left behind."""
        path = self.folder / f"v{label.version:06d}-{label.session.tail}"
        if label.session != self.session:
            raise ValueError(f"{label} is no label of the session {self.session}.")
        if path.exists():
            raise StateError(f"Version {label.version} has been staged already: {path}.", "Versions only go up.")
        temporary = temporary_beside(path)
        try:
            with disk_full_explained(path):
                temporary.mkdir()
                files = {name: {"bytes": size} for name, size in fill(temporary).items()}
                write_synced(temporary / STABLE, orjson.dumps({"version": STABLE_VERSION, "files": files}))
                sync_directory(temporary)
                os.rename(temporary, path)
                sync_directory(self.folder)
        except BaseException:
            if temporary.exists():
                shutil.rmtree(temporary)
            raise
        self._made[label.version] = path.name

    def retire(self, keep: int, in_use: Iterable[Label]) -> list[int]:
        """Remove this session's versions but for the newest `keep` and those `in_use`, and what dead sessions of the
        run left; returns the versions removed."""
        needed = {label.version for label in in_use if label.session == self.session}
        doomed = [version for version in self.made[:-keep] if version not in needed]
        self.remove(doomed)
        self.remove_what_the_dead_left()
        return doomed

    def remove(self, versions: Iterable[int]) -> None:
        """Remove versions that this session made."""
        for version in versions:
            path = self.folder / self._made.pop(version)
            if path.is_symlink() or not path.is_dir():
                continue  # somebody else removed or replaced it: what is there now is not ours
            # Renamed first: half a removal must not look like a version.
            removed = temporary_beside(path)
            path.rename(removed)
            shutil.rmtree(removed)

    def close(self) -> None:
        """Remove all versions of this session, and let go of its lock. Closing twice is harmless."""
        if self._lock is None:
            return
        self.remove(self.made)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None

    def remove_what_the_dead_left(self) -> None:
        """Of every other session of the run that is dead: its versions, which no server will be told to load any more,
        the folders it was writing or removing, and its lock."""
        left: dict[str, list[Path]] = {}
        for entry in sorted(self.folder.iterdir()):
            if entry.is_symlink():
                continue
            if entry.name.startswith(LOCK_PREFIX):
                left.setdefault(entry.name.removeprefix(LOCK_PREFIX), [])
            elif (found := _VERSION.fullmatch(entry.name)) and entry.is_dir() and self._may_go(found):
                left.setdefault(found["tail"], []).append(entry)
        left.pop(self.session.tail, None)
        for tail, entries in left.items():
            path = self.folder / f"{LOCK_PREFIX}{tail}"
            with _if_dead(path) as dead:
                if dead:
                    for entry in entries:
                        shutil.rmtree(entry)
                    path.unlink(missing_ok=True)

    def _may_go(self, found: re.Match[str]) -> bool:
        """A whole version without a lock beside it is nobody's to remove: a copy that somebody made, perhaps."""
        return bool(found["half"]) or (self.folder / f"{LOCK_PREFIX}{found['tail']}").is_file()


def _take_lock(path: Path) -> int:
    """A descriptor whose closing, or its process's death, tells that the session is over."""
    fcntl = system_module("fcntl")
    while True:
        try:
            with disk_full_explained(path):
                descriptor = _open_lock(path, os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise StateError(f"The session of {path} is open already.", "Close it first.") from None
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Between the opening and the locking another session may have thought it dead and removed it.
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


@contextmanager
def _if_dead(lock: Path) -> Iterator[bool]:
    """Whether no process holds `lock`; nobody can take it meanwhile. A session has its lock before its first folder.
    A link is nobody's lock and proves nothing."""
    if lock.is_symlink():
        yield False
        return
    try:
        descriptor = _open_lock(lock, 0)
    except FileNotFoundError:
        yield True
        return
    fcntl = system_module("fcntl")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


def _open_lock(path: Path, flags: int) -> int:
    # Opened for writing: network file systems lock nothing else exclusively.
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
