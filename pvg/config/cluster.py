"""The processes that compute: the section `[cluster]` of an experiment."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pvg.config.base import ByKind, NotEmpty, Section


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
    workers: Annotated[int, Field(ge=0, le=256)] | None = Field(
        None, description="Number of worker processes. Unset: one per core, at most 8; none with `trainer_ranks`."
    )
    trainers: Annotated[int, Field(ge=1, le=255)] | None = Field(
        None,
        description="With `rollout.prefetch`: workers that only train while the others sample and score. "
        "Unset: all do both.",
    )
    trainer_ranks: Annotated[int, Field(ge=2, le=64)] | None = Field(
        None,
        description="Processes that divide the prover's weights, gradients and moments (on GPUs: experimental). "
        "Unset: none.",
    )


class RayCluster(Section):
    """Worker processes on the nodes of a Ray cluster. Results are those of as many local workers."""

    kind: Literal["ray"] = "ray"
    workers: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None, description="As for local workers. Required with an address."
    )
    trainers: Annotated[int, Field(ge=1, le=4095)] | None = Field(None, description="As for local workers.")
    address: NotEmpty | None = Field(
        None, description="HOST:PORT of a running cluster. Unset: pvg starts one on this machine."
    )


Cluster = Annotated[AutoCluster | NoCluster | LocalCluster | RayCluster, ByKind("auto")]


def has_workers(cluster: Cluster) -> bool:
    """Whether a cluster that is not "auto" has workers."""
    if isinstance(cluster, LocalCluster):
        return bool(cluster.workers) if cluster.workers is not None else cluster.trainer_ranks is None
    return isinstance(cluster, RayCluster)


def ranks_of(cluster: Cluster) -> int | None:
    """The processes that divide the prover's training state; None: one process has it."""
    return cluster.trainer_ranks if isinstance(cluster, LocalCluster) else None
