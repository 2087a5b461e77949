"""`sync` on vLLM servers: weight updates among streams of tokens, through a client of their own or generation's.

    pvg bench --profile sync --server http://127.0.0.1:8000
    pvg bench --profile sync --server http://127.0.0.1:8000 -s weights.client=dedicated      # this client alone

One sample: updates to idle servers; the streams alone; the same streams while as many updates are made back to back;
the streams with one update per step, as in training; the streams alone again. A step is over when a batch of the
experiment (training.groups x rollout.group_size) has come back. Tokens are streamed: the server sends each as it comes.

An update's wall time is the time of the call that makes a server load the files in the shared folder (of several
servers, the slowest one's). rpc is the server's own time, from the first byte of the call to its reply; queue is the
rest. Writing the folder comes before that and is called `stage`.

`workload.pool` is the size of generation's pool of connections: one for each stream, as an HTTP client has it that was
sized for its streams, or some to spare. It matters only where updates share the pool (weights.client = "shared").

A percentile of few values is the luck of the largest of them. So `derived` has the percentiles over the updates of all
samples together, and says how many those are: p99 means something from 100 on.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pvg.bench.profile import BenchSettings, workload_settings
from pvg.bench.workload import BenchMetric, Workload
from pvg.bench.workloads.sync_load import (
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
from pvg.config.experiment import Experiment
from pvg.config.sections import Count, Section
from pvg.errors import ServerUnavailableError
from pvg.rollout.engine import Sampling
from pvg.telemetry.event_loop import LagWindow, LoopLagMonitor
from pvg.telemetry.spans import span

SPARE = 50  # connections that no stream needs: more than all updates and probes at once
LAG_HZ = 100.0
WITHIN = 0.25  # of a stream's time: the longest pause between two updates

TIMES = {
    "wall": "an update from the call to the reply",
    "rpc": "the server at work on it: pause, load, resume",
    "queue": "the rest: waiting for a connection, for either event loop, for the network",
}
# Of `SyncTiming.parts`, with what they are.
PARTS = {
    "arrival": "the part of queue before the server saw the call's first byte",
    "pause": "the engine brought to a halt between two steps, its caches dropped",
    "load": "the weights read and put in place",
    "resume": "the engine sent on its way",
    "stage": "the weights written to the shared folder, before the call",
}
MEASURES: dict[str, BenchMetric] = (
    time_measures(TIMES)
    | {f"{part}_p50_ms": BenchMetric("ms", "lower", f"{meaning}; loaded, median") for part, meaning in PARTS.items()}
    | RATES
    | {"stream_p50_ms": BenchMetric("ms", "lower", "one request of a stream while the updates are made: median")}
)


class ServersSyncSettings(Section):
    """The `[workload]` table: streams at once, updates per load, steps with an update each, requests of each stream
    before and after; `pool`: connections for generation (see the module)."""

    streams: Count = 150
    updates: Count = 20
    steps: Count = 4
    waves: Count = 2
    pool: Literal["streams", "spare"] = "streams"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoadedUpdates:
    """The updates of one sample that were made among the streams: in so many seconds, and how late this process' event
    loop was meanwhile."""

    streams: RequestStreams
    updates: list[TimedUpdate]
    seconds: float
    lag: LagWindow


class ServersSync:
    """See the module. The first `warmup` samples are left out of `derived`."""

    def __init__(
        self, experiment: Experiment, own: ServersSyncSettings, warmup: int, executor: Executor | None = None
    ) -> None:
        self._experiment, self._own, self._warmup, self._executor = with_pool(experiment, own), own, warmup, executor
        rollout = experiment.rollout
        self._sampling = Sampling(max_tokens=rollout.max_tokens, stop_ids=(), temperature=rollout.temperature)
        self.measures: Mapping[str, BenchMetric] = MEASURES
        self._loaded: list[LoadedUpdates] = []
        self._rates: list[dict[str, float]] = []  # RATES of the same samples

    async def open(self) -> None:
        self._target = await open_target(self._experiment, self._own.streams, self._own.seed, self._executor)
        streams = self._streams()
        await streams.run(lambda done: done < 1)  # whatever server and client do for the first time, they do now
        await streams.update()

    def _streams(self) -> RequestStreams:
        return RequestStreams(self._target, self._sampling, self._own.seed, streamed=True)

    def work(self) -> dict[str, Any]:
        own, experiment = self._own, self._experiment
        return {
            **self._target.facts,
            "task": experiment.task.kind,
            "servers": len(experiment.serving.servers),
            "streams": own.streams,
            "streamed": True,
            "updates": {"idle": own.updates, "loaded": own.updates, "stepped": own.steps},
            "rollouts_per_step": rollouts_per_step(experiment),
            "requests_before_and_after": 2 * own.waves * own.streams,
            "completion_tokens": self._sampling.max_tokens,
            "seed": own.seed,
        }

    async def sample(self, index: int) -> dict[str, float]:
        own = self._own
        streams = self._streams()
        with span("idle_updates"):
            idle = [await streams.update() for _ in range(own.updates)]
        with span("streams_before"):
            before = await streams.run(lambda done: done < own.waves)
        alone_s = statistics.median(streams.batches)
        streams.batches.clear()
        with span("loaded_updates"):
            async with LoopLagMonitor(LAG_HZ) as lag:
                loaded, during = await streams.update_under_load(own.updates, WITHIN * alone_s)
        stream_s = statistics.median(streams.batches)
        with span("stepped_updates"):
            stepped = await self._streams().update_each_step(own.steps, rollouts_per_step(self._experiment))
        with span("streams_after"):
            after = await streams.run(lambda done: done < own.waves)
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
        """Over the updates of all samples: how many, how many a second, and percentiles of their times. Then:
        connections that generation had; the fewest requests in flight at an update; the share of the versions that
        served tokens; how many tokens came at a time; the share of tokens/s that the streams lose to updates; the lag
        of this process' event loop, its 99th percentile (median over samples) and its worst."""
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
    own = workload_settings(ServersSyncSettings, settings)
    return ServersSync(settings.experiment, own, settings.profile.warmup, settings.executor)


def with_pool(experiment: Experiment, own: ServersSyncSettings) -> Experiment:
    """The experiment with as many requests at once as there are streams, and generation's pool as `own.pool` has it."""
    spare = own.pool == "spare"
    rollout = experiment.rollout.model_copy(update={"concurrency": own.streams + (SPARE if spare else 0)})
    serving = experiment.serving.model_copy(update={"connections": None if spare else own.streams})
    return experiment.model_copy(update={"rollout": rollout, "serving": serving})


def _require_known(updates: Iterable[TimedUpdate]) -> None:
    for update in updates:
        if "load_ms" not in update.timing.parts:
            raise ServerUnavailableError(
                f"The reply to version {update.timing.version} of the weights was lost, and with it what it took.",
                "Repeat the benchmark.",
            )


def _part(updates: Iterable[TimedUpdate], part: str) -> list[float]:
    return [update.timing.parts[f"{part}_ms"] for update in updates]


def _percentiles(name: str, values: Iterable[float]) -> dict[str, float]:
    found = np.percentile(list(values), PERCENTILES).tolist()
    return {f"{name}_p{percentile}_ms": value for percentile, value in zip(PERCENTILES, found, strict=True)}
