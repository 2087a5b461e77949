"""Stragglers: the cost of waiting for the slowest rollout of a batch, and of the remedies.

    pvg bench --profile benchmarks/stragglers.toml                 # wait for all, a deadline, partial rollouts, spo
    pvg bench --profile benchmarks/stragglers.toml --interleave   # the same, with samples taken in turn

Dispatcher and credit are pvg's. Engine and trainer compute nothing and only take time. The engine
(`HeavyTailedEngine`) gives rollouts of log-normal length, as long answers and slow tools do. The trainer takes
`train_s` for a whole batch, and less for one that was cut. Sampling and training alternate, as in the synchronous game,
so neither overlaps with the other.

Every sample draws new lengths, so the spread of the samples includes that of the tails. Sample i has the same rollouts
in all variants, each with the same duration. With partial rollouts, a sample continues what the sample before left
unfinished, as a long run would, and a continued rollout takes only the time of its remaining tokens.

Rollouts and tokens per second count what was trained on. A deadline leaves out the longest rollouts: `length_kept`, the
mean length of the kept rollouts relative to all, shows this price of its speed. Partial rollouts cost `staleness`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from benchmarks.stand_in import StandInEngine
from pvg.bench.workloads import BenchMetric, BenchSettings, Workload, workload_settings
from pvg.bench.workloads.rollout import drawn_rewards, fixed_orders, policy_batch
from pvg.config.base import Count, Positive, Section
from pvg.config.experiment import Experiment
from pvg.config.rollout import TagPrompts
from pvg.errors import ConfigurationError
from pvg.game.roles import prompt_renderer
from pvg.game.statistics import cut_metrics, staleness_metrics
from pvg.models.embedded_training import modchain_tokenizer
from pvg.models.tokenizer import Tokenizer
from pvg.records import BASE_SOURCE, Group, Rollout
from pvg.rollout.dispatcher import Dispatcher, GroupOrder, SampleCall, partial_sampling
from pvg.rollout.engine import Completion, CutShort, GenerationRequest, PartialCompletion, Sampling
from pvg.rollout.episodes import training_deadline
from pvg.seeds import seed_for
from pvg.servers.publishing import WeightUpdate
from pvg.tasks import open_task
from pvg.telemetry.spans import span


def drawn_lengths(count: int, median: float, sigma: float, longest: int, seed: int) -> NDArray[np.int64]:
    """Tokens [N] of `count` completions: log-normal, `sigma` the deviation of the logarithm, from 1 to `longest`."""
    logs_N = np.random.default_rng(seed).normal(np.log(median), sigma, count)
    lengths_N: NDArray[np.int64] = np.clip(np.rint(np.exp(logs_N)), 1, longest).astype(np.int64)
    return lengths_N


class HeavyTailedEngine(StandInEngine):
    """Each request gets `tokens_per_s`, regardless of the load. `lengths_N`: tokens of the rollouts, in the order of
    their groups' numbers, `group_size` per group, repeated at the end. Between requests it may be replaced by a longer
    sequence with the same beginning."""

    def __init__(self, lengths_N: NDArray[np.int64], tokens_per_s: float, group_size: int, max_in_flight: int) -> None:
        super().__init__(max_in_flight)
        self.lengths_N = lengths_N
        self._tokens_per_s = tokens_per_s
        self._group_size = group_size
        self._running: dict[str, asyncio.Future[bool]] = {}  # result: whether it ended by itself

    async def generate(self, request: GenerationRequest) -> Completion:
        loop, length = asyncio.get_running_loop(), self._length(request)
        started = loop.time()
        end = self._running[request.id] = loop.create_future()
        timer = loop.call_later((length - request.tokens_resumed) / self._tokens_per_s, _resolve, end, True)
        try:
            whole = await end
        except asyncio.CancelledError:
            if request.on_tokens is not None:
                request.on_tokens(self._tokens(request, loop.time() - started))
            raise
        finally:
            timer.cancel()
            del self._running[request.id]
        seconds = loop.time() - started
        tokens = length if whole else self._tokens(request, seconds)
        ids, logprobs = np.full(tokens, int(request.prompt_ids[-1]), np.int32), np.full(tokens, -1.0, np.float32)
        if whole:
            return self.completed(request, ids, logprobs, "length", seconds)
        self.count(request, tokens, seconds)
        spans, timing = request.spans(tokens, self.version), request.timing(0.0, seconds)
        raise CutShort(PartialCompletion(ids, logprobs, spans, timing) if tokens else None)

    def cut(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            if end := self._running.get(request_id):
                _resolve(end, False)

    def _length(self, request: GenerationRequest) -> int:
        _, group, index = request.id.rsplit("/", 2)
        return int(self.lengths_N[(int(group) * self._group_size + int(index)) % len(self.lengths_N)])

    def _tokens(self, request: GenerationRequest, seconds: float) -> int:
        """Tokens of the completion after `seconds`, without the last one, which would end it."""
        return min(self._length(request) - 1, request.tokens_resumed + int(seconds * self._tokens_per_s))


def _resolve(end: asyncio.Future[bool], whole: bool) -> None:
    if not end.done():
        end.set_result(whole)


# --- the workload -----------------------------------------------------------------------------------------------------

MEASURES: dict[str, BenchMetric] = {
    "rollouts_per_s": BenchMetric("rollouts/s", "higher", "rollouts sampled and trained on per second"),
    "tokens_per_s": BenchMetric("tokens/s", "higher", "their completion tokens per second"),
    "trainer_idle": BenchMetric("1", "lower", "share of the time in which the trainer waited for rollouts"),
    "batch_s": BenchMetric("s", "lower", "mean time from a batch's first request to its last rollout"),
    "batch_rollouts": BenchMetric("rollouts", "higher", "mean rollouts of a batch"),
    "tokens_lost": BenchMetric("1", "lower", "share of the sampled tokens that belong to cancelled rollouts"),
    "staleness": BenchMetric(
        "versions", "lower", "mean versions behind of the rollouts trained on, by their oldest token"
    ),
}


class StragglersSettings(Section):
    """The `[workload]` table. A rollout takes `median_s` in the median and at most `longest` times that. `sigma`: the
    standard deviation of its logarithm. `train_s`: the trainer's seconds for a whole batch."""

    batches: Count = 3
    median_s: Positive = 0.1
    sigma: Annotated[float, Field(ge=0.0, le=4.0)] = 1.0
    longest: Count = 32
    median_tokens: Count = 100
    train_s: Positive = 0.2
    seed: int = 0


def make(settings: BenchSettings) -> Workload:
    """Raises ConfigurationError for a task whose questions the workload's alphabet does not cover."""
    experiment = settings.experiment
    if experiment.task.kind != "modchain":
        raise ConfigurationError(
            f"The stragglers workload opens no model and knows only modchain's alphabet, not that of "
            f"task.kind = {experiment.task.kind!r}.",
            "Use an experiment whose task.kind is 'modchain'.",
        )
    return Stragglers(experiment, workload_settings(StragglersSettings, settings))


class Stragglers:
    """See the module. One sample is `batches` consecutive batches."""

    measures: Mapping[str, BenchMetric] = MEASURES

    def __init__(self, experiment: Experiment, workload: StragglersSettings) -> None:
        self._experiment, self._workload = experiment, workload
        self._rollouts = experiment.training.groups * experiment.rollout.group_size
        self._lengths: list[NDArray[np.int64]] = []  # [batches x rollouts] per sample
        self._played = self._kept_rollouts = self._kept_tokens = 0  # samples; totals of what was trained on
        self._oldest = 0.0  # maximum staleness of any of them, in versions

    async def open(self) -> None:
        experiment, workload = self._experiment, self._workload
        rollout = experiment.rollout
        task, tokenizer = open_task(experiment.task), Tokenizer(modchain_tokenizer())
        self._engine = HeavyTailedEngine(
            self._drawn(0),
            workload.median_tokens / workload.median_s,
            rollout.group_size,
            rollout.concurrency,
        )
        sampling = Sampling(workload.median_tokens * workload.longest, (tokenizer.eos_id,))
        self._dispatcher = Dispatcher(self._engine, task, tokenizer, sampling, rollout.concurrency)
        render = prompt_renderer(TagPrompts(), tokenizer)
        self._orders = fixed_orders(experiment, task, render, self._rollouts, workload.seed)
        reward = experiment.game.reward.kind
        self._partial = partial_sampling(rollout, experiment.training, reward, self._dispatcher)

    def _drawn(self, index: int) -> NDArray[np.int64]:
        """The lengths of all samples up to `index`, concatenated, each with a seed of (sample, batch).

        Group numbers index this one sequence. Variants that carry nothing over begin sample i at the start of its
        section. Partial rollouts are carried over to the next sample, which then orders fewer new ones. So variants
        with partial rollouts read the sequence in order, each from its current position. No variant skips a rollout
        that the others had to wait for, or repeats one.
        """
        workload = self._workload
        for sample in range(len(self._lengths), index + 1):
            seeds = [seed_for(workload.seed, "bench", "lengths", sample, batch) for batch in range(workload.batches)]
            longest = workload.median_tokens * workload.longest
            drawn = [
                drawn_lengths(self._rollouts, workload.median_tokens, workload.sigma, longest, seed) for seed in seeds
            ]
            self._lengths.append(np.concatenate(drawn))
        return np.concatenate(self._lengths[: index + 1])

    def work(self) -> dict[str, Any]:
        """`longest_over_median` is that of sample 0, so it does not depend on the number of samples."""
        lengths = self._drawn(0)
        return {
            **self._workload.model_dump(mode="json"),
            "rollouts_ordered": self._rollouts,
            "concurrency": self._experiment.rollout.concurrency,
            "longest_over_median": float(lengths.max() / np.median(lengths)),
        }

    async def sample(self, index: int) -> dict[str, float]:
        self._engine.lengths_N = self._drawn(index)
        started, sampled_s, batches = time.perf_counter(), 0.0, []
        trained_s, behind = 0.0, 0.0
        for number in range(index * self._workload.batches, (index + 1) * self._workload.batches):
            with span("rollout"):
                groups, seconds = await self._sampled(number)
            sampled_s += seconds
            batches.append(groups)
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            stale = staleness_metrics(rollouts, self._engine.version)
            behind += stale["staleness"] * len(rollouts)
            self._oldest = max(self._oldest, stale["staleness_max"])
            trained_s += await self._train(rollouts)
        wall_s = time.perf_counter() - started
        cuts = [cut_metrics(groups) for groups in batches]
        count = sum(cut["rollouts"] for cut in cuts)
        lost = sum(cut["tokens_lost"] for cut in cuts)
        kept = sum(len(r.completion_ids) for groups in batches for group in groups for r in group.rollouts)
        self._played += 1
        self._kept_rollouts += int(count)
        self._kept_tokens += kept
        return {
            "rollouts_per_s": count / wall_s,
            "tokens_per_s": kept / wall_s,
            "trainer_idle": 1.0 - trained_s / wall_s,
            "batch_s": sampled_s / self._workload.batches,
            "batch_rollouts": count / self._workload.batches,
            "tokens_lost": lost / (lost + kept),
            "staleness": behind / count,
        }

    async def _sampled(self, number: int) -> tuple[list[Group], float]:
        started = time.perf_counter()
        if self._partial is not None:
            groups = await self._partial.sample(self._plan, number)
        else:
            orders, call = self._plan(number)
            experiment = self._experiment
            call = replace(call, deadline=training_deadline(experiment.rollout.deadline, experiment.training))
            groups = await self._dispatcher.sample(orders, call)
        return groups, time.perf_counter() - started

    def _plan(self, number: int) -> tuple[list[GroupOrder], SampleCall]:
        """The orders of a batch; batches are numbered through all samples."""
        first = number * len(self._orders)
        orders = [replace(order, group=first + place) for place, order in enumerate(self._orders)]
        return orders, SampleCall(0, BASE_SOURCE, number, self._workload.seed, f"{number:05d}")

    async def _train(self, rollouts: list[Rollout]) -> float:
        """Compute credit as in the game, sleep as long as a trainer would work, and publish the next version. Returns
        the time slept."""
        with span("credit"):
            policy_batch(rollouts, drawn_rewards(rollouts, self._workload.seed), self._experiment.training.loss.kind)
        seconds = self._workload.train_s * len(rollouts) / self._rollouts
        with span("forward_backward"):
            await asyncio.sleep(seconds)
        await self._engine.load_weights(WeightUpdate(self._engine.version + 1, {}))
        return seconds

    def derived(self) -> dict[str, float]:
        """`length_kept`: the mean length of the rollouts that were trained on, relative to that of all ordered ones.
        `staleness_max`: versions by which the oldest of them was behind."""
        return {"length_kept": self._kept_tokens / self._kept_rollouts / self._ordered(), "staleness_max": self._oldest}

    def _ordered(self) -> float:
        """Mean length of everything ordered so far."""
        count = self._played * self._workload.batches * self._rollouts
        if self._partial is not None:
            count = self._partial.state()["ordered"] * self._experiment.rollout.group_size
        return float(self._drawn(self._played - 1)[:count].mean())

    async def close(self) -> None: ...
