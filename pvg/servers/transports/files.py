"""Transports through a shared folder: whole models (`weights.transport = "filesystem"`) and adapters ("lora").

Each version is a folder (pvg.servers.transports.versions), written once for all servers. A server reads it when told
to. A server can also receive it later, as long as the version is kept.

Whole models replace each other: a server pauses while it loads one. Adapters coexist: a server loads each once, with
the label as its model name. Each request names the version it uses (`model_of`), updates pause nothing, and requests in
flight keep their weights. The engine's own weights remain the base model's. vLLM may read an adapter's files again
after evicting it, so the files stay as long as requests may name it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from pvg.errors import ConfigurationError, PvgError
from pvg.models.low_rank import LowRankAdapter
from pvg.servers.control import ControlClient, DeliveryTiming
from pvg.servers.pool import ServerFault
from pvg.servers.publishing import WeightLabel, WeightUpdate
from pvg.servers.transports.transport import deliver
from pvg.servers.transports.versions import VersionFolders, write_tensors
from pvg.store.atomic import write_synced
from pvg.telemetry.spans import run_in

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WEIGHTS_FILE = "model.safetensors"
KEPT = 2  # newest versions that stay: the one before the newest is for a server that is late


class FilesystemTransport:
    """Owns `folders`. `executor` casts, writes and removes, so the event loop stays free."""

    adapters = False

    def __init__(self, folders: VersionFolders, executor: Executor | None, dtype: torch.dtype) -> None:
        self._folders = folders
        self._executor = executor
        self._dtype = dtype

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

    async def close(self) -> None:
        """Remove all versions of this session. Servers have loaded them, a restarted server could not be told to load
        them without the trainer, and checkpoints keep what the trainer needs."""
        await run_in(self._executor, self._folders.close)


# --- adapters --------------------------------------------------------------------------------------------------------

ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"

# Required by vLLM's reader (vllm/lora/peft_helper.py).
NEEDED = ("r", "lora_alpha", "target_modules")


class AdapterTransport:
    """Owns `folders`. `executor` writes and removes files, so the event loop stays free.

    An update without an adapter is the base model, which servers already have: nothing is written or sent. The first
    such update defines the base. Different whole weights cannot be sent as an adapter.
    """

    adapters = True

    def __init__(self, folders: VersionFolders, executor: Executor | None, dtype: torch.dtype) -> None:
        self._folders = folders
        self._executor = executor
        self._dtype = dtype
        self._base: set[WeightLabel] = set()
        self._base_fingerprint = ""
        self._holders: dict[WeightLabel, dict[str, ControlClient]] = {}  # servers, by url, that may have each adapter

    def model_of(self, label: WeightLabel) -> str | None:
        """The label, which is the adapter's name; None for the base model."""
        return None if label in self._base else str(label)

    async def stage(self, update: WeightUpdate, label: WeightLabel) -> None:
        """Write `update.adapter` durably in the servers' dtype. The tensors may change afterwards. Raises
        ConfigurationError for trained weights without an adapter, and the errors of FilesystemTransport.stage."""
        adapter = update.adapter
        if adapter is None:
            await self._stage_base(update, label)
            return

        def fill(folder: Path) -> dict[str, int]:
            size = write_tensors(folder / ADAPTER_FILE, adapter.tensors, self._dtype)
            write_synced(folder / CONFIG_FILE, orjson.dumps(_peft_config(adapter), option=orjson.OPT_INDENT_2))
            return {ADAPTER_FILE: size}

        await run_in(self._executor, self._folders.write, label, fill)
        self._holders[label] = {}

    async def _stage_base(self, update: WeightUpdate, label: WeightLabel) -> None:
        found = await run_in(self._executor, fingerprint, update.tensors)
        if self._base_fingerprint not in ("", found):
            raise ConfigurationError(
                f'Version {update.version} of the weights has no adapter, which weights.transport = "lora" requires.',
                'Set training.adapters = "lora", or weights.transport = "filesystem".',
            )
        self._base_fingerprint = found
        self._base.add(label)

    async def send(
        self, servers: Sequence[ControlClient], label: WeightLabel, trace: str
    ) -> list[DeliveryTiming | BaseException]:
        if label in self._base:
            return [DeliveryTiming(server.url, label, 0.0, 0.0, time.time_ns(), {}) for server in servers]
        name, holders = self._folders.name(label), self._holders[label]

        async def load(server: ControlClient) -> DeliveryTiming:
            holders[server.url] = server  # it may have the adapter from now on, even if no reply arrives
            return await server.load_adapter(name, label, trace)

        async def has_arrived(server: ControlClient) -> bool:
            return False  # servers do not report their adapters, and loading one twice is harmless

        return await deliver(servers, label, load, has_arrived)

    async def retire(self, servers: Sequence[ControlClient], in_use: Sequence[WeightLabel]) -> None:
        """Unload adapters that are neither among the newest (KEPT) nor `in_use`, and remove their files. If a server
        cannot be reached, the next call unloads its adapter, and the files stay until then."""
        needed = {*in_use, *sorted(self._holders, key=lambda label: label.version)[-KEPT:]}
        unneeded = [label for label in self._holders if label not in needed]
        within_reach = {server.url: server for server in servers}
        await asyncio.gather(*(self._unload(label, within_reach) for label in unneeded))
        unloaded = [label for label in unneeded if not self._holders[label]]
        for label in unloaded:
            del self._holders[label]
        await run_in(self._executor, self._folders.remove, [label.version for label in unloaded])
        await run_in(self._executor, self._folders.remove_dead_sessions)

    async def _unload(self, label: WeightLabel, within_reach: Mapping[str, ControlClient]) -> None:
        holders = self._holders[label]
        reachable_holders = [server for url, server in within_reach.items() if url in holders]
        outcomes = await asyncio.gather(
            *(server.unload_adapter(label, f"retire-{label.version}") for server in reachable_holders),
            return_exceptions=True,
        )
        for server, outcome in zip(reachable_holders, outcomes, strict=True):
            if outcome is None:
                del holders[server.url]
            elif not isinstance(outcome, (ServerFault, PvgError)):
                raise outcome

    async def close(self) -> None:
        """Remove the files of this session. Servers evict its adapters when they need space, or end."""
        await run_in(self._executor, self._folders.close)


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A digest of names, shapes, dtypes and bit sums: an optimizer step changes it, a copy does not. Reads each tensor
    once."""
    import torch

    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        bits = int(tensor.view(as_integers[tensor.element_size()]).sum(dtype=torch.int64)) if tensor.numel() else 0
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {bits};".encode())
    return digest.hexdigest()


def _peft_config(adapter: LowRankAdapter) -> dict[str, Any]:
    """adapter_config.json: `adapter.config` plus the defaults that vLLM requires."""
    if missing := [key for key in NEEDED if key not in adapter.config]:
        raise ValueError(f"The adapter's config lacks {missing[0]}.")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "base_model_name_or_path": ""}
    plain = {
        key: sorted(value) if isinstance(value, (set, frozenset)) else value for key, value in adapter.config.items()
    }
    return {**config, **plain}
