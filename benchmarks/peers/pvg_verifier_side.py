"""pvg's side of verifier training: as many pairs of the stored solutions as they form, per sample.

    .venv/bin/python benchmarks/peers/pvg_verifier_side.py FOLDER      # started by sides.py

A sample begins with the solutions in the rollout store, where a mint leaves them, and a model that is loaded; it opens
the store, draws and renders the pairs, and ends with the optimizer step by which as many pairs are trained on as the
solutions form.
"""

from __future__ import annotations

import gc
import sys
import time
from concurrent.futures import Executor
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from work import Orders, read_work

from pvg.bench.runner import on_loop
from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.config.operation import LocalCluster
from pvg.models import open_model, pick_device
from pvg.models.compute import compute_executor
from pvg.models.heads import VerifierModel, build_verifier
from pvg.records import BASE_SOURCE, Grade, Role, Rollout, VersionSpan
from pvg.store.pairs import PairStream, PairView
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.training.trainer import OptimizerSettings, Trainer, trainable_parameters
from pvg.verifier.data import PairSource, VerifierBatch, VerifierTemplate
from pvg.verifier.losses import PairObjective
from pvg.workers.local import LocalSupply
from pvg.workers.models import PAIR_FIELDS, ModelInWorkers, pair_shards
from pvg.workers.pool import WorkerPool


class CountingSource:
    """A source that takes the time of its first batch, and counts the pairs and solutions of its batches."""

    def __init__(self, source: PairSource) -> None:
        self._source = source
        self.first_batch = 0.0
        self.pairs = self.solutions = 0

    async def next_batch(self) -> VerifierBatch | None:
        batch = await self._source.next_batch()
        self.first_batch = self.first_batch or time.perf_counter()
        assert batch is not None, "a pair stream has no end"
        self.pairs += len(batch)
        self.solutions += len(batch.sequences)
        return batch


class VerifierSide:
    """A model, its solutions in a rollout store, and the worker processes of `cluster`, if any."""

    def __init__(self, experiment: Experiment, folder: Path, executor: Executor) -> None:
        self._experiment, self._executor = experiment, executor
        self._workers: ModelInWorkers[VerifierBatch] | None = None
        self.threads: int = executor.submit(torch.get_num_threads).result()
        language_model = open_model(
            experiment.models.verifier, pick_device(experiment.models.device), experiment.models.dtype
        )
        self.verifier: VerifierModel = build_verifier(experiment.verifier, language_model)
        self._start = {name: tensor.clone() for name, tensor in self.verifier.trainable_state().items()}
        self.parameters = sum(tensor.numel() for tensor in self._start.values())
        work = read_work(folder)
        self._wanted = int(work["pairs_formed"])
        self._rollouts = _rollouts(work["problems"], self.verifier)
        self._shards = RolloutShards(folder)
        self._info: ShardInfo = self._shards.write(0, "mint-00000", self._rollouts)
        self._template = VerifierTemplate(
            self.verifier.tokenizer, experiment.prompts.kind, experiment.verifier.head.kind
        )

    async def open_workers(self, stack: AsyncExitStack) -> None:
        cluster = self._experiment.cluster
        if not isinstance(cluster, LocalCluster):
            return
        assert cluster.workers is not None, "sides.py sets it"
        self.threads = cluster.workers
        pool = WorkerPool(self._experiment, cluster.workers, LocalSupply())
        stack.push_async_callback(pool.close)
        await pool.start()
        self._workers = ModelInWorkers(pool, PAIR_FIELDS, trainable_parameters(self.verifier), pair_shards)
        await self._workers.prepare()

    @property
    def solution_tokens(self) -> float:
        fingerprint = self.verifier.tokenizer.fingerprint
        lengths = [
            len(self._template.tokens(r.question, r.text, r.completion_ids, fingerprint)[0]) for r in self._rollouts
        ]
        return float(np.mean(lengths))

    async def sample(self) -> dict[str, float]:
        section = self._experiment.verifier
        self.verifier.load_trainable_state(self._start)
        if self._workers is not None:
            self._workers.weights_changed()
        gc.collect()
        began = time.perf_counter()
        with closing(PairView(self._shards, [self._info])) as view:
            source = CountingSource(
                PairSource(
                    PairStream(view, {BASE_SOURCE: 1.0}, self._experiment.seed),
                    self._template,
                    self.verifier,
                    section,
                    executor=self._executor,
                    source_fingerprint=self.verifier.tokenizer.fingerprint,
                    precision=self._experiment.models.compute_dtype,
                )
            )
            trainer = Trainer(
                self.verifier,
                PairObjective(section, self.verifier.tokenizer.pad_id),
                OptimizerSettings(section.learning_rate),  # constant and without a warmup, as TRL's here
                source,
                executor=self._executor,
                precision=self._experiment.models.compute_dtype,
                waits_for="pairs",
                workers=self._workers,
            )
            while source.pairs < self._wanted:
                await trainer.step()
            ended = time.perf_counter()
        return {
            "pairs_per_s": source.pairs / (ended - source.first_batch),
            "pairs_per_s_in_all": source.pairs / (ended - began),
            "first_batch_s": source.first_batch - began,
            "pairs": float(source.pairs),
            "solutions_forwarded": float(source.solutions),
        }


def _rollouts(problems: list[dict[str, Any]], verifier: VerifierModel) -> list[Rollout]:
    """The solutions as a mint stores them: sampled with the verifier's own vocabulary."""
    tokenizer, found = verifier.tokenizer, []
    for group, problem in enumerate(problems):
        for number, (text, correct) in enumerate(problem["solutions"]):
            ids = np.append(tokenizer.encode(text), np.int32(tokenizer.eos_id)).astype(np.int32)
            found.append(
                Rollout(
                    id=f"bench/{group:05d}/{number:02d}",
                    problem_id=problem["id"],
                    question=problem["question"],
                    reference="",
                    role=Role.HELPFUL,
                    round=0,
                    source=BASE_SOURCE,
                    step=0,
                    group=group,
                    prompt_ids=tokenizer.encode(problem["question"]),
                    completion_ids=ids,
                    logprobs=np.zeros(len(ids), dtype=np.float32),
                    spans=(VersionSpan(0, 0),),
                    finish_reason="stop",
                    text=text,
                    grade=Grade(correct=correct, well_formed=True),
                )
            )
    return found


async def serve(orders: Orders, side: VerifierSide) -> None:
    async with AsyncExitStack() as stack:
        await side.open_workers(stack)
        gc.collect()
        gc.freeze()
        orders.answer({"parameters": side.parameters, "threads": side.threads, "solution_tokens": side.solution_tokens})
        while orders.wait():
            orders.answer(await side.sample())


def main(folder: Path) -> None:
    orders = Orders()
    experiment = build_experiment(read_work(folder)["experiment"])
    with compute_executor(experiment.models.threads) as executor:
        side = VerifierSide(experiment, folder, executor)
        on_loop(serve(orders, side))
        side.verifier.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
