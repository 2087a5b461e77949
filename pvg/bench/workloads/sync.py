"""`sync`: weight updates through the publisher, with the engine idle and while it serves many streams.

One sample has four parts: updates of the idle engine; the streams alone; the streams during as many updates back to
back, at moments spread evenly over a batch; the streams alone again.

Back-to-back updates are the worst case and give enough samples for percentiles. `lost_back_to_back` is the share of its
tokens/s that generation loses to them. A percentile of few values depends on chance, so `derived` has the percentiles
over the updates of all samples together, with their number.

The torch engine finishes a batch before it loads weights, so an update waits for the rest of one batch. Of vLLM servers
an update's wall time is the time of the call that makes a server load the files in the shared folder (with several
servers, the slowest one's), and rpc is the server's time from the first byte of the call to its reply; `stage`, writing
the folder, comes before the call. They stream each token as it is sampled.

A stream has exactly one request in flight at all times, of fixed length (no stop token ends it early).
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pvg.bench.workloads import BenchMetric, BenchSettings, Workload, workload_settings
from pvg.bench.workloads.rollout import digest_of, model_facts
from pvg.config.base import Count, Section
from pvg.config.experiment import Experiment
from pvg.errors import ConfigurationError, ServerUnavailableError
from pvg.game.players import Players
from pvg.game.roles import prompt_renderer
from pvg.records import Int32, Role
from pvg.rollout.dispatcher import request_seed
from pvg.rollout.engine import Engine, GenerationRequest, Sampling
from pvg.seeds import draw_cyclic, seed_for
from pvg.servers.pool import together
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
# Of an update. wall: from the call to the return. rpc: the engine's work on it (copying the weights, or a server's
# pause, load and resume). queue: waiting for the engine, or for a connection, either event loop and the network.
TIMES = ("wall", "rpc", "queue")
# Keys of `SyncTiming.parts` of a vLLM server. arrival: the part of queue before the call's first byte. pause, resume:
# stopping and restarting the engine. load: reading and loading the weights. stage: writing them, before the call.
PARTS = ("arrival", "pause", "load", "resume", "stage")
# Completion tokens of the streams alone, during back-to-back updates, and alone again.
RATES = {f"tokens_per_s_{when}": BenchMetric("tokens/s", "higher") for when in ("before", "during", "after")}
MEASURES: dict[str, BenchMetric] = (
    {
        f"{load}_{name}_p{percentile}_ms": BenchMetric("ms", "lower")
        for load in ("idle", "loaded")
        for name in TIMES
        for percentile in PERCENTILES
    }
    | RATES
    | {"request_p50_ms": BenchMetric("ms", "lower")}  # one request in the engine during the updates
)
SERVER_MEASURES = {f"{part}_p50_ms": BenchMetric("ms", "lower") for part in PARTS}


@dataclass(frozen=True, slots=True)
class TimedUpdate:
    """One update: when it was sent (time.perf_counter), the requests in flight at that time, and its timing."""

    sent: float
    in_flight: int
    timing: SyncTiming


@dataclass
class RequestStreams:
    """Keeps one request of each stream in flight, updates the weights of `tensors` among them, and counts the results.

    `prompts`: one int32 [P] per stream. `streamed`: request tokens as they are sampled. `requests_s`: the requests'
    seconds in the engine, once for those that were decoded together. `updates`: those under load."""

    engine: Engine
    publisher: Publisher
    tensors: Mapping[str, Tensor]
    prompts: Sequence[Int32]
    sampling: Sampling
    seed: int
    streamed: bool = False
    in_flight: int = 0
    tokens: int = 0
    requests_s: set[float] = field(default_factory=set)
    versions: set[int] = field(default_factory=set)
    updates: list[TimedUpdate] = field(default_factory=list)

    async def run(self, keep_going: Callable[[int], bool]) -> float:
        """Run until `keep_going(requests done by this stream)` is False for every stream; returns tokens/s of all."""
        started, before = time.perf_counter(), self.tokens
        await together([self._stream(stream, keep_going) for stream in range(len(self.prompts))])
        return (self.tokens - before) / (time.perf_counter() - started)

    async def _stream(self, stream: int, keep_going: Callable[[int], bool]) -> None:
        done = 0
        while keep_going(done):
            request = GenerationRequest(
                f"bench/{stream:05d}/{done:05d}",
                self.prompts[stream],
                self.sampling,
                request_seed(self.seed, stream, done),
                (lambda tokens: None) if self.streamed else None,
            )
            self.in_flight += 1
            try:
                completion = await self.engine.generate(request)
            finally:
                self.in_flight -= 1
            self.requests_s.add(completion.timing.service_s)
            self.tokens += len(completion.token_ids)
            self.versions.update(part.version for part in completion.spans)
            done += 1

    # --- updates -----------------------------------------------------------------------------------------------------

    async def update(self) -> TimedUpdate:
        """Publish the same weights as the next version. Raises RuntimeError if they do not arrive."""
        version, sent, in_flight = self.publisher.version + 1, time.perf_counter(), self.in_flight
        timing = await self.publisher.publish(self.tensors, version)
        if self.engine.version != version:
            raise RuntimeError(f"Version {version} was published, but the engine has {self.engine.version}.")
        return TimedUpdate(sent, in_flight, timing)

    async def update_under_load(self, updates: int, within_s: float) -> float:
        """Make `updates` updates while the streams run, each after a pause of up to `within_s`. Returns the streams'
        tokens per second until all have ended."""
        done = asyncio.Event()
        running = asyncio.create_task(self.run(lambda _: not done.is_set()))
        try:
            for number in range(1, updates + 1):
                await asyncio.wait([running], timeout=within_s * (number * GOLDEN % 1))
                if running.done():  # a stream failed, so there is nothing to measure
                    break
                self.updates.append(await self.update())
        finally:
            done.set()
            tokens_per_s = await running
        return tokens_per_s


def lost_share(samples: Sequence[Mapping[str, float]]) -> float:
    """The share of their tokens/s that the streams lose to back-to-back updates, compared with the rates before and
    after. The median over the samples, each with `RATES`."""
    before, during, after = (np.array([sample[name] for sample in samples]) for name in RATES)
    return float(np.median(1.0 - 2.0 * during / (before + after)))


def percentiles(prefix: str, values: Iterable[float]) -> dict[str, float]:
    """`{prefix}_p{percentile}_ms` for each of PERCENTILES."""
    found = np.percentile(list(values), PERCENTILES).tolist()
    return {f"{prefix}_p{percentile}_ms": value for percentile, value in zip(PERCENTILES, found, strict=True)}


def times(prefix: str, updates: Sequence[TimedUpdate]) -> dict[str, float]:
    """Percentiles of the updates' TIMES: `{prefix}{name}_p{percentile}_ms`."""
    found: dict[str, float] = {}
    for name in TIMES:
        found |= percentiles(f"{prefix}{name}", [getattr(update.timing, f"{name}_ms") for update in updates])
    return found


def part_of(updates: Iterable[TimedUpdate], part: str) -> list[float]:
    """The ms of a part of each update. Raises ServerUnavailableError if the reply to an update was lost."""
    found = [update.timing.parts.get(f"{part}_ms") for update in updates]
    if None in found:
        raise ServerUnavailableError(
            "The reply to an update of the weights was lost, so its timing is missing.", "Repeat the benchmark."
        )
    return [value for value in found if value is not None]


# --- the workload -----------------------------------------------------------------------------------------------------


class SyncSettings(Section):
    """The `[workload]` table: concurrent streams, updates per load, requests of each stream before and after."""

    streams: Count = 150
    updates: Count = 20
    waves: Count = 2
    seed: int = 0


class SyncWorkload:
    """See the module. The first `warmup` samples are left out of `derived`."""

    def __init__(
        self, experiment: Experiment, settings: SyncSettings, warmup: int, executor: Executor | None = None
    ) -> None:
        self._served = experiment.rollout.engine.kind == "vllm"
        one_per_stream = experiment.rollout.model_copy(update={"concurrency": settings.streams})
        self._experiment = experiment.model_copy(update={"rollout": one_per_stream}) if self._served else experiment
        self._settings, self._warmup, self._executor = settings, warmup, executor
        rollout = experiment.rollout
        self._sampling = Sampling(max_tokens=rollout.max_tokens, stop_ids=(), temperature=rollout.temperature)
        self.measures: Mapping[str, BenchMetric] = MEASURES | (SERVER_MEASURES if self._served else {})
        self._parts = PARTS if self._served else ()
        self.loaded: list[RequestStreams] = []  # one per sample, as are the
        self._rates: list[dict[str, float]] = []  # RATES

    async def open(self) -> None:
        """Open the experiment's engine, with the base prover's weights to publish."""
        experiment, settings, task = self._experiment, self._settings, open_task(self._experiment.task)
        self._players = players = Players(experiment, task, executor=self._executor)
        try:
            await players.ready(scoring=False)
            render = prompt_renderer(experiment.prompts, players.base.tokenizer)
            pool = problems_of_half(task, "prover")
            chosen = draw_cyclic(len(pool), 0, settings.streams, seed_for(settings.seed, "bench", "streams"))
            self._prompts = [render(pool[i], tuple(Role)[stream % 2]) for stream, i in enumerate(chosen)]
        except BaseException:
            await players.close()
            raise
        self._tensors = players.base.weights()
        self._facts = {
            **model_facts(players.base),
            "weights_mb": round(sum(tensor.nbytes for tensor in self._tensors.values()) / 1e6, 3),
            "prompts": digest_of(self._prompts),
        }

    def work(self) -> dict[str, Any]:
        settings, experiment = self._settings, self._experiment
        return {
            **self._facts,
            "task": experiment.task.kind,
            **({"servers": len(experiment.serving.servers)} if self._served else {}),
            "streams": settings.streams,
            "streamed": self._served,
            "updates": {"idle": settings.updates, "loaded": settings.updates},
            "requests_before_and_after": 2 * settings.waves * settings.streams,
            "completion_tokens": self._sampling.max_tokens,
            "seed": settings.seed,
        }

    async def sample(self, index: int) -> dict[str, float]:
        settings, players = self._settings, self._players
        streams = RequestStreams(
            players.engine,
            players.publisher,
            self._tensors,
            self._prompts,
            self._sampling,
            settings.seed,
            streamed=self._served,
        )
        with span("idle_updates"):
            idle = [await streams.update() for _ in range(settings.updates)]
        with span("streams_before"):
            before = await streams.run(lambda done: done < settings.waves)
        alone_s = statistics.median(streams.requests_s)
        streams.requests_s.clear()
        with span("loaded_updates"):  # a server starts requests at any step, so a shorter pause suffices
            during = await streams.update_under_load(settings.updates, alone_s * (0.25 if self._served else 1))
        request_s = statistics.median(streams.requests_s)
        with span("streams_after"):
            after = await streams.run(lambda done: done < settings.waves)
        parts = {f"{part}_p50_ms": statistics.median(part_of(streams.updates, part)) for part in self._parts}
        rates = dict(zip(RATES, (before, during, after), strict=True))
        if index >= self._warmup:
            self.loaded.append(streams)
            self._rates.append(rates)
        return {
            **times("idle_", idle),
            **times("loaded_", streams.updates),
            **parts,
            **rates,
            "request_p50_ms": request_s * 1e3,
        }

    def derived(self) -> dict[str, float]:
        """Over the updates of all samples: their number, their rate, and percentiles of their times; the fewest
        requests in flight at an update, the share of the versions that served tokens, and the share of tokens/s that
        the streams lose to updates."""
        updates = [update for sample in self.loaded for update in sample.updates]
        ends = [(sample.updates[0], sample.updates[-1]) for sample in self.loaded]
        found = {
            "updates": float(len(updates)),
            "updates_per_s": len(updates)
            / sum(last.sent + last.timing.wall_ms / 1e3 - first.sent for first, last in ends),
            **times("", updates),
        }
        for part in self._parts:
            found |= percentiles(part, part_of(updates, part))
        served = [len(sample.versions) / (len(sample.updates) + 1) for sample in self.loaded]
        return found | {
            "in_flight_min": float(min(update.in_flight for update in updates)),
            "versions_served": statistics.median(served),
            "lost_back_to_back": lost_share(self._rates),
        }

    async def close(self) -> None:
        await self._players.close()


def make(settings: BenchSettings) -> Workload:
    """Raises ConfigurationError if the torch engine accepts fewer requests than there are streams."""
    workload, rollout = workload_settings(SyncSettings, settings), settings.experiment.rollout
    if rollout.engine.kind != "vllm" and rollout.concurrency < workload.streams:
        raise ConfigurationError(
            f"workload.streams is {workload.streams}, but rollout.concurrency is {rollout.concurrency}.",
            f"Set rollout.concurrency={workload.streams}.",
        )
    return SyncWorkload(settings.experiment, workload, settings.profile.warmup, settings.executor)
