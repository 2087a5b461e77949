"""`sync`: weight updates through the publisher, with the engine idle and while it serves many streams.

    pvg bench --profile sync
    pvg bench --profile sync --sweep rollout.engine.max_rows=16,32,64,150
    pvg bench --profile sync --server http://127.0.0.1:8000        # a vLLM server: pvg.bench.workloads.sync_servers

One sample has five parts: updates of the idle engine; the streams alone; the same streams during as many updates back
to back, at moments spread evenly over a batch; the streams with one update per step, as in training; the streams alone
again. A step ends when a batch of the experiment (training.groups x rollout.group_size) has returned.

Back-to-back updates are the worst case and give enough samples for percentiles. `lost_back_to_back` and
`lost_once_a_step` are the shares of its tokens/s that generation loses in the two cases.

The torch engine finishes a batch before it loads weights, so an update should wait only for the rest of one batch.
`queue_explained` is the share of the queue time during which a batch was decoded. `queue_batches_max` is the longest
queue time in units of the batch that it waited for.

A stream has exactly one request in flight at all times, of fixed length (no stop token ends it early).
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
from pvg.bench.workloads import BenchMetric, Workload
from pvg.bench.workloads.fixtures import digest_of, model_facts
from pvg.config.base import Count, Section
from pvg.config.experiment import Experiment
from pvg.errors import ConfigurationError
from pvg.game.players import Players
from pvg.game.roles import prompt_renderer
from pvg.records import Int32, Role
from pvg.rollout.dispatcher import request_seed
from pvg.rollout.engine import Engine, GenerationRequest, Sampling
from pvg.seeds import draw_cyclic, seed_for
from pvg.servers.publishing import Publisher, SyncTiming
from pvg.tasks import open_task
from pvg.tasks.task import problems_of_half
from pvg.telemetry.spans import span

if TYPE_CHECKING:
    from torch import Tensor

# --- the load: streams, and updates among them ------------------------------------------------------------------------

# Its multiples modulo 1 fill the unit interval evenly: they choose the moments of a batch to update at.
GOLDEN = (5**0.5 - 1) / 2
PERCENTILES = (50, 95, 99)
STEP_LOOK_S = 0.005  # between two checks whether a step's rollouts have arrived
TIMES = {
    "wall": "an update from the call to the return",
    "rpc": "the engine's work on it: copying the weights",
    "queue": "the rest: waiting for the engine",
}
RATES: dict[str, BenchMetric] = {
    "tokens_per_s_before": BenchMetric("tokens/s", "higher", "completion tokens per second of the streams alone"),
    "tokens_per_s_during": BenchMetric("tokens/s", "higher", "the same during back-to-back updates"),
    "tokens_per_s_stepped": BenchMetric("tokens/s", "higher", "the same with one update per step, as in training"),
    "tokens_per_s_after": BenchMetric("tokens/s", "higher", "the same of the streams alone afterwards"),
}


def time_measures(meanings: Mapping[str, str]) -> dict[str, BenchMetric]:
    """Measures for each percentile of the times in `meanings`, of idle and of loaded updates."""
    return {
        f"{load}_{name}_p{percentile}_ms": BenchMetric("ms", "lower", f"{meaning}; {load}, percentile {percentile}")
        for load in ("idle", "loaded")
        for name, meaning in meanings.items()
        for percentile in PERCENTILES
    }


@dataclass(frozen=True)
class SyncTarget:
    """An engine and the publisher that updates it. `prompts`: one int32 [P] per stream."""

    engine: Engine
    publisher: Publisher
    tensors: Mapping[str, Tensor]
    prompts: Sequence[Int32]
    facts: Mapping[str, Any]
    close: Callable[[], Awaitable[None]]


async def open_target(experiment: Experiment, streams: int, seed: int, executor: Executor | None = None) -> SyncTarget:
    """The experiment's engine, with the base prover's weights to publish."""
    task = open_task(experiment.task)
    players = Players(experiment, task, executor=executor)
    try:
        await players.ready(scoring=False)
        render = prompt_renderer(experiment.prompts, players.base.tokenizer)
        pool = problems_of_half(task, "prover")
        chosen = draw_cyclic(len(pool), 0, streams, seed_for(seed, "bench", "streams"))
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
    return SyncTarget(players.engine, players.publisher, tensors, prompts, facts, players.close)


@dataclass(frozen=True, slots=True)
class TimedUpdate:
    """One update: when it was sent (time.perf_counter), the requests in flight at that time, and its timing."""

    sent: float
    in_flight: int
    timing: SyncTiming


@dataclass
class RequestStreams:
    """Keeps one request of each stream in flight and counts the results. `batches`: seconds in the engine -> when the
    batch ended (time.perf_counter); requests that were decoded together report the same seconds. `streamed`: request
    tokens as they are sampled. `chunks`: how many pieces arrived."""

    target: SyncTarget
    sampling: Sampling
    seed: int
    streamed: bool = False
    in_flight: int = 0
    tokens: int = 0
    chunks: int = 0
    requests: int = 0  # finished requests
    batches: dict[float, float] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)

    async def run(self, keep_going: Callable[[int], bool]) -> float:
        """Run until `keep_going(requests done by this stream)` is False for every stream; returns tokens/s of all."""
        started, before = time.perf_counter(), self.tokens
        try:
            async with asyncio.TaskGroup() as group:
                for stream in range(len(self.target.prompts)):
                    group.create_task(self._stream(stream, keep_going))
        except ExceptionGroup as errors:  # the streams share their engine, so they have the same error
            raise errors.exceptions[0] from None
        return (self.tokens - before) / (time.perf_counter() - started)

    async def _stream(self, stream: int, keep_going: Callable[[int], bool]) -> None:
        done = 0
        while keep_going(done):
            request = GenerationRequest(
                f"bench/{stream:05d}/{done:05d}",
                self.target.prompts[stream],
                self.sampling,
                request_seed(self.seed, stream, done),
                self._on_tokens if self.streamed else None,
            )
            self.in_flight += 1
            try:
                completion = await self.target.engine.generate(request)
            finally:
                self.in_flight -= 1
            self.batches.setdefault(completion.timing.service_s, time.perf_counter())
            self.tokens += len(completion.token_ids)
            self.requests += 1
            self.versions.update(part.version for part in completion.spans)
            done += 1

    def _on_tokens(self, tokens: int) -> None:
        self.chunks += 1

    def decoded_between(self, start: float, end: float) -> list[tuple[float, float]]:
        """The batches that ran between the two times: seconds of each within the interval, and its total seconds. Their
        requests must have returned."""
        found = [(min(end, ended) - max(start, ended - seconds), seconds) for seconds, ended in self.batches.items()]
        return [(within, seconds) for within, seconds in found if within > 0]

    # --- updates -----------------------------------------------------------------------------------------------------

    async def update(self) -> TimedUpdate:
        """Publish the same weights as the next version. Raises RuntimeError if they do not arrive."""
        publisher = self.target.publisher
        version, sent, in_flight = publisher.version + 1, time.perf_counter(), self.in_flight
        (timing,) = await publisher.publish(self.target.tensors, version)
        if self.target.engine.version != version:
            raise RuntimeError(f"Version {version} was published, but the engine has {self.target.engine.version}.")
        return TimedUpdate(sent, in_flight, timing)

    async def update_under_load(self, updates: int, within_s: float) -> tuple[list[TimedUpdate], float]:
        """Make `updates` updates while the streams run, each after a pause of up to `within_s`. Returns them, and the
        streams' tokens per second until all have ended."""
        done = asyncio.Event()
        running = asyncio.create_task(self.run(lambda _: not done.is_set()))
        made = []
        try:
            for number in range(1, updates + 1):
                await asyncio.wait([running], timeout=within_s * (number * GOLDEN % 1))
                if running.done():  # a stream failed, so there is nothing to measure
                    break
                made.append(await self.update())
        finally:
            done.set()
            tokens_per_s = await running
        return made, tokens_per_s

    async def update_each_step(self, steps: int, rollouts: int) -> float:
        """The streams' tokens per second with one update after every `rollouts` finished requests, as in training. The
        first update follows the first step."""
        left = steps

        def keep_going(_: int) -> bool:
            return left > 0

        target = self.requests + rollouts
        running = asyncio.create_task(self.run(keep_going))
        try:
            while left and not running.done():
                await asyncio.wait([running], timeout=STEP_LOOK_S)
                if self.requests >= target and not running.done():
                    target = self.requests + rollouts
                    await self.update()
                    left -= 1
        finally:
            left = 0
            tokens_per_s = await running
        return tokens_per_s


def lost_shares(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The share of their tokens/s that the streams lose to back-to-back updates, and to one update per step, compared
    with the rates before and after. Medians over the samples, each with `RATES`; empty without samples."""
    if not samples:
        return {}
    before, during, stepped, after = (np.array([sample[name] for sample in samples]) for name in RATES)
    return {
        name: float(np.median(1.0 - 2.0 * rate / (before + after)))
        for name, rate in (("lost_back_to_back", during), ("lost_once_a_step", stepped))
    }


def rollouts_per_step(experiment: Experiment) -> int:
    return experiment.training.groups * experiment.rollout.group_size


def times(load: str, updates: Sequence[TimedUpdate], names: Sequence[str] = tuple(TIMES)) -> dict[str, float]:
    """Percentiles of the updates' times: `{load}_{name}_p{percentile}_ms`."""
    found: dict[str, float] = {}
    for name in names:
        values = np.percentile([getattr(update.timing, f"{name}_ms") for update in updates], PERCENTILES)
        found |= {
            f"{load}_{name}_p{percentile}_ms": value
            for percentile, value in zip(PERCENTILES, values.tolist(), strict=True)
        }
    return found


# --- the workload -----------------------------------------------------------------------------------------------------

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
    workload, concurrency = workload_settings(SyncSettings, settings), settings.experiment.rollout.concurrency
    if concurrency < workload.streams:
        raise ConfigurationError(
            f"workload.streams is {workload.streams}, but rollout.concurrency is {concurrency}.",
            f"Set rollout.concurrency={workload.streams}.",
        )
    return SyncWorkload(settings.experiment, workload, settings.executor)
