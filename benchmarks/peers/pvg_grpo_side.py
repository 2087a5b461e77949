"""pvg's side of a GRPO step: sample, grade, credit, reference, train, publish, as the game's prover phase does it.

    .venv/bin/python benchmarks/peers/pvg_grpo_side.py FOLDER      # started by sides.py

Only the verifier is left out, for the other side has none: the reward is the grade. A step begins with the choice of
its problems and ends when the engine has the new weights.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
from work import Orders, peak_gb, read_work, reward

from pvg.bench.runner import on_loop
from pvg.bench.workloads.e2e import open_bench_session
from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.game.parts import BatchLogprobs
from pvg.game.prover_phase import open_batches
from pvg.game.round import GameBatches
from pvg.game.verifier_phase import FixedVerifier
from pvg.models.sources import open_learner
from pvg.records import Float32, Grade, Problem, Role, Rollout, Split
from pvg.tasks import open_task
from pvg.tasks.task import Task
from pvg.telemetry.spans import Tracer
from pvg.training.batch import MinibatchSource, PolicyBatch
from pvg.training.losses import PolicyObjective
from pvg.training.trainer import OptimizerSettings, Trainer
from pvg.verifier.scorer import ScorerStats


class Trivial:
    """The task's problems, graded by the reward that both sides pay."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def problems(self, split: Split) -> Iterable[Problem]:
        return self._task.problems(split)

    def grade(self, problem: Problem, completion: str) -> Grade:
        return Grade(correct=bool(reward(completion)), well_formed=True)


class Unscored:
    """There is no verifier in this comparison."""

    version = "none"
    stats = ScorerStats(hits=0, misses=0, evictions=0, shared=0, forward_passes=0)

    async def score(self, rollouts: Sequence[Rollout]) -> Float32:
        return np.zeros(len(rollouts), dtype=np.float32)


class TimedSource:
    """A source that measures the time of its newest batch and the mean length of its completions."""

    def __init__(self, source: GameBatches) -> None:
        self._source = source
        self.rollout_s = self.completion_tokens = 0.0

    async def next_batch(self) -> PolicyBatch:
        began = time.perf_counter()
        batch = await self._source.next_batch()
        self.rollout_s = time.perf_counter() - began
        self.completion_tokens = statistics.fmean(batch.completion_lengths_N.tolist())
        return batch


async def serve(orders: Orders, experiment: Experiment, folder: Path) -> None:
    training, tracer = experiment.training, Tracer()
    async with AsyncExitStack() as stack:
        session = open_bench_session(experiment, folder, stack, task=Trivial(open_task(experiment.task)))
        players = session.players
        await players.ready()
        learner = stack.enter_context(open_learner(players, round_=0))
        learner.require_gradients()
        workers = players.prover_workers(experiment.training, experiment.rollout, learner.module)
        if workers is not None:
            stack.push_async_callback(workers.close)
            await workers.prepare()
        precision = experiment.models.compute_dtype
        objective = PolicyObjective(training, experiment.rollout, learner.tokenizer.pad_id, precision)
        scorer: Any = Unscored()
        recomputed = experiment.rollout.logprobs == "recomputed"
        logprobs = BatchLogprobs(players, objective, learner, workers=workers, recomputed=recomputed)
        source = TimedSource(open_batches(session, scorer, FixedVerifier(0.0), objective, logprobs))
        trainer = Trainer(
            learner.module,
            objective,
            OptimizerSettings(learning_rate=training.learning_rate),
            MinibatchSource(source, training.minibatches),
            executor=players.executor,
            precision=precision,
            gradient_checkpointing=training.gradient_checkpointing,
            workers=workers,
        )
        prompt_ids = session.prompts.render(session.problems("prover")[0], Role.HELPFUL)
        threads = players.threads if players.workers is None else players.workers.count
        facts = {"parameters": learner.num_parameters, "threads": threads}
        orders.answer(facts | {"prompt_tokens": len(prompt_ids)})
        with tracer.drive():
            while orders.wait():
                began = time.perf_counter()
                report = await trainer.step()
                assert report is not None, "the source never ends"
                tensors, adapter = await players.compute(learner.policy)
                await players.publish(tensors, report.step + 1, adapter)
                step_s = time.perf_counter() - began
                tracer.close_step()
                tracer.take_spans()  # not kept: nothing may grow from step to step
                orders.answer(
                    {
                        "step_s": step_s,
                        "rollout_s": source.rollout_s,
                        "train_s": step_s - source.rollout_s,
                        "peak_gb": peak_gb(),
                        "completion_tokens": source.completion_tokens,
                    }
                )


def main(serve: Callable[[Orders, Experiment, Path], Coroutine[Any, Any, None]]) -> None:
    """Answer the orders of the driver, in the folder that it names."""
    orders, folder = Orders(), Path(sys.argv[1])
    on_loop(serve(orders, build_experiment(read_work(folder)["experiment"]), folder))


if __name__ == "__main__":
    main(serve)
