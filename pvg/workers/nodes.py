"""What the driver of a run asks of other machines: the same packages, and processors that round alike."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata

import pvg
from pvg.errors import MissingRequirementError
from pvg.telemetry.device import processor
from pvg.telemetry.events import Events


def versions() -> dict[str, str]:
    """What must agree on all nodes for the same bits, and Ray's authentication."""
    return {
        "pvg": pvg.__version__,
        "torch": metadata.version("torch"),
        "processor": processor(),
        "auth": os.environ.get("RAY_AUTH_MODE", ""),
    }


def ray_node() -> str:
    """Ray's id of this node."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def refuse_other_versions(name: str, found: Mapping[str, str]) -> None:
    """Raises MissingRequirementError for a node whose results would differ, or on which anyone can run code. `found`:
    its `versions`."""
    for package, own in (("pvg", pvg.__version__), ("torch", metadata.version("torch"))):
        if found[package] != own:
            raise MissingRequirementError(
                f"Node {name} has {package} {found[package]}, and this process has {own}.",
                "Install the same versions on all nodes",
            )
    if found["auth"].lower() != "token":
        raise MissingRequirementError(
            f"Node {name} does not require a token, so anyone who reaches it can run code there.",
            "Start all nodes with token authentication: RAY_AUTH_MODE=token ray start ...",
        )


def note_other_processor(name: str, found: Mapping[str, str], events: Events) -> None:
    if found["processor"] != processor():
        why = f"Node {name} has another processor than this machine, so the last bits of results may differ"
        events.event("workers", event="node differs", node=name, why=why)
