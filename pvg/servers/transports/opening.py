"""Chooses the weight transport of an experiment.

A new transport has its section in pvg.config.operation, its class in this package and a branch here. It may need more:
what servers get at their start (`servers.command.server_environment`: the folder below which they look for weights),
whether servers on other machines need the folder (`workers.ray_servers.NEEDS_FOLDER`), and rules (pvg.config.rules).
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from pvg.config.operation import DeviceTransport, LoraTransport, Weights
from pvg.errors import MissingRequirementError
from pvg.installation import install_extra
from pvg.servers.publishing import PublishingSession
from pvg.servers.transports import Transport
from pvg.servers.transports.files import AdapterTransport, FilesystemTransport, VersionFolders

if TYPE_CHECKING:
    import torch


def open_transport(
    section: Weights,
    run: str,
    executor: Executor | None,
    dtype: str,
    session: PublishingSession,
    device: torch.device | None = None,
) -> Transport:
    """The transport that `section.transport` names, for weights published by `session`. Its folders, if any, are under
    `section.root`/`run`. `executor` processes tensors (None: a thread). `dtype`: the servers', such as "bfloat16".
    `device`: where the weights are; from another one than a GPU, `nccl` copies them to the first GPU.

    Raises ConfigurationError for an invalid run name or dtype, MissingRequirementError without the GPU or the vLLM that
    `nccl` needs.
    """
    import torch

    kind = getattr(torch, dtype)
    if isinstance(section.transport, DeviceTransport):
        lacking = "CUDA" if not torch.cuda.is_available() else "" if importlib.util.find_spec("vllm") else "vLLM"
        if lacking:
            install = f", or install the extra: {install_extra('vllm')}" if lacking == "vLLM" else ""
            raise MissingRequirementError(
                f'weights.transport = "nccl" needs {lacking} on the trainer\'s machine.',
                f'Set weights.transport = "filesystem"{install}',
            )
        if device is None or device.type != "cuda":
            device = torch.device("cuda", 0)
        from pvg.servers.transports.transfer import TransferTransport

        return TransferTransport(executor, device, kind, section.timeout_s)
    folders = VersionFolders(section.root, run, session)
    if isinstance(section.transport, LoraTransport):
        return AdapterTransport(folders, executor, kind)
    return FilesystemTransport(folders, executor, kind)
