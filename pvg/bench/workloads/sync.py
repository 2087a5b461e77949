"""`sync`: weight updates through the publisher, with the engine idle and while it serves many streams.

    pvg bench --profile sync
    pvg bench --profile sync --sweep rollout.max_rows=16,32,64,150

One sample: updates to the idle engine; the streams alone; the same streams while as many updates are made, one after
the other at moments spread evenly over a batch; the streams alone again. A stream keeps one request in flight at all
times, of fixed length (nothing stops it early).

The torch engine decodes a batch to its end before it loads weights. So an update waits for the rest of one batch, and
for nothing else: `queue_explained` is the share of the queue time in which a batch was being decoded, and
`queue_batches_max` the longest queue time in units of the batch that it waited for.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pvg.bench.profile import BenchSettings, workload_settings
from pvg.bench.workload import Measure, Workload
from pvg.bench.workloads.fixtures import digest_of, model_facts
from pvg.errors import ConfigurationError
from pvg.experiment import Count, Experiment, Section
from pvg.game.players import Players
from pvg.game.roles import prompt_renderer
from pvg.game.seeds import draw_cyclic, seed_for
from pvg.records import Int32, Role
from pvg.rollout.dispatcher import request_seed
from pvg.rollout.engine import Engine, GenerationRequest, Sampling
from pvg.tasks import open_task
from pvg.tasks.halves import problems_of_half
from pvg.telemetry.spans import span
from pvg.weights.publisher import Publisher
from pvg.weights.update import SyncTiming

if TYPE_CHECKING:
    from torch import Tensor

# Its multiples modulo 1 fill the unit interval evenly, however many are taken: the moments of a batch to update at.
GOLDEN = (5**0.5 - 1) / 2
PERCENTILES = (50, 95, 99)
TIMES = {
    "wall": "an update from the call to the return",
    "rpc": "the engine at work on it: copying the weights",
    "queue": "the rest: waiting for the engine",
}
MEASURES: dict[str, Measure] = {
    f"{load}_{name}_p{percentile}_ms": Measure("ms", "lower", f"{meaning}; {load}, percentile {percentile}")
    for load in ("idle", "loaded")
    for name, meaning in TIMES.items()
    for percentile in PERCENTILES
} | {
    "tokens_per_s_before": Measure("tokens/s", "higher", "completion tokens per second of the streams alone"),
    "tokens_per_s_during": Measure("tokens/s", "higher", "the same while the updates are made"),
    "tokens_per_s_after": Measure("tokens/s", "higher", "the same afterwards"),
    "batch_p50_ms": Measure("ms", "lower", "decoding one batch of the engine while the updates are made: median"),
}


class Settings(Section):
    """The `[workload]` table: streams at once, updates per load, requests of each stream before and after."""

    streams: Count = 150
    updates: Count = 20
    waves: Count = 2
    seed: int = 0


# --- the engine under test ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """An engine that serves, and the way to update it. `prompts`: one int32 [P] for each stream."""

    engine: Engine
    publisher: Publisher
    tensors: Mapping[str, Tensor]
    prompts: Sequence[Int32]
    facts: Mapping[str, Any]
    close: Callable[[], Awaitable[None]]


async def open_target(experiment: Experiment, settings: Settings, executor: Executor | None = None) -> Target:
    """The experiment's own engine, with the base prover's weights to publish."""
    task = open_task(experiment.task)
    players = Players(experiment, task, executor=executor)
    try:
        render = prompt_renderer(experiment.rollout.prompts, players.base.tokenizer)
        pool = problems_of_half(task, "prover")
        chosen = draw_cyclic(len(pool), 0, settings.streams, seed_for(settings.seed, "bench", "streams"))
        prompts = [render(pool[i], tuple(Role)[stream % 2]) for stream, i in enumerate(chosen)]
    except BaseException:
        await players.close()
        raise
    tensors = players.base.weights()
    facts = {
        **model_facts(players.base),
        "weights_mb": round(sum(tensor.nbytes for tensor in tensors.values()) / 1e6, 3),
        "prompts": digest_of(prompts),
    }
    return Target(players.engine, players.publisher, tensors, prompts, facts, players.close)


# --- the load ----------------------------------------------------------------------------------------------------


@dataclass
class Streams:
    """One request of each stream in flight, and what came back. `batches`: seconds of decoding -> when it was seen to
    end (time.perf_counter); all rows of a batch tell the same."""

    target: Target
    sampling: Sampling
    seed: int
    in_flight: int = 0
    tokens: int = 0
    batches: dict[float, float] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)

    async def run(self, goes_on: Callable[[int], bool]) -> float:
        """Until `goes_on(requests done by this stream)` is False for every stream; tokens per second of all."""
        started, before = time.perf_counter(), self.tokens
        try:
            async with asyncio.TaskGroup() as group:
                for stream in range(len(self.target.prompts)):
                    group.create_task(self._stream(stream, goes_on))
        except ExceptionGroup as errors:  # they share their batch, and with it what went wrong
            raise errors.exceptions[0] from None
        return (self.tokens - before) / (time.perf_counter() - started)

    async def _stream(self, stream: int, goes_on: Callable[[int], bool]) -> None:
        done = 0
        while goes_on(done):
            request = GenerationRequest(
                f"bench/{stream:05d}/{done:05d}",
                self.target.prompts[stream],
                self.sampling,
                request_seed(self.seed, stream, done),
            )
            self.in_flight += 1
            try:
                completion = await self.target.engine.generate(request)
            finally:
                self.in_flight -= 1
            self.batches.setdefault(completion.timing.service_s, time.perf_counter())
            self.tokens += len(completion.token_ids)
            self.versions.update(part.version for part in completion.spans)
            done += 1

    def decoded_between(self, start: float, end: float) -> list[tuple[float, float]]:
        """The batches that ran in that time: seconds of each within it, and its seconds in all. Their requests must
        have come back."""
        found = [(min(end, ended) - max(start, ended - seconds), seconds) for seconds, ended in self.batches.items()]
        return [(within, seconds) for within, seconds in found if within > 0]


@dataclass(frozen=True, slots=True)
class Update:
    """One update: when it was sent (time.perf_counter), the requests in flight then, and its timing."""

    sent: float
    in_flight: int
    timing: SyncTiming


class SyncWorkload:
    def __init__(self, experiment: Experiment, settings: Settings, executor: Executor | None = None) -> None:
        self._experiment = experiment
        self._executor = executor
        self._settings = settings
        self._sampling = Sampling(
            max_tokens=experiment.rollout.max_tokens, stop_ids=(), temperature=experiment.rollout.temperature
        )
        self.measures: Mapping[str, Measure] = MEASURES
        self.loaded: list[tuple[Streams, list[Update]]] = []  # of every sample

    async def open(self) -> None:
        self._target = await open_target(self._experiment, self._settings, self._executor)

    def work(self) -> dict[str, Any]:
        settings = self._settings
        return {
            **self._target.facts,
            "task": self._experiment.task.kind,
            "streams": settings.streams,
            "updates": {"idle": settings.updates, "loaded": settings.updates},
            "requests_before_and_after": 2 * settings.waves * settings.streams,
            "completion_tokens": self._sampling.max_tokens,
            "seed": settings.seed,
        }

    async def sample(self, index: int) -> dict[str, float]:
        settings = self._settings
        streams = Streams(self._target, self._sampling, settings.seed)
        with span("idle_updates"):
            idle = [await self._update(streams) for _ in range(settings.updates)]
        with span("streams_before"):
            before = await streams.run(lambda done: done < settings.waves)
        batch_s = statistics.median(streams.batches)
        streams.batches.clear()
        with span("loaded_updates"):
            loaded, during = await self._update_under_load(streams, batch_s)
        batches = list(streams.batches)
        with span("streams_after"):
            after = await streams.run(lambda done: done < settings.waves)
        self.loaded.append((streams, loaded))
        return {
            **_times("idle", idle),
            **_times("loaded", loaded),
            "tokens_per_s_before": before,
            "tokens_per_s_during": during,
            "tokens_per_s_after": after,
            "batch_p50_ms": statistics.median(batches) * 1e3,
        }

    async def _update_under_load(self, streams: Streams, batch_s: float) -> tuple[list[Update], float]:
        """All updates while the streams are kept going, and the streams' tokens per second until all have ended."""
        done = asyncio.Event()
        running = asyncio.create_task(streams.run(lambda _: not done.is_set()))
        updates = []
        try:
            for number in range(1, self._settings.updates + 1):
                await asyncio.sleep(batch_s * (number * GOLDEN % 1))
                updates.append(await self._update(streams))
        finally:
            done.set()
            tokens_per_s = await running
        return updates, tokens_per_s

    async def _update(self, streams: Streams) -> Update:
        publisher = self._target.publisher
        version, sent, in_flight = publisher.version + 1, time.perf_counter(), streams.in_flight
        (timing,) = await publisher.publish(self._target.tensors, version)
        if self._target.engine.version != version:
            raise RuntimeError(f"Version {version} was published, and the engine has {self._target.engine.version}.")
        return Update(sent, in_flight, timing)

    def derived(self) -> dict[str, float]:
        """Over all samples: how far the batch that ran explains the queue time (see the module); the fewest requests in
        flight at an update; the share of the versions that served tokens."""
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
        }

    async def close(self) -> None:
        await self._target.close()


def make(settings: BenchSettings) -> Workload:
    """Raises ConfigurationError when the engine would not take that many streams."""
    own, concurrency = workload_settings(Settings, settings), settings.experiment.rollout.concurrency
    if concurrency < own.streams:
        raise ConfigurationError(
            f"workload.streams is {own.streams}, but rollout.concurrency is {concurrency}.",
            f"Set rollout.concurrency={own.streams}.",
        )
    return SyncWorkload(settings.experiment, own, settings.executor)


def _times(load: str, updates: Sequence[Update]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in TIMES:
        values = np.percentile([getattr(update.timing, f"{name}_ms") for update in updates], PERCENTILES)
        found |= {
            f"{load}_{name}_p{percentile}_ms": value
            for percentile, value in zip(PERCENTILES, values.tolist(), strict=True)
        }
    return found
