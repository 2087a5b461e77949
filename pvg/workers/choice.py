"""Chooses the workers of an experiment: where they run, their number if it is open, and who starts them."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from pvg.config.experiment import Experiment
from pvg.config.operation import (
    COUNTS,
    AutoCluster,
    Cluster,
    LocalCluster,
    NoCluster,
    RayCluster,
    has_workers,
    processes_of,
    ranks_of,
    shards_of,
)
from pvg.errors import MissingRequirementError, UsageError, counted
from pvg.installation import usable_gpus
from pvg.telemetry.waits import usable_cores

if TYPE_CHECKING:
    from pvg.workers.pool import Supply

KINDS = ("none", "local", "ray")
# Small models gain little from more: with 32 groups, each of 8 workers has 4.
MOST_WORKERS = 8


def with_workers(experiment: Experiment, resumed: Experiment | None = None) -> Experiment:
    """`experiment` with a definite `cluster`: "auto" and an open number of workers become what fits this machine.
    `resumed`: the experiment of a run that is resumed. Its cluster is kept, because results depend on it. "auto" gives
    workers to models that pvg ships, on a CPU with at least two cores, under Linux, where they are tested. Larger
    models use all cores in each operation. OMP_NUM_THREADS bounds the cores: a study gives each process a share."""
    cluster, before = experiment.cluster, None if resumed is None else resumed.cluster
    if isinstance(cluster, AutoCluster):
        cluster = before or (LocalCluster() if _gains(experiment) else NoCluster())
    if isinstance(cluster, LocalCluster | RayCluster) and cluster.workers is None:
        counts: dict[str, int | None] = {"workers": _fitting(experiment, cluster)}
        if counts["workers"] and isinstance(before, LocalCluster | RayCluster) and before.workers:
            counts = {"workers": before.workers, "trainers": before.trainers}
        cluster = cluster.model_copy(update=counts)
    return experiment.model_copy(update={"cluster": cluster})


def _fitting(experiment: Experiment, cluster: LocalCluster | RayCluster) -> int:
    """The number of workers that fits this machine; of vLLM servers, 1."""
    if ranks_of(cluster) is not None:
        return 0
    if experiment.server_cluster is not None:
        return 1
    own = isinstance(cluster, RayCluster)  # Ray reserves the trainer's GPU, which local workers share
    found = max(1, usable_gpus() - own) if experiment.models.on_gpu else _cores()
    return shards_of(cluster) or max(min(found, MOST_WORKERS), cluster.min_workers or 1)


def cluster_settings(chosen: str | None, before: Cluster) -> list[str]:
    """The option `--cluster` as settings: one of KINDS, or the address of a Ray cluster. None: no settings. The numbers
    of workers, trainers, processes and ranks stay those of `before`. Raises UsageError for any other text."""
    if chosen is None:
        return []
    if chosen not in KINDS and ":" not in chosen:
        raise UsageError(
            f"--cluster {chosen} is unknown.", "Use none, local, ray, or HOST:PORT of a Ray cluster that runs already."
        )
    settings = [f"cluster={chosen}"] if chosen in KINDS else ["cluster=ray", f"cluster.address={chosen}"]
    kept = {"none": (), "local": COUNTS}.get(chosen, (*COUNTS, "gpus_per_worker"))
    return settings + [f"cluster.{key}={count}" for key in kept if (count := getattr(before, key, None))]


def open_supply(experiment: Experiment) -> Supply | None:
    """What starts the workers of an experiment that `with_workers` has returned. It begins at once, in the background;
    the caller closes it. None without workers: vLLM servers on a cluster are those of pvg.workers.ray_servers."""
    cluster = experiment.cluster
    if not has_workers(cluster) or experiment.server_cluster is not None:
        return None
    if not isinstance(cluster, RayCluster):
        from pvg.workers.local import LocalSupply

        return LocalSupply()
    from pvg.workers.ray_supply import RaySupply

    processes = processes_of(cluster, shards_of(cluster) or _cores())[1]
    if experiment.models.on_gpu and cluster.address is None and (found := usable_gpus()) <= processes:
        raise MissingRequirementError(
            f"cluster = 'ray' needs a GPU for each of {counted(processes, 'worker')} and one for the trainer, but "
            f"this machine has {found}.",
            "Use --cluster local, whose workers share GPUs, fewer workers (-s cluster.workers=N), or "
            "-s models.device=cpu",
        )
    return RaySupply(processes, cluster.address, gpus=int(experiment.models.on_gpu))


def _gains(experiment: Experiment) -> bool:
    models = experiment.models
    here = experiment.rollout.engine.kind == "torch" and experiment.verifier.engine == "torch"
    if not models.embedded or not here or _cores() < 2 or sys.platform != "linux":
        return False
    # Workers do not sample verdicts.
    return not models.on_gpu and models.device != "mps" and not experiment.verifier.verdict_tokens


def _cores() -> int:
    bound = os.environ.get("OMP_NUM_THREADS", "")
    return min(usable_cores(), max(1, int(bound))) if bound.isdecimal() else usable_cores()
