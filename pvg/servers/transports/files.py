"""Transports through a shared folder: whole models (`weights.transport = "filesystem"`) and adapters ("lora").

Each version is a folder, written once for all servers. A server reads it when told
to. A server can also receive it later, as long as the version is kept.

Whole models replace each other: a server pauses while it loads one. Adapters coexist: a server loads each once, with
the label as its model name. Each request names the version it uses (`model_of`), updates pause nothing, and requests in
flight keep their weights. The engine's own weights remain the base model's. vLLM may read an adapter's files again
after evicting it, so the files stay as long as requests may name it.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from pvg.errors import ConfigurationError, PvgError, StateError, system_module
from pvg.servers.control import ControlClient, DeliveryTiming
from pvg.servers.pool import ServerFault
from pvg.servers.publishing import PublishingSession, WeightLabel, WeightUpdate
from pvg.servers.transports import deliver
from pvg.store.atomic import (
    TEMPORARY_PREFIX,
    disk_full_explained,
    make_directory,
    new_folder,
    temporary_beside,
    write_synced,
)
from pvg.telemetry.spans import run_in

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pvg.models.language_model import LowRankAdapter


# Versions of weights as folders that servers read. A folder exists completely or not at all.


def untied(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names without additional ones of the same memory: a tied weight keeps only its first name."""
    from pvg.models.language_model import LazyWeights

    kept: dict[Any, str] = {}
    for name, one in (tensors.kept if isinstance(tensors, LazyWeights) else tensors).items():
        memory = (one.untyped_storage().data_ptr(), one.storage_offset(), one.dtype, one.shape, one.stride())
        kept.setdefault(memory if one.numel() else name, name)
    return list(kept.values())


def wire_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which `tensor` is published: `dtype` for floating point, otherwise its own."""
    return dtype if tensor.is_floating_point() else tensor.dtype


def write_tensors(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """Create `path` with `tensors`: floating-point ones cast to `dtype`, tied ones once. Syncs it; returns its bytes.
    Tensors that are on a device or of another dtype are copied to the host's memory."""
    from safetensors.torch import save_file

    cast = {}
    for name in untied(tensors):
        tensor = tensors[name]
        host = tensor.detach().to(wire_dtype(tensor, dtype)).cpu().contiguous()
        is_part = host.untyped_storage().nbytes() > host.nbytes  # safetensors refuses views of one memory
        cast[name] = host.clone() if is_part else host
    save_file(cast, path, metadata={"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


# --- folders ---------------------------------------------------------------------------------------------------------

STABLE = "STABLE"
STABLE_VERSION = 1
LOCK_PREFIX = ".session-"
LOCK_S = 10.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # a run, or a session's tail


class VersionFolders:
    """The versions of one session. Takes the session's lock on creation and releases it in `close`. All calls block.

        root/RUN/v000012-5f3c09ab/      version 12 of the session with the tail 5f3c09ab
            model.safetensors           or adapter_model.safetensors and adapter_config.json
            STABLE                      written last: the weight files and their sizes
        root/RUN/.session-5f3c09ab      locked while that session lives

    Invariants: a folder without a temporary name is complete and durable. A session removes only its own versions and
    those of dead sessions of the same run, nothing outside of root/RUN, and follows no links.
    """

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
        with new_folder(path) as folder:
            files = {name: {"bytes": size} for name, size in fill(folder).items()}
            write_synced(folder / STABLE, orjson.dumps({"version": STABLE_VERSION, "files": files}))
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
        """Remove the locks of other dead sessions of the run, and their versions, whole or in part. No server will load
        them any more. A version without a lock may be a user's copy, so it stays."""
        for lock in sorted(self.folder.glob(f"{LOCK_PREFIX}*")):
            with _session_ended(lock) as ended:
                if not ended or lock == self._lock_path:
                    continue
                tail = re.escape(lock.name.removeprefix(LOCK_PREFIX))
                theirs = re.compile(rf"({re.escape(TEMPORARY_PREFIX)})?v\d{{6,}}-{tail}(?(1)-[0-9a-f]{{8}})")
                for entry in self.folder.iterdir():
                    if theirs.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
                        shutil.rmtree(entry)
                lock.unlink(missing_ok=True)


def _take_lock(path: Path) -> int:
    """A descriptor that holds the lock. Closing it, or the end of the process, shows that the session is over."""
    while True:
        try:
            with disk_full_explained(path):
                descriptor = _open_lock(path, os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise StateError(f"The session of {path} is already open.", "Close it first.") from None
        _locked(descriptor, path)
        # Between opening and locking, another session may have considered it dead and removed it.
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def _locked(descriptor: int, path: Path) -> None:
    """Lock a new file. Another session that looks whether it is dead holds it for an instant. Raises StateError if it
    does not let go in LOCK_S."""
    fcntl, until = system_module("fcntl"), time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(descriptor)
                what = f"Another process holds the new lock {path} for {LOCK_S:g} s, so it may hang."
                raise StateError(what, f"End it (it has the file open: fuser {path}), and try again.") from None
            time.sleep(0.01)
        else:
            return


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


WEIGHTS_FILE = "model.safetensors"
KEPT = 2  # newest versions that stay: the one before the newest is for a server that is late


class _FolderTransport:
    """Owns `folders`. `executor` casts, writes and removes, so the event loop stays free."""

    def __init__(self, folders: VersionFolders, executor: Executor | None, dtype: torch.dtype) -> None:
        self._folders = folders
        self._executor = executor
        self._dtype = dtype

    async def close(self) -> None:
        """Remove all versions of this session. Servers have loaded them, a restarted server could not be told to load
        them without the trainer, and checkpoints keep what the trainer needs."""
        await run_in(self._executor, self._folders.close)


class FilesystemTransport(_FolderTransport):
    """Whole models."""

    adapters = False

    def model_of(self, label: WeightLabel) -> None:
        """None: a server has one model."""

    async def stage(self, update: WeightUpdate, label: WeightLabel) -> None:
        """Write `update.tensors` durably in the servers' dtype. The tensors may change afterwards. Raises
        MissingRequirementError if the disk is full, StateError if the label was staged before."""
        await run_in(self._executor, self._folders.write, label, partial(self._fill, update))

    def _fill(self, update: WeightUpdate, folder: Path) -> dict[str, int]:
        return {WEIGHTS_FILE: write_tensors(folder / WEIGHTS_FILE, update.tensors, self._dtype)}

    async def send(
        self, servers: Sequence[ControlClient], label: WeightLabel, trace: str
    ) -> list[DeliveryTiming | BaseException]:
        name = self._folders.name(label)

        async def load(server: ControlClient) -> DeliveryTiming:
            return await server.load_weights(name, label, trace)

        async def has_arrived(server: ControlClient) -> bool:
            return (await server.info()).label == str(label)

        return await deliver(servers, label, load, has_arrived)

    async def retire(self, servers: Sequence[ControlClient], in_use: Sequence[WeightLabel]) -> None:
        """Remove this session's versions, except the newest (KEPT) and those `in_use`."""
        await run_in(self._executor, self._folders.retire, KEPT, tuple(in_use))


# --- adapters --------------------------------------------------------------------------------------------------------

ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


class AdapterTransport(_FolderTransport):
    """Adapters. An update without one is the base model, which servers already have: nothing is written or sent."""

    adapters = True

    def __init__(self, folders: VersionFolders, executor: Executor | None, dtype: torch.dtype) -> None:
        super().__init__(folders, executor, dtype)
        self._base: set[WeightLabel] = set()
        self._staged: list[WeightLabel] = []  # adapters, oldest first

    def model_of(self, label: WeightLabel) -> str | None:
        """The label, which is the adapter's name; None for the base model."""
        return None if label in self._base else str(label)

    async def stage(self, update: WeightUpdate, label: WeightLabel) -> None:
        """Write `update.adapter` durably in the servers' dtype. The tensors may change afterwards. Raises
        the errors of FilesystemTransport.stage."""
        adapter = update.adapter
        if adapter is None:
            self._base.add(label)
            return

        def fill(folder: Path) -> dict[str, int]:
            size = write_tensors(folder / ADAPTER_FILE, adapter.tensors, self._dtype)
            write_synced(folder / CONFIG_FILE, orjson.dumps(_peft_config(adapter), option=orjson.OPT_INDENT_2))
            return {ADAPTER_FILE: size}

        await run_in(self._executor, self._folders.write, label, fill)
        self._staged.append(label)

    async def send(
        self, servers: Sequence[ControlClient], label: WeightLabel, trace: str
    ) -> list[DeliveryTiming | BaseException]:
        if label in self._base:
            return [DeliveryTiming(server.url, label, 0.0, 0.0, time.time_ns(), {}) for server in servers]
        name = self._folders.name(label)

        async def load(server: ControlClient) -> DeliveryTiming:
            return await server.load_adapter(name, label, trace)

        async def has_arrived(server: ControlClient) -> bool:
            return False  # servers do not report their adapters, and loading one twice is harmless

        return await deliver(servers, label, load, has_arrived)

    async def retire(self, servers: Sequence[ControlClient], in_use: Sequence[WeightLabel]) -> None:
        """Unload adapters that are neither among the newest (KEPT) nor `in_use`, and remove their files. A server that
        cannot be reached keeps the name of an adapter that no request uses, until it ends."""
        needed = {*in_use, *self._staged[-KEPT:]}
        unneeded = [label for label in self._staged if label not in needed]
        outcomes = await asyncio.gather(
            *(server.unload_adapter(label, f"retire-{label.version}") for label in unneeded for server in servers),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if outcome is not None and not isinstance(outcome, (ServerFault, PvgError)):
                raise outcome
        self._staged = [label for label in self._staged if label in needed]
        await run_in(self._executor, self._folders.remove, [label.version for label in unneeded])
        await run_in(self._executor, self._folders.remove_dead_sessions)


def _peft_config(adapter: LowRankAdapter) -> dict[str, Any]:
    """adapter_config.json: `adapter.config` plus the defaults that vLLM requires."""
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "base_model_name_or_path": ""}
    plain = {
        key: sorted(value) if isinstance(value, (set, frozenset)) else value for key, value in adapter.config.items()
    }
    return {**config, **plain}
