"""Steps of the game with workers on the nodes of a simulated Ray cluster, against as many local workers.

    pvg bench --profile benchmarks/cluster.toml         # in turn

The steps are those of the e2e workload. Both variants compute the same bits, so the difference is the price of Ray's
processes, and of TCP instead of local sockets and shared memory. All nodes are on this machine, so no network is
measured. Ray's processes also run, without work, while the other variant is sampled.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

from pydantic import Field

from benchmarks.simulated_nodes import simulated_nodes
from pvg.bench.profile import BenchSettings, workload_settings
from pvg.bench.workloads import Workload
from pvg.bench.workloads.e2e import EndToEnd, EndToEndSettings, check
from pvg.config.base import Count, Section
from pvg.config.cluster import LocalCluster, RayCluster
from pvg.config.experiment import Experiment


class ClusterSettings(Section):
    """The `[workload]` table. `nodes`: of the cluster; 0 for local workers. `workers`: in all. `steps`: of a sample."""

    steps: Count = 1
    workers: Count = 2
    nodes: Annotated[int, Field(ge=0, le=8)] = 0


def make(settings: BenchSettings) -> Workload:
    workload = workload_settings(ClusterSettings, settings)
    check(settings.experiment, workload.steps)
    experiment = settings.experiment.model_copy(update={"cluster": LocalCluster(workers=workload.workers)})
    return ClusterSteps(experiment, workload)


class ClusterSteps(EndToEnd):
    def __init__(self, experiment: Experiment, workload: ClusterSettings) -> None:
        super().__init__(experiment, EndToEndSettings(steps=workload.steps))
        self._cluster = workload
        self._nodes = ExitStack()

    async def open(self) -> None:
        workload = self._cluster
        if workload.nodes:
            cpus = [-(-workload.workers // workload.nodes)] * workload.nodes
            cluster = RayCluster(
                workers=workload.workers, address=self._nodes.enter_context(simulated_nodes(cpus)).address
            )
            self._experiment = self._experiment.model_copy(update={"cluster": cluster})
        await super().open()

    async def close(self) -> None:
        with self._nodes:
            await super().close()
