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
useful work / wall time. All other time counts as idle: waiting, scores, credit, publishing and bookkeeping. Two parts
exist only in a pipeline: recomputed log-probs, and the extra time of training that overlaps with other work. `derived`
splits the idle time into these parts.

The engine's pace follows from the same measurement: with `rollout.concurrency` requests at once, it delivers a batch in
`engine_share` times the useful work of a step. Each sample draws new latencies, so the spread of the samples includes
theirs; sample i has the same latencies in all variants.

A sample is `fill` steps, which fill the pipeline, and `steps` measured steps.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from benchmarks.stand_in import Answer, StandInEngine
from pvg.bench.runner import RESET
from pvg.bench.workloads import BenchMetric, BenchSettings, Workload, workload_settings
from pvg.bench.workloads.e2e import THRESHOLD, BenchSession, open_bench_session
from pvg.config.base import Count, Positive, Section
from pvg.config.experiment import Experiment
from pvg.config.rollout import NoPrefetch
from pvg.errors import ConfigurationError
from pvg.game.orders import prover_orders
from pvg.game.prover_phase import open_prover_phase
from pvg.game.states import Phase
from pvg.game.verifier_phase import FixedVerifier
from pvg.models.heads import VerifierModel
from pvg.models.language_model import LanguageModel
from pvg.models.sources import open_learner
from pvg.records import Rollout
from pvg.rollout.dispatcher import Dispatcher
from pvg.rollout.engine import GenerationRequest, Sampling
from pvg.rollout.torch_engine import TorchEngine
from pvg.telemetry.events import PhaseInfo, Progress, SilentObserver
from pvg.telemetry.spans import TRAINING_PARTS, Span, Tracer, span, tracer_here


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
    """Raises ConfigurationError if the experiment's steps are not whole batches."""
    experiment = settings.experiment
    if experiment.training.minibatches != 1:
        raise ConfigurationError(
            "The pipeline workload measures a fixed number of steps of one batch each.",
            "Set training.minibatches = 1.",
        )
    return PipelinedSteps(experiment, workload_settings(PipelinedStepsSettings, settings), settings.executor)


@dataclass
class StepClock(SilentObserver):
    """Records when each step ended, the spans of its training, and its metrics."""

    ends: list[float] = field(default_factory=list)
    spans: list[list[Span]] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)

    def progressed(self, progress: Progress) -> None:
        tracer = tracer_here()
        ended = [] if tracer is None else tracer.take_spans()
        self.spans.append([found for found in ended if found.name in TRAINING_PARTS])
        self.ends.append(time.perf_counter())
        self.metrics.append(progress.metrics)


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """The measured steps of a phase: their wall time, the seconds of training of each, the seconds of recomputed
    log-probs within training, and their metrics. The parts of training run one after the other, so these seconds do not
    overlap."""

    wall_s: float
    trained_s: list[float]
    recomputed_s: float
    metrics: list[Mapping[str, float]]


class PipelinedSteps:
    measures: Mapping[str, BenchMetric] = {
        "trainer_idle": BenchMetric("1", "lower", "1 - useful work / wall time"),
        "step_s": BenchMetric("s", "lower", "mean time of a step"),
        "steps_per_hour": BenchMetric("steps/h", "higher", "optimizer steps per hour"),
        "useful_step_s": BenchMetric("s", "lower", "useful work of a step: its training, done synchronously"),
    }

    def __init__(self, experiment: Experiment, workload: PipelinedStepsSettings, executor: Executor | None) -> None:
        self._experiment, self._workload, self._executor = experiment, workload, executor
        self._stack = AsyncExitStack()
        self._answers = DelayedAnswers()
        self._plays: list[MeasuredSteps] = []  # one per sample
        self._useful_s: list[float] = []  # a step's useful work, one per sample

    async def open(self) -> None:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pvg-bench-")))
            engine = StandInEngine(self._experiment.rollout.concurrency, self._answers)
            self._session = open_bench_session(self._experiment, folder, stack, self._executor, lambda setup: engine)
            self._session.observer = StepClock()
            in_turns = self._experiment.rollout.model_copy(update={"prefetch": NoPrefetch()})
            self._synchronous = replace(self._session, rollout=in_turns)
            players = self._session.players
            await players.ready()
            stack.enter_context(players.divided_workers())  # also for the synchronous steps: see "useful work"
            self._learner: LanguageModel = stack.enter_context(open_learner(players, round_=0))
            self._verifier: VerifierModel = players.open_verifier()
            stack.callback(self._verifier.close)
            batches = self._workload.fill + self._workload.steps + FREE_BATCHES
            with span("sample_completions"):
                rollouts = await self._completions(batches)
            self._answers.serve(rollouts, batches)
            self._stack = stack.pop_all()

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
        experiment, players = self._experiment, self._session.players
        return {
            **self._workload.model_dump(mode="json"),
            "prover": players.base.name,
            "prover_parameters": players.base.num_parameters,
            "verifier": experiment.models.verifier.source,
            "groups": experiment.training.groups,
            "group_size": experiment.rollout.group_size,
            "concurrency": experiment.rollout.concurrency,
            "loss": experiment.training.loss.kind,
            "kl": experiment.training.kl.coefficient,
            "seed": experiment.seed,
        }

    async def sample(self, index: int) -> dict[str, float]:
        workload, rollout = self._workload, self._experiment.rollout
        self._answers.pace(0.0, 0.0, 1)
        with span(RESET), Tracer().drive():  # not part of the pipelined steps or their budget
            in_turns = await self._play(self._synchronous, 1 + workload.calibration, skip=1)
        useful_s = float(np.median(in_turns.trained_s))
        batch_s = workload.engine_share * useful_s
        # Mean latency at which `concurrency` requests at once complete a batch in batch_s.
        mean_s = batch_s * rollout.concurrency / (self._experiment.training.groups * rollout.group_size)
        self._answers.pace(mean_s / _mean_over_median(workload.sigma), workload.sigma, workload.longest, draw=index)
        play = await self._play(self._session, workload.fill + workload.steps, skip=workload.fill)
        self._plays.append(play)
        self._useful_s.append(useful_s)
        return {
            "trainer_idle": 1.0 - workload.steps * useful_s / play.wall_s,
            "step_s": play.wall_s / workload.steps,
            "steps_per_hour": 3600 * workload.steps / play.wall_s,
            "useful_step_s": useful_s,
        }

    async def _play(self, session: BenchSession, steps: int, skip: int) -> MeasuredSteps:
        """Play a fresh phase; measure its steps after the first `skip`."""
        clock = session.observer = StepClock()
        with span("reset"):
            await session.players.compute(lambda: self._learner.load_weights(session.players.base.weights()))
            info = PhaseInfo(0, 1, Phase.TRAIN_PROVER.value, "steps", steps)
            phase = open_prover_phase(session, info, self._verifier, FixedVerifier(THRESHOLD), self._learner)
            phase.version = session.players.engine.version
        await phase.play()
        return MeasuredSteps(
            clock.ends[-1] - clock.ends[skip - 1],
            [_seconds(step) for step in clock.spans[skip:]],
            _seconds(found for step in clock.spans[skip:] for found in step if found.name == "recompute"),
            clock.metrics[skip:],
        )

    def derived(self) -> dict[str, float]:
        """Over the measured steps of all samples: the idle share and its three parts, which add up to it; staleness;
        the share of dropped rollouts; the time per batch of the trainer and, at full load, of the engine (medians,
        s)."""
        steps = [step for play in self._plays for step in play.metrics]

        def mean(name: str) -> float:
            return float(np.mean([step.get(name, 0.0) for step in steps]))

        wall_s = sum(play.wall_s for play in self._plays)
        trained_s = sum(sum(play.trained_s) for play in self._plays)
        recomputed_s = sum(play.recomputed_s for play in self._plays)
        useful_s = self._workload.steps * sum(self._useful_s)

        dropped, trained = mean("dropped_stale"), mean("rollouts")
        names = ("staleness", "staleness_in_flight", "staleness_in_queue", "groups_in_flight", "groups_waiting")
        return {
            **{name: mean(name) for name in names},
            "trainer_idle_share": 1.0 - useful_s / wall_s,
            "idle_not_training": 1.0 - trained_s / wall_s,
            "idle_recompute": recomputed_s / wall_s,
            "idle_slower_training": (trained_s - recomputed_s - useful_s) / wall_s,
            "staleness_max": max(step["staleness_max"] for step in steps),
            "dropped_share": dropped / (dropped + trained),
            "trained_step_s": float(np.median([seconds for play in self._plays for seconds in play.trained_s])),
            "engine_batch_s": self._workload.engine_share * float(np.median(self._useful_s)),
        }

    async def close(self) -> None:
        await self._stack.aclose()


def _seconds(spans: Iterable[Span]) -> float:
    return sum(found.end_s - found.start_s for found in spans)


def _mean_over_median(sigma: float) -> float:
    """The ratio for a log-normal distribution; the few values above `longest` medians do not matter here."""
    return float(np.exp(sigma**2 / 2))
