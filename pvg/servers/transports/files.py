"""`FilesystemTransport`: whole models through a shared folder (`weights.transport = "filesystem"`).

Each version is a folder (pvg.servers.transports.versions), written once for all servers. A server pauses and reads it
when told to. A server can also receive it later, as long as the version is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pvg.servers.control import ControlClient, DeliveryTiming
from pvg.servers.labels import WeightLabel
from pvg.servers.transports.transport import deliver
from pvg.servers.transports.versions import VersionFolders, write_tensors
from pvg.servers.update import WeightUpdate
from pvg.telemetry.spans import run_in

if TYPE_CHECKING:
    import torch

WEIGHTS_FILE = "model.safetensors"


class FilesystemTransport:
    """Owns `folders`. `executor` casts, writes and removes, so the event loop stays free."""

    adapters = False

    def __init__(
        self,
        folders: VersionFolders,
        executor: Executor | None,
        dtype: torch.dtype,
        keep: int,
        *,
        keep_kv: bool = False,
    ) -> None:
        self._keep_kv = keep_kv
        self._folders = folders
        self._executor = executor
        self._dtype = dtype
        self._keep = keep

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
            return await server.load_weights(name, label, trace, keep_kv=self._keep_kv)

        async def has_arrived(server: ControlClient) -> bool:
            return (await server.info()).label == str(label)

        return await deliver(servers, label, load, has_arrived)

    async def retire(self, servers: Sequence[ControlClient], in_use: Sequence[WeightLabel]) -> None:
        """Remove this session's versions, except the newest (`weights.keep`) and those `in_use`."""
        await run_in(self._executor, self._folders.retire, self._keep, tuple(in_use))

    async def close(self) -> None:
        """Remove all versions of this session. Servers have loaded them, a restarted server could not be told to load
        them without the trainer, and checkpoints keep what the trainer needs."""
        await run_in(self._executor, self._folders.close)
