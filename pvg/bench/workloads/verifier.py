"""The verifier: scoring solutions without and with the cache, and training on pairs of them.

`open` samples the solutions with the base prover and stores them in a temporary run, as a mint does. Each sample starts
from the verifier's initial state:

1. a fresh scorer scores all solutions, then scores them again `warm_passes` times from its cache;
2. the store is opened and the first training batch is drawn: `first_batch_s`, which does not grow with the pairs;
3. the trainer takes `steps` batches of `verifier.pairs` pairs, including drawing and the head's references.

The scorer computes identical solutions once: `distinct` is the share of distinct ones.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import AsyncExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from torch import Tensor

from pvg.bench.workloads import BenchMetric, BenchSettings, Workload, workload_settings
from pvg.config.base import Count, Section
from pvg.config.experiment import Experiment
from pvg.errors import ConfigurationError
from pvg.game.players import Players
from pvg.game.roles import Render, assign_roles, prompt_renderer
from pvg.game.verifier_phase import optimizer_settings
from pvg.models.heads import VerifierModel
from pvg.records import BASE_SOURCE, Problem, Role
from pvg.rollout.dispatcher import GroupOrder, SampleCall
from pvg.seeds import draw_cyclic, generator_for, seed_for
from pvg.store.pairs import PairStream, PairView
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.tasks import open_task
from pvg.tasks.task import problems_of_half
from pvg.telemetry.spans import span
from pvg.training.trainer import Trainer
from pvg.verifier.data import PairSource
from pvg.verifier.losses import PairObjective

LABEL = "mint-00000"


class VerifierWorkSettings(Section):
    """The `[workload]` table: solutions scored per sample, passes over them with a warm cache, training steps. `seed`
    selects the problems and the prover's samples."""

    solutions: Count = 512
    warm_passes: Count = 4
    steps: Count = 8
    seed: int = 0


def make(settings: BenchSettings) -> Workload:
    workload, experiment = workload_settings(VerifierWorkSettings, settings), settings.experiment
    if workload.solutions % experiment.game.mint_samples:
        size = experiment.game.mint_samples
        raise ConfigurationError(
            f"workload.solutions = {workload.solutions} is not a multiple of {size}, the solutions per problem.",
            f"Set it to {max(1, workload.solutions // size) * size}, or change game.mint_samples.",
        )
    return VerifierWork(experiment, workload, settings.executor)


class VerifierWork:
    measures: Mapping[str, BenchMetric] = {
        "cold_scores_per_s": BenchMetric("scores/s", "higher"),  # with an empty cache
        "warm_scores_per_s": BenchMetric("scores/s", "higher"),  # again, from the cache
        "first_batch_s": BenchMetric("s", "lower"),  # from opening the store to the first training batch
        "pairs_per_s": BenchMetric("pairs/s", "higher"),  # drawn and trained on
    }

    def __init__(
        self, experiment: Experiment, workload: VerifierWorkSettings, executor: Executor | None = None
    ) -> None:
        self._experiment, self._workload, self._executor = experiment, workload, executor
        self._stack = AsyncExitStack()
        self._shown: dict[str, float] = {}  # figures of the last sample
        self._warm_over_cold: list[float] = []

    async def open(self) -> None:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pvg-bench-")))
            task = open_task(self._experiment.task)
            self._players = players = Players(self._experiment, task, executor=self._executor)
            stack.push_async_callback(players.close)
            await players.ready()
            self._verifier: VerifierModel = players.open_verifier()
            stack.callback(self._verifier.close)
            self._start: dict[str, Tensor] = {n: t.clone() for n, t in self._verifier.trainable_state().items()}
            render = prompt_renderer(self._experiment.prompts, players.base.tokenizer)
            problems = problems_of_half(task, "verifier")
            orders = _orders(self._experiment, problems, render, self._workload)
            seed = seed_for(self._workload.seed, "bench", "mint")
            groups = await players.dispatcher.sample(orders, SampleCall(0, BASE_SOURCE, 0, seed, prefix="bench/mint"))
            self._rollouts = [rollout for group in groups for rollout in group.rollouts]
            self._shards = RolloutShards(folder)
            self._info: ShardInfo = self._shards.write(0, LABEL, self._rollouts)
            with closing(PairView(self._shards, [self._info])) as view:
                PairStream(view, {BASE_SOURCE: 1.0}, self._workload.seed)  # raises at once if no pairs can be formed
            self._stack = stack.pop_all()

    def work(self) -> dict[str, Any]:
        section = self._experiment.verifier
        return {
            "verifier": self._experiment.models.verifier.source,
            "parameters": sum(tensor.numel() for tensor in self._start.values()),
            "head": section.head.kind,
            "loss": section.loss,
            "prover": self._players.base.name,
            "task": self._experiment.task.model_dump(mode="json", exclude_none=True),
            "solutions": len(self._rollouts),
            "tokens": sum(len(r.completion_ids) for r in self._rollouts),
            "warm_passes": self._workload.warm_passes,
            "steps": self._workload.steps,
            "pairs_per_step": section.pairs,
            "seed": self._workload.seed,
        }

    async def sample(self, index: int) -> dict[str, float]:
        with span("reset"):
            await self._players.compute(lambda: self._verifier.load_trainable_state(self._start))
        cold_s, warm_s = await self._score()
        began = time.perf_counter()
        with span("open_store"):
            view = PairView(self._shards, [self._info])
        with closing(view):
            stream = PairStream(view, {BASE_SOURCE: 1.0}, self._workload.seed)
            source = self._players.pair_source(stream, self._verifier, start_step=0)
            batch = await source.next_batch()
            assert batch is not None, "a pair stream has no end"
            first_batch_s = time.perf_counter() - began
            pairs_per_s = await self._train(source)
        self._shown["pairs_per_solution"] = len(batch) / len(batch.sequences)
        asked, workload = len(self._rollouts), self._workload
        self._warm_over_cold.append(workload.warm_passes * cold_s / warm_s)
        return {
            "cold_scores_per_s": asked / cold_s,
            "warm_scores_per_s": workload.warm_passes * asked / warm_s,
            "first_batch_s": first_batch_s,
            "pairs_per_s": pairs_per_s,
        }

    async def _score(self) -> tuple[float, float]:
        """Seconds of the cold pass, and of all warm ones."""
        scorer = self._players.scorer(self._verifier)
        began = time.perf_counter()
        with span("score"):
            await scorer.score(self._rollouts)
        cold, cold_s = scorer.stats, time.perf_counter() - began
        began = time.perf_counter()
        for _ in range(self._workload.warm_passes):
            with span("score"):
                await scorer.score(self._rollouts)
        warm_s = time.perf_counter() - began
        self._shown["distinct"] = cold.misses / len(self._rollouts)
        asked = self._workload.warm_passes * len(self._rollouts)
        self._shown["cache_hit_rate"] = (scorer.stats.hits - cold.hits) / asked
        return cold_s, warm_s

    async def _train(self, source: PairSource) -> float:
        """Pairs per second of `steps` training steps, drawing included."""
        section, players = self._experiment.verifier, self._players
        training = self._experiment.training
        longest = self._verifier.longest_packed if training.shared_prompts else 0
        objective = PairObjective(section, self._verifier.tokenizer.pad_id, longest_packed=longest)
        trainer = Trainer(
            self._verifier,
            objective,
            optimizer_settings(section, section.steps),
            source,
            executor=players.executor,
            precision=self._experiment.models.compute_dtype,
            gradient_checkpointing=training.gradient_checkpointing,
            waits_for="pairs",
        )
        padding, pairs = [], 0.0
        began = time.perf_counter()
        for _ in range(self._workload.steps):
            report = await trainer.step()
            assert report is not None, "a pair stream has no end"
            padding.append(report.metrics["padding"])
            pairs += report.metrics["pairs"]
        trained_s = time.perf_counter() - began
        self._shown["padding"] = float(np.mean(padding))
        return pairs / trained_s

    def derived(self) -> dict[str, float]:
        """cache_hit_rate of the warm passes, distinct (share of the solutions), padding of the training's
        micro-batches, pairs_per_solution (of a batch), and warm_over_cold (ratio of the rates; the median over all
        samples, warm-up included)."""
        return {
            **self._shown,
            "warm_over_cold": median(self._warm_over_cold),
            "solution_tokens": float(np.mean([len(r.completion_ids) for r in self._rollouts])),
        }

    async def close(self) -> None:
        await self._stack.aclose()


def _orders(
    experiment: Experiment, problems: list[Problem], render: Render, workload: VerifierWorkSettings
) -> list[GroupOrder]:
    """Per problem a group of each role, with `game.mint_samples` rollouts in all, as in a mint. Raises
    ConfigurationError without problems."""
    if not problems:
        raise ConfigurationError(
            "The task has no training problems for the verifier.", "Raise task.problems or task.limit."
        )
    game = experiment.game
    rng = generator_for(workload.seed, "bench", "mint-roles")
    chosen = draw_cyclic(
        len(problems), 0, workload.solutions // game.mint_samples, seed_for(workload.seed, "bench", "mint-problems")
    )
    found = []
    for place, number in enumerate(chosen):
        problem = problems[number]
        roles = assign_roles(game.mint_samples, game.sneaky_share, rng)
        for role in Role:
            if size := roles.count(role):
                found.append(GroupOrder(problem, role, render(problem, role), 2 * place + role.number, size))
    return found
