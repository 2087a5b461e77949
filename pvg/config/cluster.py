"""The processes that compute: the section `[cluster]` of an experiment."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pvg.config.base import ByKind, NotEmpty, Section


class AutoCluster(Section):
    """Local workers if the models are the embedded ones on a CPU, and the machine has Linux and two cores or more;
    otherwise none."""

    kind: Literal["auto"] = "auto"


class NoCluster(Section):
    """One process computes everything."""

    kind: Literal["none"] = "none"


class LocalCluster(Section):
    """Worker processes on this machine, each with one compute thread. The last bits of results depend on the number of
    shards of the work, `workers`."""

    kind: Literal["local"] = "local"
    workers: Annotated[int, Field(ge=0, le=256)] | None = Field(
        None,
        description="Shards of the work, and processes unless `max_workers` is lower. "
        "Unset: `max_workers`, or one per core, at most 8; with `trainer_ranks`, 0.",
    )
    trainers: Annotated[int, Field(ge=1, le=255)] | None = Field(
        None,
        description="With `rollout.prefetch`: workers that only train while the others sample and score. "
        "Unset: all do both.",
    )
    min_workers: Annotated[int, Field(ge=1, le=256)] | None = Field(
        None, description="Worker processes at the start, and at least. Unset: `max_workers`, so their number is fixed."
    )
    max_workers: Annotated[int, Field(ge=1, le=256)] | None = Field(
        None, description="Worker processes at most. Results do not depend on it. Unset: `workers`."
    )
    trainer_ranks: Annotated[int, Field(ge=2, le=64)] | None = Field(
        None,
        description="Processes that divide the prover's weights, gradients and moments (on GPUs: experimental). "
        "Unset: none.",
    )


class RayCluster(Section):
    """Worker processes and trainer ranks on the nodes of a Ray cluster. Results are those of as many local ones. With
    `rollout.engine = "vllm"`, vLLM servers in place of workers, which pvg starts."""

    kind: Literal["ray"] = "ray"
    workers: Annotated[int, Field(ge=0, le=4096)] | None = Field(
        None,
        description="Shards of the work, as for local workers. Required with an address, unless `max_workers` or "
        "`trainer_ranks` is set. vLLM servers: 1.",
    )
    trainers: Annotated[int, Field(ge=1, le=4095)] | None = Field(
        None, description="Workers that only train, as for local workers. Unset: all do both."
    )
    min_workers: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None, description="Worker processes at the start, and at least. Unset: `max_workers`."
    )
    max_workers: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None, description="Worker processes at most. Unset: `workers`."
    )
    trainer_ranks: Annotated[int, Field(ge=2, le=64)] | None = Field(
        None,
        description="Processes on the nodes that divide the prover's weights, gradients and moments, as for a local "
        "cluster. Unset: none.",
    )
    address: NotEmpty | None = Field(
        None, description="HOST:PORT of a running cluster. Unset: pvg starts one on this machine."
    )
    gpus_per_worker: Annotated[int, Field(ge=0, le=64)] = Field(
        0, description="GPUs for each vLLM server; 0: CPU nodes. Above 0 it is EXPERIMENTAL: no GPU has run it."
    )


Cluster = Annotated[AutoCluster | NoCluster | LocalCluster | RayCluster, ByKind("auto")]
COUNTS = ("workers", "trainers", "min_workers", "max_workers", "trainer_ranks")


def shards_of(cluster: LocalCluster | RayCluster) -> int | None:
    """The number of shards of the work; None if the machine decides it."""
    return cluster.max_workers if cluster.workers is None else cluster.workers


def processes_of(cluster: LocalCluster | RayCluster, shards: int) -> tuple[int, int]:
    """The lowest and the highest number of worker processes. A process without a shard would have nothing to do."""
    highest = min(cluster.max_workers or shards, shards)
    return min(cluster.min_workers or highest, highest), highest


def has_workers(cluster: Cluster) -> bool:
    """Whether a cluster that is not "auto" has workers. Clusters of vLLM servers have none, whatever this returns."""
    if not isinstance(cluster, LocalCluster | RayCluster):
        return False
    return bool(cluster.workers) if cluster.workers is not None else cluster.trainer_ranks is None


def ranks_of(cluster: Cluster) -> int | None:
    """The processes that divide the prover's training state; None: one process has it."""
    return cluster.trainer_ranks if isinstance(cluster, LocalCluster | RayCluster) else None
