"""The pipeline: whole steps of the prover's training, with an engine of heavy-tailed latencies that computes nothing.

    pvg bench --profile benchmarks/pipeline.toml                # without rollout.prefetch, and 1 and 2 batches ahead
    pvg bench --profile benchmarks/pipeline.toml --interleave   # the same, with samples taken in turn

The prover phase, its trainer, the verifier's scorer, the dispatcher and the pipeline are pvg's; with `cluster.kind =
"local"` workers score and train. The engine (`StandInEngine`) returns real completions after artificial delays, as
servers elsewhere would. The base prover samples these completions when the workload opens; they serve all versions. So
the trainer's work and its waits are real.

Useful work is the time that the training of the same steps takes synchronously, in the same number of processes that
train (`cluster.trainers`): log-probs of the reference, packing, forward and backward passes, optimizer. Before each
sample, `calibration` steps of a synchronous game measure it with an engine that answers at once. `trainer_idle` = 1 -
useful work / wall time. All other time counts as idle: waiting, scores, credit, publishing and bookkeeping, recomputed
log-probs, and the extra time of training that overlaps with other work.

The engine's pace follows from the same measurement: with `rollout.concurrency` requests at once, it delivers a batch in
`engine_share` times the useful work of a step. Each sample draws new latencies, so the spread of the samples includes
theirs; sample i has the same latencies in all variants.

A sample is `fill` steps, which fill the pipeline, and `steps` measured steps.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from benchmarks.stand_in import Answer, StandInEngine
from pvg.bench.runner import RESET
from pvg.bench.workloads import BenchMetric, BenchSettings, Workload, workload_settings
from pvg.bench.workloads.e2e import BenchSession, EndToEnd
from pvg.config.base import Count, Positive, Section
from pvg.config.experiment import Experiment
from pvg.config.rollout import NoPrefetch
from pvg.errors import ConfigurationError
from pvg.game.orders import prover_orders
from pvg.records import Rollout
from pvg.rollout.dispatcher import Dispatcher
from pvg.rollout.engine import GenerationRequest, Sampling
from pvg.rollout.torch_engine import TorchEngine
from pvg.telemetry.events import Progress, SilentObserver
from pvg.telemetry.spans import TRAINING_PARTS, Tracer, span, tracer_here


class DelayedAnswers:
    """The completions of `rollouts` by batch, group and index, in which their ids end; later batches reuse the first
    `batches`. The delay of a request is log-normal and depends only on its key and the number of the draw."""

    def __init__(self) -> None:
        self._completions: dict[str, Rollout] = {}
        self._batches = 1
        self.pace(0.0, 0.0, 1)

    def serve(self, rollouts: Iterable[Rollout], batches: int) -> None:
        self._batches = batches
        self._completions = {self._key(rollout.id): rollout for rollout in rollouts}

    def pace(self, median_s: float, sigma: float, longest: int, draw: int = 0) -> None:
        """Set the delays of later requests: `median_s` is the median, `longest` the maximum in multiples of it, `sigma`
        the deviation of the logarithm; `draw` and a request's key select its delay."""
        self._median_s, self._sigma, self._longest, self._draw = median_s, sigma, longest, draw

    def __call__(self, request: GenerationRequest) -> Answer:
        key = self._key(request.id)
        found = self._completions[key]
        seconds = self._median_s * drawn_time(f"{self._draw}/{key}", self._sigma, self._longest)
        return Answer(found.completion_ids, found.logprobs, found.finish_reason, seconds)

    def _key(self, request_id: str) -> str:
        _, batch, group, index = request_id.rsplit("/", 3)
        return f"{int(batch) % self._batches:05d}/{group}/{index}"


def drawn_time(key: str, sigma: float, longest: int) -> float:
    """The delay of a request in multiples of the median: log-normal, `sigma` the deviation of its logarithm."""
    return min(float(longest), math.exp(sigma * random.Random(key).gauss(0.0, 1.0)))


# --- the workload -----------------------------------------------------------------------------------------------------

FREE_BATCHES = 4  # additional batches of completions, for prefetching and to replace dropped rollouts


class PipelinedStepsSettings(Section):
    """The `[workload]` table. `sigma`: the standard deviation of a latency's logarithm. `longest`: the maximum
    latency in multiples of the median. `engine_share`: the engine's time per batch at full load, as a multiple of the
    useful work of a step. `calibration`: the number of synchronous steps that measure this work."""

    steps: Count = 10
    fill: Count = 2
    calibration: Count = 4
    sigma: Annotated[float, Field(ge=0.0, le=4.0)] = 1.0
    longest: Count = 32
    engine_share: Positive = 1.0


def make(settings: BenchSettings) -> Workload:
    """Raises ConfigurationError if the experiment's steps are not whole batches, or if it may end early."""
    experiment = settings.experiment
    if experiment.training.minibatches != 1 or experiment.game.stop != "steps":
        raise ConfigurationError(
            "The pipeline workload measures a fixed number of steps of one batch each.",
            "Set training.minibatches = 1 and game.stop = 'steps'.",
        )
    return PipelinedSteps(experiment, workload_settings(PipelinedStepsSettings, settings), settings.executor)


@dataclass
class StepClock(SilentObserver):
    """Records when each step ended, the seconds of its training, and its metrics. The parts of training run one after
    the other, so their seconds do not overlap."""

    ends: list[float] = field(default_factory=list)
    trained_s: list[float] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)

    def progressed(self, progress: Progress) -> None:
        tracer = tracer_here()
        ended = [] if tracer is None else tracer.take_spans()
        self.trained_s.append(sum(found.end_s - found.start_s for found in ended if found.name in TRAINING_PARTS))
        self.ends.append(time.perf_counter())
        self.metrics.append(progress.metrics)


class PipelinedSteps(EndToEnd):
    """See the module. The models, the session and the play of a phase are those of the e2e workload."""

    measures: Mapping[str, BenchMetric] = {
        "trainer_idle": BenchMetric("1", "lower", "1 - useful work / wall time"),
        "step_s": BenchMetric("s", "lower", "mean time of a step"),
        "steps_per_hour": BenchMetric("steps/h", "higher", "optimizer steps per hour"),
        "useful_step_s": BenchMetric("s", "lower", "useful work of a step: its training, done synchronously"),
    }

    def __init__(self, experiment: Experiment, workload: PipelinedStepsSettings, executor: Executor | None) -> None:
        self._answers, self._workload = DelayedAnswers(), workload
        engine = StandInEngine(experiment.rollout.concurrency, self._answers)
        super().__init__(experiment, workload.steps, executor, lambda setup: engine)
        self._metrics: list[Mapping[str, float]] = []  # of the measured steps of all samples
        self._trained_s: list[float] = []  # of each of these steps

    async def open(self) -> None:
        await super().open()
        try:
            batches = self._workload.fill + self._workload.steps + FREE_BATCHES
            with span("sample_completions"):
                self._answers.serve(await self._completions(batches), batches)
        except BaseException:
            await self.close()
            raise

    async def _completions(self, batches: int) -> list[Rollout]:
        """The base prover's answers to the orders of the first batches."""
        session, players, rollout = self._session, self._session.players, self._experiment.rollout
        rows = self._experiment.training.groups * rollout.group_size
        engine = TorchEngine(players.base.copy(), max_rows=rows, max_in_flight=rows, executor=players.executor)
        sampling = Sampling(rollout.max_tokens, players.base.tokenizer.end_ids, rollout.temperature)
        asked, players.dispatcher = (
            players.dispatcher,
            Dispatcher(engine, session.task, players.base.tokenizer, sampling, rows),
        )
        try:
            orders = prover_orders(session)
            groups = [group for n in range(batches) for group in await orders.sample(orders.batch(n), n)]
        finally:
            players.dispatcher = asked
            await engine.close()
        return [r for group in groups for r in group.rollouts]

    def work(self) -> dict[str, Any]:
        concurrency = self._experiment.rollout.concurrency
        return super().work() | self._workload.model_dump(mode="json") | {"concurrency": concurrency}

    async def sample(self, index: int) -> dict[str, float]:
        workload, rollout = self._workload, self._experiment.rollout
        in_turns = replace(self._session, rollout=rollout.model_copy(update={"prefetch": NoPrefetch()}))
        self._answers.pace(0.0, 0.0, 1)
        with span(RESET), Tracer().drive():  # not part of the pipelined steps or their budget
            calibration = await self._watched(in_turns, 1 + workload.calibration)
        useful_s = float(np.median(calibration.trained_s[1:]))
        batch_s = workload.engine_share * useful_s
        # Mean latency at which `concurrency` requests at once complete a batch in batch_s.
        mean_s = batch_s * rollout.concurrency / (self._experiment.training.groups * rollout.group_size)
        # Of a log-normal distribution; the few values above `longest` medians do not matter here.
        median_s = mean_s / math.exp(workload.sigma**2 / 2)
        self._answers.pace(median_s, workload.sigma, workload.longest, draw=index)
        clock = await self._watched(self._session, workload.fill + workload.steps)
        wall_s = clock.ends[-1] - clock.ends[workload.fill - 1]
        self._metrics += clock.metrics[workload.fill :]
        self._trained_s += clock.trained_s[workload.fill :]
        return {
            "trainer_idle": 1.0 - workload.steps * useful_s / wall_s,
            "step_s": wall_s / workload.steps,
            "steps_per_hour": 3600 * workload.steps / wall_s,
            "useful_step_s": useful_s,
        }

    async def _watched(self, session: BenchSession, steps: int) -> StepClock:
        clock = session.observer = StepClock()
        await self._play(session, steps)
        return clock

    def derived(self) -> dict[str, float]:
        """Over the measured steps of all samples: staleness, the share of dropped rollouts, and the median time of a
        step's training, which is longer than the useful work if other work overlaps with it."""

        def mean(name: str) -> float:
            return float(np.mean([step.get(name, 0.0) for step in self._metrics]))

        dropped, trained = mean("dropped_stale"), mean("rollouts")
        names = ("staleness", "staleness_in_flight", "staleness_in_queue", "groups_in_flight", "groups_waiting")
        return {
            **{name: mean(name) for name in names},
            "staleness_max": max(step["staleness_max"] for step in self._metrics),
            "dropped_share": dropped / (dropped + trained),
            "trained_step_s": float(np.median(self._trained_s)),
        }
