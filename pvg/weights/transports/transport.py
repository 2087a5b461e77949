"""The `Transport` protocol: how the weights of an update get into vLLM servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pvg.serving.control import ControlClient, Delivery
from pvg.serving.labels import Label
from pvg.weights.update import WeightUpdate


class Transport(Protocol):
    """Brings one update at a time to servers. What `send` needs from the tensors it has taken when `stage` returns."""

    @property
    def adapters(self) -> bool:
        """Whether versions are adapters that live side by side: requests name theirs, and nothing is paused."""
        ...

    async def stage(self, update: WeightUpdate, label: Label) -> None:
        """Make the update ready, once for all servers. Each label once. Raises MissingRequirementError when the disk is
        full, ConfigurationError for weights that cannot travel this way; nothing is left behind then."""
        ...

    async def send(self, servers: Sequence[ControlClient], label: Label, trace: str) -> list[Delivery | BaseException]:
        """Deliver what was staged last, under `label`, to all `servers` at once; one outcome per server, in their
        order: a Delivery, or the ServerFault or PvgError that prevented it. Anything else is raised. May be called
        again for servers that were away, and for such as have it already."""
        ...

    async def retire(self, servers: Sequence[ControlClient], in_use: Sequence[Label]) -> None:
        """Let go of versions that are neither `in_use` nor among the newest that are to be kept. `servers` are those
        that can be told."""
        ...

    async def close(self) -> None:
        """Let go of everything that was staged. Servers keep what they have loaded."""
        ...
