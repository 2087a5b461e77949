"""`sync`: weight updates through the publisher, with the engine idle and while it serves many streams.

    pvg bench --profile sync
    pvg bench --profile sync --sweep rollout.max_rows=16,32,64,150
    pvg bench --profile sync --server http://127.0.0.1:8000        # a vLLM server: pvg.bench.workloads.sync_servers

One sample has five parts: updates of the idle engine; the streams alone; the same streams during as many updates back
to back, at moments spread evenly over a batch; the streams with one update per step, as in training; the streams alone
again. A step ends when a batch of the experiment (training.groups x rollout.group_size) has returned.

Back-to-back updates are the worst case and give enough samples for percentiles. `lost_back_to_back` and
`lost_once_a_step` are the shares of its tokens/s that generation loses in the two cases.

The torch engine finishes a batch before it loads weights, so an update should wait only for the rest of one batch.
`queue_explained` is the share of the queue time during which a batch was decoded. `queue_batches_max` is the longest
queue time in units of the batch that it waited for.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

from pvg.bench.profile import BenchSettings, workload_settings
from pvg.bench.workload import BenchMetric, Workload
from pvg.bench.workloads.sync_load import (
    RATES,
    TIMES,
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
from pvg.errors import ConfigurationError
from pvg.rollout.engine import Sampling
from pvg.telemetry.spans import span

MEASURES: dict[str, BenchMetric] = (
    time_measures(TIMES)
    | RATES
    | {"batch_p50_ms": BenchMetric("ms", "lower", "decoding one batch of the engine during the updates: median")}
)


class SyncSettings(Section):
    """The `[workload]` table: concurrent streams, updates per load, steps with one update each, requests of each stream
    before and after."""

    streams: Count = 150
    updates: Count = 20
    steps: Count = 8
    waves: Count = 2
    seed: int = 0


class SyncWorkload:
    def __init__(self, experiment: Experiment, settings: SyncSettings, executor: Executor | None = None) -> None:
        self._experiment = experiment
        self._executor = executor
        self._settings = settings
        self._sampling = Sampling(
            max_tokens=experiment.rollout.max_tokens, stop_ids=(), temperature=experiment.rollout.temperature
        )
        self.measures: Mapping[str, BenchMetric] = MEASURES
        self.loaded: list[tuple[RequestStreams, list[TimedUpdate]]] = []  # one per sample
        self.rates: list[dict[str, float]] = []  # RATES, one per sample

    async def open(self) -> None:
        self._target = await open_target(self._experiment, self._settings.streams, self._settings.seed, self._executor)

    def work(self) -> dict[str, Any]:
        settings = self._settings
        return {
            **self._target.facts,
            "task": self._experiment.task.kind,
            "streams": settings.streams,
            "updates": {"idle": settings.updates, "loaded": settings.updates, "stepped": settings.steps},
            "rollouts_per_step": rollouts_per_step(self._experiment),
            "requests_before_and_after": 2 * settings.waves * settings.streams,
            "completion_tokens": self._sampling.max_tokens,
            "seed": settings.seed,
        }

    async def sample(self, index: int) -> dict[str, float]:
        settings = self._settings
        streams = RequestStreams(self._target, self._sampling, settings.seed)
        with span("idle_updates"):
            idle = [await streams.update() for _ in range(settings.updates)]
        with span("streams_before"):
            before = await streams.run(lambda done: done < settings.waves)
        batch_s = statistics.median(streams.batches)
        streams.batches.clear()
        with span("loaded_updates"):
            loaded, during = await streams.update_under_load(settings.updates, batch_s)
        batches = list(streams.batches)
        self.loaded.append((streams, loaded))
        stepping = RequestStreams(self._target, self._sampling, settings.seed)
        with span("stepped_updates"):
            stepped = await stepping.update_each_step(settings.steps, rollouts_per_step(self._experiment))
        with span("streams_after"):
            after = await streams.run(lambda done: done < settings.waves)
        rates = {
            "tokens_per_s_before": before,
            "tokens_per_s_during": during,
            "tokens_per_s_stepped": stepped,
            "tokens_per_s_after": after,
        }
        self.rates.append(rates)
        return {
            **times("idle", idle),
            **times("loaded", loaded),
            **rates,
            "batch_p50_ms": statistics.median(batches) * 1e3,
        }

    def derived(self) -> dict[str, float]:
        """Over all samples: how far the running batch explains the queue time (see the module), the fewest requests in
        flight at an update, the share of the versions that served tokens, and the share of tokens/s that the streams
        lose to updates."""
        waits = [
            (
                update.timing.queue_ms / 1e3,
                streams.decoded_between(update.sent, update.sent + update.timing.queue_ms / 1e3),
            )
            for streams, updates in self.loaded
            for update in updates
        ]
        served = [len(streams.versions) / (len(updates) + 1) for streams, updates in self.loaded]
        return {
            "queue_explained": sum(within for _, ran in waits for within, _ in ran)
            / sum(wait_s for wait_s, _ in waits),
            "queue_batches_max": max((wait_s / max(s for _, s in ran) for wait_s, ran in waits if ran), default=0.0),
            "in_flight_min": float(min(update.in_flight for _, updates in self.loaded for update in updates)),
            "versions_served": statistics.median(served),
            **lost_shares(self.rates),
        }

    async def close(self) -> None:
        await self._target.close()


def make(settings: BenchSettings) -> Workload:
    """Raises ConfigurationError if the engine accepts fewer requests than there are streams."""
    if settings.experiment.rollout.engine == "vllm":
        from pvg.bench.workloads import sync_servers

        return sync_servers.make(settings)
    own, concurrency = workload_settings(SyncSettings, settings), settings.experiment.rollout.concurrency
    if concurrency < own.streams:
        raise ConfigurationError(
            f"workload.streams is {own.streams}, but rollout.concurrency is {concurrency}.",
            f"Set rollout.concurrency={own.streams}.",
        )
    return SyncWorkload(settings.experiment, own, settings.executor)
