"""Chooses the number of workers for an experiment that leaves it open."""

from __future__ import annotations

import os
import sys

from pvg.config.cluster import AutoCluster, LocalCluster, NoCluster
from pvg.config.experiment import Experiment
from pvg.telemetry.device import GpuUnavailableError, open_nvml
from pvg.telemetry.waits import usable_cores

# Small models gain little from more: with 32 groups, each of 8 workers has 4.
MOST_WORKERS = 8


def with_workers(experiment: Experiment, begun: Experiment | None = None) -> Experiment:
    """`experiment` with a definite `cluster`: "auto" and an open number of workers become what fits this machine. For a
    run that has `begun`, they become what it has, because results depend on it.

    "auto" gives workers to models that pvg ships, on a CPU with at least two cores, under Linux, where they are tested.
    Larger models compute operations that use all cores, and would need their memory once per worker. OMP_NUM_THREADS
    bounds the cores, as it bounds torch's threads: a study gives each of its processes a share.
    """
    cluster = experiment.cluster
    if begun is not None and (isinstance(cluster, AutoCluster) or cluster == LocalCluster()):
        return experiment.model_copy(update={"cluster": begun.cluster})
    if isinstance(cluster, AutoCluster):
        cluster = LocalCluster() if _gains(experiment) else NoCluster()
    if isinstance(cluster, LocalCluster) and cluster.workers is None:
        cluster = LocalCluster(workers=min(_cores(), MOST_WORKERS))
    return experiment.model_copy(update={"cluster": cluster})


def _gains(experiment: Experiment) -> bool:
    models = experiment.models
    small = all(model.source.startswith("embedded:") for model in (models.prover, models.verifier))
    here = experiment.rollout.engine.kind == "torch" and experiment.verifier.engine == "torch"
    if not small or not here or _cores() < 2 or sys.platform != "linux":
        return False
    return models.device == "cpu" or (models.device == "auto" and not _has_gpu())


def _cores() -> int:
    bound = os.environ.get("OMP_NUM_THREADS", "")
    return min(usable_cores(), max(1, int(bound))) if bound.isdecimal() else usable_cores()


def _has_gpu() -> bool:
    """Whether the machine has an NVIDIA GPU. Asks the driver, because importing torch takes a second."""
    try:
        gpus = open_nvml()
    except GpuUnavailableError:
        return False
    for gpu in gpus.values():
        gpu.close()
    return bool(gpus)
