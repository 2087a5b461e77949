"""How each weight transport (setting `weights.transport`) is opened."""

from __future__ import annotations

import importlib.util
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from pvg.config.servers import DeviceTransport, LoraTransport, Weights
from pvg.errors import MissingRequirementError
from pvg.installation import install_extra
from pvg.servers.publishing import PublishingSession
from pvg.servers.transports.transport import Transport

if TYPE_CHECKING:
    import torch

__all__ = ["Transport", "open_transport"]


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
    if isinstance(section.transport, DeviceTransport):
        return _open_transfer(section, executor, dtype, device)
    import torch

    from pvg.servers.transports.files import AdapterTransport, FilesystemTransport
    from pvg.servers.transports.versions import VersionFolders

    kind = getattr(torch, dtype)
    folders = VersionFolders(section.root, run, session)
    if isinstance(section.transport, LoraTransport):
        return AdapterTransport(folders, executor, kind)
    return FilesystemTransport(folders, executor, kind)


def _open_transfer(section: Weights, executor: Executor | None, dtype: str, device: torch.device | None) -> Transport:
    import torch

    from pvg.servers.transports.gpu import NcclBackend
    from pvg.servers.transports.transfer import TransferTransport

    lacking = "CUDA" if not torch.cuda.is_available() else "" if importlib.util.find_spec("vllm") else "vLLM"
    install = f", or install the extra: {install_extra('vllm')}" if lacking == "vLLM" else ""
    if lacking:
        raise MissingRequirementError(
            f'weights.transport = "nccl" needs {lacking} on the trainer\'s machine.',
            f'Set weights.transport = "filesystem"{install}',
        )
    if device is None or device.type != "cuda":
        device = torch.device("cuda", 0)
    return TransferTransport(NcclBackend(), executor, device, getattr(torch, dtype), section.timeout_s)
