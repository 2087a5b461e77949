"""The driver's models in the workers: those in training (prover, and verifier of a phase), and those that score.

The driver keeps the weights, the optimizer and everything that depends on the whole batch. Workers get micro-batches
whose weights in the loss are fixed, and return sums. A score's bits do not depend on its batch
(pvg.models.packing.pad_batch), so the rows are divided such that all workers have the same work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.models.heads import VerifierEnsemble
from pvg.models.packing import distinct_rows, padded_width
from pvg.records import Float32
from pvg.training.batch import PolicyBatch
from pvg.training.trainer import GradientWorkers, PartGradient
from pvg.verifier.data import VerifierBatch
from pvg.verifier.losses import clusters
from pvg.verifier.scorer import ScoreBackend, ScoreCache, ScoredBatch, ScoreInput, ScoringModel
from pvg.workers.frames import Frame
from pvg.workers.pool import WorkerPool

BatchT = TypeVar("BatchT")
Int64 = NDArray[np.int64]


def policy_fields(training: Training, rollout: Rollouts) -> dict[str, Any]:
    """How a worker opens the prover and its loss."""
    return {"what": "policy", "training": training.model_dump_json(), "rollout": rollout.model_dump_json()}


# --- shards -----------------------------------------------------------------------------------------------------------


def balanced(sizes_K: Int64, shards: int) -> Int64:
    """The shard of each of K items, such that the shards have similar total sizes: the largest item first, each to the
    shard with the least. Depends on the sizes alone."""
    shard_K = np.zeros(len(sizes_K), dtype=np.int64)
    loads = [0] * shards
    for item in np.argsort(-sizes_K, kind="stable").tolist():
        shard = loads.index(min(loads))
        shard_K[item] = shard
        loads[shard] += int(sizes_K[item])
    return shard_K


def policy_rows(batch: PolicyBatch, shards: int) -> list[Int64]:
    """Row numbers of at most `shards` parts: whole groups, with similar numbers of tokens. A row that repeats another
    one counts as 0 tokens. Rows of weight 0 are left out."""
    weights_N = batch.row_weights_N
    rows = np.arange(len(batch)) if weights_N is None else np.flatnonzero(weights_N)
    if not len(rows):
        return []
    keys_N2 = np.stack([batch.role_ids_N[rows].astype(np.int64), batch.group_ids_N[rows].astype(np.int64)], axis=1)
    group_N = np.unique(keys_N2, axis=0, return_inverse=True)[1].reshape(-1)
    firsts_U, _ = distinct_rows([batch.sequences[row] for row in rows], batch.prompt_lengths[rows])
    tokens_N = np.zeros(len(rows), dtype=np.int64)
    tokens_N[firsts_U] = batch.lengths_N[rows][firsts_U]
    shard_N = balanced(np.bincount(group_N, weights=tokens_N).astype(np.int64), shards)[group_N]
    return [rows[shard_N == shard] for shard in np.unique(shard_N).tolist()]


def policy_shards(batch: PolicyBatch, shards: int) -> list[PolicyBatch]:
    """A prepared batch in the parts of `policy_rows`."""
    return [batch.select(rows) for rows in policy_rows(batch, shards)]


def pair_shards(batch: VerifierBatch, shards: int) -> list[VerifierBatch]:
    """The batch in at most `shards` parts. Pairs that share solutions stay together, so each solution is computed, and
    penalised, in one part."""
    cluster_N = clusters(batch.pairs_M2, len(batch.sequences))
    cluster_M = np.unique(cluster_N[batch.pairs_M2[:, 0]], return_inverse=True)[1].reshape(-1)
    lengths_N, tokens_K = batch.lengths_N, np.zeros(int(cluster_M.max()) + 1, dtype=np.int64)
    for side in (0, 1):
        rows, firsts = np.unique(batch.pairs_M2[:, side], return_index=True)
        np.add.at(tokens_K, cluster_M[firsts], lengths_N[rows])
    shard_M = balanced(tokens_K, shards)[cluster_M]
    return [batch.select(np.flatnonzero(shard_M == shard)) for shard in np.unique(shard_M).tolist()]


# --- the models -------------------------------------------------------------------------------------------------------


class ModelCopies:
    """Copies of one model in the workers of some shards. They open at their first use. `fields`: how a worker opens the
    model. `tensors`: its weights now."""

    def __init__(
        self, pool: WorkerPool, shards: range, fields: Mapping[str, Any], tensors: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        self._pool, self._shards, self._fields, self._tensors = pool, shards, fields, tensors
        self._memory, self._slot = pool.weights(), next(pool.numbers)
        self._changes, self._sent = 0, -1  # the weights' changes, and how many of them the workers have; -1: not open
        self._loading = asyncio.Lock()

    def weights_changed(self) -> None:
        self._changes += 1

    async def prepare(self) -> int:
        """The slot of the copies, once all have the model's weights. Goes on if the caller is cancelled."""
        return await asyncio.shield(self._prepare())

    async def _prepare(self) -> int:
        async with self._loading:
            if self._sent < 0:
                await self._pool.ask(self._shards, Frame("open", {**self._fields, "slot": self._slot}))
            if self._sent != self._changes:
                changes, place = self._changes, await self._memory.write(self._tensors())
                await self._pool.ask(self._shards, Frame("load", {"slot": self._slot, "place": place}))
                self._sent = changes
            return self._slot

    async def close(self) -> None:
        async with self._loading:
            if self._sent >= 0 and not self._pool.failed:
                await self._pool.ask(self._shards, Frame("close", {"slot": self._slot}))
            self._sent = -1
            self._memory.close()


class ModelInWorkers(ModelCopies, GradientWorkers[BatchT], Generic[BatchT]):
    """A model in training, in the shards that train when it is created. `parameters` are the trainer's own, by name.
    `cut`: a batch into at most so many shards. `gradients` blocks: call it from a thread."""

    def __init__(
        self,
        pool: WorkerPool,
        fields: Mapping[str, Any],
        parameters: Mapping[str, Tensor],
        cut: Callable[[BatchT, int], list[BatchT]],
    ) -> None:
        super().__init__(pool, pool.training, fields, lambda: parameters)
        self._cut, self._loop = cut, asyncio.get_running_loop()

    def shards(self, batch: BatchT) -> list[BatchT]:
        return self._cut(batch, len(self._shards))

    def gradients(self, parts: Sequence[Sequence[BatchT]], state: Mapping[str, Any]) -> list[PartGradient]:
        asked = self._asked("gradient", [{"state": state, "micro_batches": list(part)} for part in parts])
        found = [answer.fields for answer in asyncio.run_coroutine_threadsafe(asked, self._loop).result()]
        return [PartGradient(torch.from_numpy(one["gradient"]), one["losses"], one["metrics"]) for one in found]

    async def logprobs(self, of: Literal["base", "learner"], batch: PolicyBatch) -> list[Float32]:
        """As `PolicyObjective.recompute`, under the base prover or the policy in training."""
        rows = policy_rows(batch, len(self._shards))
        answers = await self._asked("logprobs", [{"of": of, "batch": batch.select(own)} for own in rows])
        found: list[Float32] = [np.zeros(0, dtype=np.float32)] * len(batch)
        for answer, own in zip(answers, rows, strict=True):
            for row, logprobs in zip(own.tolist(), answer.fields["logprobs"], strict=True):
                found[row] = logprobs
        return found

    async def _asked(self, kind: str, parts: Sequence[Mapping[str, Any]]) -> list[Frame]:
        slot = await self.prepare()
        given = zip(self._shards, parts, strict=False)
        asked = [self._pool.submit(shard, Frame(kind, {**fields, "slot": slot})) for shard, fields in given]
        return list(await asyncio.gather(*asked))


class ScoringSlots:
    """The workers' copies of the verifiers of a run that are open."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self._copies: dict[ScoringModel, ModelCopies] = {}

    def of(self, model: ScoringModel) -> ModelCopies:
        """The copies of a model, which the caller owns. Closes those of models that are closed."""
        for closed in [known for known in self._copies if known.closed]:
            self.pool.background(self._copies.pop(closed).close(), "closing of a verifier")
        if model not in self._copies:
            fields: dict[str, Any] = {"what": "scorer", "members": 1, "aggregation": None}
            if isinstance(model, VerifierEnsemble):
                fields |= {"members": len(model.members), "aggregation": model.aggregation}
            self._copies[model] = ModelCopies(self.pool, range(self.pool.count), fields, lambda: tensors_of(model))
        self._copies[model].weights_changed()
        return self._copies[model]


def tensors_of(model: ScoringModel) -> dict[str, Tensor]:
    """What training changes in a verifier, or in an ensemble and its members: the tensors themselves."""
    own = model.trainable_state()
    for number, member in enumerate(model.members if isinstance(model, VerifierEnsemble) else ()):
        own |= {f"{number}.{name}": tensor for name, tensor in member.trainable_state().items()}
    return own


class WorkerBackend(ScoreBackend):
    """Scores with the workers' copies of a model. The model may change before `weights_changed`."""

    def __init__(self, slots: ScoringSlots, model: ScoringModel, token_budget: int) -> None:
        self.references = ScoreCache(1)  # none
        self._copies, self._pool = slots.of(model), slots.pool
        self._model, self._token_budget = model, token_budget

    def batches(self, inputs: Sequence[ScoreInput]) -> list[Int64]:
        return [np.arange(len(inputs))] if inputs else []

    def weights_changed(self) -> None:
        self._copies.weights_changed()

    def submit(self, inputs: Sequence[ScoreInput]) -> asyncio.Future[ScoredBatch]:
        return asyncio.create_task(self._scored(inputs))

    async def _scored(self, inputs: Sequence[ScoreInput]) -> ScoredBatch:
        """Each worker that scores now gets rows with the same total of padded tokens."""
        common = {"slot": await self._copies.prepare(), "token_budget": self._token_budget}
        widths_N = np.array([padded_width(len(entry.ids), self._model.max_length) for entry in inputs], dtype=np.int64)
        shard_N = balanced(widths_N, len(self._pool.sampling))
        parts = [np.flatnonzero(shard_N == shard) for shard in np.unique(shard_N).tolist()]
        asked = []
        for shard, rows in zip(self._pool.sampling, parts, strict=False):
            own = [inputs[row] for row in rows.tolist()]
            fields = {"ids": [one.ids for one in own], "prompt_lengths": [one.prompt_length for one in own]}
            asked.append(self._pool.submit(shard, Frame("score", {**common, **fields})))
        scores_N, passes = np.empty(len(inputs), dtype=np.float32), 0
        for rows, answer in zip(parts, await asyncio.gather(*asked), strict=True):
            scores_N[rows] = answer.fields["scores"]
            passes += answer.fields["passes"]
        return ScoredBatch(scores_N, passes)
