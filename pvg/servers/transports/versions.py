"""Versions of weights as folders that servers read. A folder exists completely or not at all.

    root/RUN/v000012-5f3c09ab/      version 12 of the session with the tail 5f3c09ab
        model.safetensors           or adapter_model.safetensors and adapter_config.json
        STABLE                      written last: the weight files and their sizes
    root/RUN/.session-5f3c09ab      locked while that session lives

Invariants: a folder without a temporary name is complete and durable. A session removes only its own versions and those
of dead sessions of the same run, as shown by their locks. It removes nothing outside of root/RUN and follows no links.
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
from pvg.servers.publishing import PublishingSession, WeightLabel
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


def untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without additional names of the same memory: a tied weight keeps only its first name."""
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
    """The dtype in which `tensor` is published: `dtype` for floating point, otherwise its own."""
    return dtype if tensor.is_floating_point() else tensor.dtype


def write_tensors(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """Create `path` with `tensors`: floating-point ones cast to `dtype`, tied ones once. Syncs it; returns its bytes.
    Tensors that are on a device or of another dtype are copied to the host's memory."""
    from safetensors.torch import save_file

    cast = {
        name: tensor.detach().to(wire_dtype(tensor, dtype)).cpu().contiguous()
        for name, tensor in untied(tensors).items()
    }
    save_file(cast, path, metadata={"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


# --- folders ---------------------------------------------------------------------------------------------------------


STABLE = "STABLE"
STABLE_VERSION = 1
LOCK_PREFIX = ".session-"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # a run, or a session's tail
_VERSION = re.compile(  # complete, or being written or removed
    rf"(?P<half>{re.escape(TEMPORARY_PREFIX)})?v\d{{6,}}-(?P<tail>[A-Za-z0-9][A-Za-z0-9._]*)(?(half)-[0-9a-f]{{8}})"
)


class VersionFolders:
    """The versions of one session. Takes the session's lock on creation and releases it in `close`. All calls block."""

    def __init__(self, root: Path, run: str, session: PublishingSession) -> None:
        """Raises ConfigurationError for a run name that could lead outside of `root`, or a path that is taken."""
        for name in (run, session.tail):
            if not _NAME.fullmatch(name):
                raise ConfigurationError(
                    f"{name!r} cannot name a folder of weights.",
                    "Use letters, digits, dots, dashes and underscores, starting with a letter or a digit.",
                )
        self.session = session
        self.run = run
        self.folder = Path(os.path.abspath(root)) / run
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            raise ConfigurationError(
                f"{self.folder} is a file or a link, but the weights of run {run} need this folder.",
                "Give the run another name, or set weights.root to another folder.",
            )
        make_directory(self.folder)
        self._lock_path = self.folder / f"{LOCK_PREFIX}{session.tail}"
        self._lock: int | None = _take_lock(self._lock_path)
        self._made: dict[int, str] = {}

    @property
    def made(self) -> tuple[int, ...]:
        """This session's existing versions, oldest first."""
        return tuple(sorted(self._made))

    def name(self, label: WeightLabel) -> str:
        """The version's name for servers: its path below the root. Raises KeyError if it does not exist."""
        return f"{self.run}/{self._made[label.version]}"

    def write(self, label: WeightLabel, fill: Callable[[Path], Mapping[str, int]]) -> None:
        """Create the version of `label`. `fill` writes synced files into an empty folder and returns the size of each
        weight file. Raises StateError if the version exists, MissingRequirementError if the disk is full. On any
        failure, nothing is left behind."""
        path = self.folder / f"v{label.version:06d}-{label.session.tail}"
        if label.session != self.session:
            raise ValueError(f"{label} is not a label of the session {self.session}.")
        if path.exists():
            raise StateError(f"Version {label.version} is already staged: {path}.", "Versions only go up.")
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

    def retire(self, keep: int, in_use: Iterable[WeightLabel]) -> list[int]:
        """Remove this session's versions except the newest `keep` and those `in_use`, and what dead sessions of the run
        left. Returns the removed versions."""
        needed = {label.version for label in in_use if label.session == self.session}
        unneeded = [version for version in self.made[:-keep] if version not in needed]
        self.remove(unneeded)
        self.remove_dead_sessions()
        return unneeded

    def remove(self, versions: Iterable[int]) -> None:
        for version in versions:
            path = self.folder / self._made.pop(version)
            if path.is_symlink() or not path.is_dir():
                continue  # something else removed or replaced it, so it is not ours
            # Rename first, so that a partial removal does not look like a version.
            removed = temporary_beside(path)
            path.rename(removed)
            shutil.rmtree(removed)

    def close(self) -> None:
        """Remove all versions of this session and release its lock. A second call does nothing."""
        if self._lock is None:
            return
        self.remove(self.made)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None

    def remove_dead_sessions(self) -> None:
        """Remove what other dead sessions of the run left: their versions, which no server will load any more,
        partially written or removed folders, and their locks."""
        left: dict[str, list[Path]] = {}
        for entry in sorted(self.folder.iterdir()):
            if entry.is_symlink():
                continue
            if entry.name.startswith(LOCK_PREFIX):
                left.setdefault(entry.name.removeprefix(LOCK_PREFIX), [])
            elif (found := _VERSION.fullmatch(entry.name)) and entry.is_dir() and self._is_removable(found):
                left.setdefault(found["tail"], []).append(entry)
        left.pop(self.session.tail, None)
        for tail, entries in left.items():
            path = self.folder / f"{LOCK_PREFIX}{tail}"
            with _session_ended(path) as ended:
                if ended:
                    for entry in entries:
                        shutil.rmtree(entry)
                    path.unlink(missing_ok=True)

    def _is_removable(self, found: re.Match[str]) -> bool:
        """A complete version without a lock may be a user's copy, so it stays."""
        return bool(found["half"]) or (self.folder / f"{LOCK_PREFIX}{found['tail']}").is_file()


def _take_lock(path: Path) -> int:
    """A descriptor that holds the lock. Closing it, or the end of the process, shows that the session is over."""
    fcntl = system_module("fcntl")
    while True:
        try:
            with disk_full_explained(path):
                descriptor = _open_lock(path, os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise StateError(f"The session of {path} is already open.", "Close it first.") from None
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Between opening and locking, another session may have considered it dead and removed it.
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


@contextmanager
def _session_ended(lock: Path) -> Iterator[bool]:
    """Whether no process holds `lock`; no process can take it inside this context. A session takes its lock before it
    creates its first folder. A link is not a lock and proves nothing."""
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
    # Opened for writing, because network file systems require it for an exclusive lock.
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
