"""Models in training, whose gradients the workers compute: the prover, and the verifier of a phase.

    model = ModelInWorkers(pool, policy_fields(experiment), trainable_parameters(learner.module), policy_shards)
    trainer = Trainer(..., workers=model)
    logprobs = await model.logprobs("base", batch)

The driver keeps the weights, the optimizer and everything that depends on the whole batch. Workers get micro-batches
whose weights in the loss are fixed, and return sums.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pvg.config.base import Section
from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.models.packing import distinct_rows
from pvg.records import Float32
from pvg.telemetry.metrics import Metrics
from pvg.training.batch import PolicyBatch
from pvg.training.trainer import GradientWorkers, PartGradient
from pvg.verifier.data import VerifierBatch
from pvg.verifier.losses import clusters
from pvg.workers.frames import Frame
from pvg.workers.pool import ModelCopies, WorkerPool

BatchT = TypeVar("BatchT")
Int64 = NDArray[np.int64]


def policy_fields(training: Training, rollout: Rollouts) -> dict[str, Any]:
    """How a worker opens the prover and its loss."""
    return {"what": "policy", "training": plain(training), "rollout": plain(rollout)}


PAIR_FIELDS = {"what": "pairs"}  # how a worker opens the verifier of its experiment, and its loss


def plain(section: Section) -> dict[str, Any]:
    """A section as JSON data."""
    return section.model_dump(mode="json", exclude_none=True)


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
    one costs nothing, so it counts as 0 tokens. Rows of weight 0 are left out."""
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


class ModelInWorkers(ModelCopies, GradientWorkers[BatchT], Generic[BatchT]):
    """A model in training, in the shards that train when it is created. `parameters` are the trainer's own, by name;
    the workers get them before they compute with them. `gradients` blocks: call it from a thread, not from
    the event loop."""

    def __init__(
        self,
        pool: WorkerPool,
        fields: Mapping[str, Any],
        parameters: Mapping[str, Tensor],
        cut: Callable[[BatchT, int], list[BatchT]],
    ) -> None:
        """`fields`: how a worker opens the model, which it does before its first work. `cut`: a batch into at most so
        many shards."""
        super().__init__(
            pool, pool.training, fields, lambda: {name: tensor.detach() for name, tensor in parameters.items()}
        )
        self._cut = cut
        self._loop = asyncio.get_running_loop()

    def shards(self, batch: BatchT) -> list[BatchT]:
        return self._cut(batch, len(self._shards))

    async def prepare(self) -> None:
        """Open the workers' copies before their first work."""
        await self.ready()

    def gradients(self, parts: Sequence[Sequence[BatchT]], state: Mapping[str, Any]) -> list[PartGradient]:
        asked = self._asked("gradient", [{"state": state, "micro_batches": list(part)} for part in parts])
        answers = asyncio.run_coroutine_threadsafe(asked, self._loop).result()
        return [PartGradient(torch.from_numpy(a.fields["gradient"]), *read_sums(a.fields)) for a in answers]

    async def logprobs(self, of: Literal["base", "learner"], batch: PolicyBatch) -> list[Float32]:
        """As `PolicyObjective.recompute`, under the base prover or the policy in training."""
        rows = policy_rows(batch, len(self._shards))
        parts = [batch.select(own) for own in rows]
        answers = await self._asked("logprobs", [{"of": of, "batch": part} for part in parts])
        found: list[Float32] = [np.zeros(0, dtype=np.float32)] * len(batch)
        for answer, part, own in zip(answers, parts, rows, strict=True):
            values = np.split(answer.fields["logprobs"], np.cumsum(part.completion_lengths_N)[:-1])
            for row, logprobs in zip(own.tolist(), values, strict=True):
                found[row] = logprobs
        return found

    async def _asked(self, kind: str, parts: Sequence[Mapping[str, Any]]) -> list[Frame]:
        """The answers of one shard for each part."""
        slot = await self.ready()
        frames = [Frame(kind, {**fields, "slot": slot}) for fields in parts]
        asked = [self._pool.submit(shard, frame) for shard, frame in zip(self._shards, frames, strict=False)]
        return list(await asyncio.gather(*asked))


def sums_of(losses: Sequence[Tensor], metrics: Metrics) -> dict[str, Any]:
    """The losses and metrics of micro-batches for a frame."""
    names, values_M2 = metrics.as_array()
    return {"losses": torch.stack(list(losses)).tolist() if losses else [], "names": names, "metrics": values_M2}


def read_sums(fields: Mapping[str, Any]) -> tuple[list[float], Metrics]:
    """The inverse of `sums_of`."""
    return fields["losses"], Metrics.from_array(fields["names"], fields["metrics"])
