"""Chooses the weight transport of an experiment.

A new transport has its section in pvg.config.operation, its class in this package and a branch here. It may need more:
what servers get at their start (`servers.command.server_environment`: the folder below which they look for weights),
and rules (pvg.config.rules).
"""

from __future__ import annotations

from concurrent.futures import Executor

from pvg.config.operation import LoraTransport, Weights
from pvg.servers.publishing import PublishingSession
from pvg.servers.transports import Transport
from pvg.servers.transports.files import AdapterTransport, FilesystemTransport, VersionFolders


def open_transport(
    section: Weights, run: str, executor: Executor | None, dtype: str, session: PublishingSession
) -> Transport:
    """The transport that `section.transport` names, for weights published by `session`. Its folders are under
    `section.root`/`run`. `executor` processes tensors (None: a thread). `dtype`: the servers', such as "bfloat16".

    Raises ConfigurationError for an invalid run name or dtype.
    """
    import torch

    kind, folders = getattr(torch, dtype), VersionFolders(section.root, run, session)
    if isinstance(section.transport, LoraTransport):
        return AdapterTransport(folders, executor, kind)
    return FilesystemTransport(folders, executor, kind)
