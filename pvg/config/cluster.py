"""The processes that compute: the section `[cluster]` of an experiment."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pvg.config.base import ByKind, Section


class AutoCluster(Section):
    """Local workers if the models are the embedded ones on a CPU, and the machine has a second core; otherwise none."""

    kind: Literal["auto"] = "auto"


class NoCluster(Section):
    """One process computes everything."""

    kind: Literal["none"] = "none"


class LocalCluster(Section):
    """Worker processes on this machine, each with one compute thread. The last bits of results depend on their
    number."""

    kind: Literal["local"] = "local"
    workers: Annotated[int, Field(ge=1, le=256)] | None = Field(
        None, description="Number of worker processes. Unset: one per core, at most 8."
    )
    trainers: Annotated[int, Field(ge=1, le=255)] | None = Field(
        None,
        description="With `rollout.prefetch`: workers that only train while the others sample and score. "
        "Unset: all do both.",
    )


Cluster = Annotated[AutoCluster | NoCluster | LocalCluster, ByKind("auto")]
