"""The load of the `sync` workload on any engine: many concurrent streams, and weight updates among them.

A stream has exactly one request in flight at all times, of fixed length (no stop token ends it early).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pvg.bench.workload import BenchMetric
from pvg.bench.workloads.fixtures import digest_of, model_facts
from pvg.config.experiment import Experiment
from pvg.game.players import Players
from pvg.game.roles import prompt_renderer
from pvg.game.seeds import draw_cyclic, seed_for
from pvg.records import Int32, Role
from pvg.rollout.dispatcher import request_seed
from pvg.rollout.engine import Engine, GenerationRequest, Sampling
from pvg.servers.publisher import Publisher
from pvg.servers.update import SyncTiming
from pvg.tasks import open_task
from pvg.tasks.task import problems_of_half

if TYPE_CHECKING:
    from torch import Tensor

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
        render = prompt_renderer(experiment.rollout.prompts, players.base.tokenizer)
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

    async def run(self, goes_on: Callable[[int], bool]) -> float:
        """Run until `goes_on(requests done by this stream)` is False for every stream; returns tokens/s of all."""
        started, before = time.perf_counter(), self.tokens
        try:
            async with asyncio.TaskGroup() as group:
                for stream in range(len(self.target.prompts)):
                    group.create_task(self._stream(stream, goes_on))
        except ExceptionGroup as errors:  # the streams share their engine, so they have the same error
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
                self._came if self.streamed else None,
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

    def _came(self, tokens: int) -> None:
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

        def goes_on(_: int) -> bool:
            return left > 0

        target = self.requests + rollouts
        running = asyncio.create_task(self.run(goes_on))
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
