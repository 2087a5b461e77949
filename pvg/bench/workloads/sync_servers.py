"""`sync` on vLLM servers: weight updates among streams of tokens, through a dedicated client or generation's client.

    pvg bench --profile sync --server http://127.0.0.1:8000
    pvg bench --profile sync --server http://127.0.0.1:8000 -s weights.client=dedicated      # this client alone

One sample has the five parts of pvg.bench.workloads.sync: updates of idle servers; the streams alone; the streams
during back-to-back updates; the streams with one update per step; the streams alone again. The servers stream each
token as it is sampled.

An update's wall time is the time of the call that makes a server load the files in the shared folder (with several
servers, the slowest one's). rpc is the server's time from the first byte of the call to its reply; queue is the rest.
`stage`, writing the folder, comes before the call.

`workload.pool` is the size of generation's connection pool: one connection per stream, as in an HTTP client sized for
its streams, or some to spare. It matters only if updates share the pool (weights.client = "shared").

A percentile of few values depends on chance. So `derived` has the percentiles over the updates of all samples together,
with their number: p99 means something from 100 on.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pvg.bench.profile import BenchSettings, workload_settings
from pvg.bench.workloads import BenchMetric, Workload
from pvg.bench.workloads.sync import (
    PERCENTILES,
    RATES,
    RequestStreams,
    TimedUpdate,
    lost_shares,
    open_target,
    rollouts_per_step,
    time_measures,
    times,
)
from pvg.config.base import Count, Section
from pvg.config.experiment import Experiment
from pvg.errors import ServerUnavailableError
from pvg.rollout.engine import Sampling
from pvg.telemetry.spans import span
from pvg.telemetry.waits import LagWindow, LoopLagMonitor

SPARE = 50  # spare connections: more than all simultaneous updates and probes
LAG_HZ = 100.0
WITHIN = 0.25  # the longest pause between two updates, as a share of a stream's time

TIMES = {
    "wall": "an update from the call to the reply",
    "rpc": "the server's work on it: pause, load, resume",
    "queue": "the rest: waiting for a connection, for either event loop, for the network",
}
# Keys of `SyncTiming.parts` and their meanings.
PARTS = {
    "arrival": "the part of queue before the server received the call's first byte",
    "pause": "stopping the engine between two steps and dropping its caches",
    "load": "reading the weights and loading them into the model",
    "resume": "restarting the engine",
    "stage": "writing the weights to the shared folder, before the call",
}
MEASURES: dict[str, BenchMetric] = (
    time_measures(TIMES)
    | {f"{part}_p50_ms": BenchMetric("ms", "lower", f"{meaning}; loaded, median") for part, meaning in PARTS.items()}
    | RATES
    | {"stream_p50_ms": BenchMetric("ms", "lower", "one request of a stream during the updates: median")}
)


class ServersSyncSettings(Section):
    """The `[workload]` table: concurrent streams, updates per load, steps with one update each, requests of each stream
    before and after. `pool`: connections for generation (see the module)."""

    streams: Count = 150
    updates: Count = 20
    steps: Count = 4
    waves: Count = 2
    pool: Literal["streams", "spare"] = "streams"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoadedUpdates:
    """The updates that one sample made among the streams, the seconds that they took together, and the lag of this
    process's event loop meanwhile."""

    streams: RequestStreams
    updates: list[TimedUpdate]
    seconds: float
    lag: LagWindow


class ServersSync:
    """See the module. The first `warmup` samples are left out of `derived`."""

    def __init__(
        self, experiment: Experiment, workload: ServersSyncSettings, warmup: int, executor: Executor | None = None
    ) -> None:
        self._experiment, self._workload, self._warmup, self._executor = (
            with_pool(experiment, workload),
            workload,
            warmup,
            executor,
        )
        rollout = experiment.rollout
        self._sampling = Sampling(max_tokens=rollout.max_tokens, stop_ids=(), temperature=rollout.temperature)
        self.measures: Mapping[str, BenchMetric] = MEASURES
        self._loaded: list[LoadedUpdates] = []
        self._rates: list[dict[str, float]] = []  # RATES, one per sample

    async def open(self) -> None:
        self._target = await open_target(self._experiment, self._workload.streams, self._workload.seed, self._executor)
        streams = self._streams()
        await streams.run(lambda done: done < 1)  # first-time work of server and client happens here
        await streams.update()

    def _streams(self) -> RequestStreams:
        return RequestStreams(self._target, self._sampling, self._workload.seed, streamed=True)

    def work(self) -> dict[str, Any]:
        workload, experiment = self._workload, self._experiment
        return {
            **self._target.facts,
            "task": experiment.task.kind,
            "servers": len(experiment.serving.servers),
            "streams": workload.streams,
            "streamed": True,
            "updates": {"idle": workload.updates, "loaded": workload.updates, "stepped": workload.steps},
            "rollouts_per_step": rollouts_per_step(experiment),
            "requests_before_and_after": 2 * workload.waves * workload.streams,
            "completion_tokens": self._sampling.max_tokens,
            "seed": workload.seed,
        }

    async def sample(self, index: int) -> dict[str, float]:
        workload = self._workload
        streams = self._streams()
        with span("idle_updates"):
            idle = [await streams.update() for _ in range(workload.updates)]
        with span("streams_before"):
            before = await streams.run(lambda done: done < workload.waves)
        alone_s = statistics.median(streams.batches)
        streams.batches.clear()
        with span("loaded_updates"):
            async with LoopLagMonitor(LAG_HZ) as lag:
                loaded, during = await streams.update_under_load(workload.updates, WITHIN * alone_s)
        stream_s = statistics.median(streams.batches)
        with span("stepped_updates"):
            stepped = await self._streams().update_each_step(workload.steps, rollouts_per_step(self._experiment))
        with span("streams_after"):
            after = await streams.run(lambda done: done < workload.waves)
        _require_known(loaded)
        window = lag.take()
        rates = {
            "tokens_per_s_before": before,
            "tokens_per_s_during": during,
            "tokens_per_s_stepped": stepped,
            "tokens_per_s_after": after,
        }
        if index >= self._warmup and window is not None:
            ended = loaded[-1].sent + loaded[-1].timing.wall_ms / 1e3
            self._loaded.append(LoadedUpdates(streams, loaded, ended - loaded[0].sent, window))
            self._rates.append(rates)
        return {
            **times("idle", idle),
            **times("loaded", loaded),
            **{f"{part}_p50_ms": statistics.median(_part(loaded, part)) for part in PARTS},
            **rates,
            "stream_p50_ms": stream_s * 1e3,
        }

    def derived(self) -> dict[str, float]:
        """Over the updates of all samples: their number, their rate, and percentiles of their times. Also the
        connections of generation, the fewest requests in flight at an update, the share of the versions that served
        tokens, the tokens per chunk, the share of tokens/s that the streams lose to updates, and the lag of this
        process's event loop (99th percentile as the median over samples, and maximum)."""
        samples = self._loaded
        updates = [update for sample in samples for update in sample.updates]
        found = {
            "updates": float(len(updates)),
            "updates_per_s": len(updates) / sum(sample.seconds for sample in samples),
        }
        for name in TIMES:
            found |= _percentiles(name, (getattr(update.timing, f"{name}_ms") for update in updates))
        for part in PARTS:
            found |= _percentiles(part, _part(updates, part))
        served = [len(sample.streams.versions) / (len(sample.updates) + 1) for sample in samples]
        tokens, chunks = (sum(getattr(sample.streams, each) for sample in samples) for each in ("tokens", "chunks"))
        return found | {
            "connections": float(self._target.engine.max_in_flight),
            "in_flight_min": float(min(update.in_flight for update in updates)),
            "versions_served": statistics.median(served),
            "tokens_per_chunk": tokens / chunks,
            **lost_shares(self._rates),
            "loop_lag_p99_ms": statistics.median(sample.lag.p99_s for sample in samples) * 1e3,
            "loop_lag_max_ms": max(sample.lag.max_s for sample in samples) * 1e3,
        }

    async def close(self) -> None:
        await self._target.close()


def make(settings: BenchSettings) -> Workload:
    workload = workload_settings(ServersSyncSettings, settings)
    return ServersSync(settings.experiment, workload, settings.profile.warmup, settings.executor)


def with_pool(experiment: Experiment, workload: ServersSyncSettings) -> Experiment:
    """The experiment with one request in flight per stream, and with generation's pool sized by `workload.pool`."""
    spare = workload.pool == "spare"
    rollout = experiment.rollout.model_copy(update={"concurrency": workload.streams + (SPARE if spare else 0)})
    serving = experiment.serving.model_copy(update={"connections": None if spare else workload.streams})
    return experiment.model_copy(update={"rollout": rollout, "serving": serving})


def _require_known(updates: Iterable[TimedUpdate]) -> None:
    for update in updates:
        if "load_ms" not in update.timing.parts:
            raise ServerUnavailableError(
                f"The reply to version {update.timing.version} of the weights was lost, so its timing is missing.",
                "Repeat the benchmark.",
            )


def _part(updates: Iterable[TimedUpdate], part: str) -> list[float]:
    return [update.timing.parts[f"{part}_ms"] for update in updates]


def _percentiles(name: str, values: Iterable[float]) -> dict[str, float]:
    found = np.percentile(list(values), PERCENTILES).tolist()
    return {f"{name}_p{percentile}_ms": value for percentile, value in zip(PERCENTILES, found, strict=True)}
