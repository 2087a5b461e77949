"""`WorkerBackend`: a `ScoreBackend` whose forward passes run in the workers of a pool.

A score's bits do not depend on its batch (pvg.models.packing.pad_batch), so the rows are divided such that all workers
have the same work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pvg.models.heads import VerifierEnsemble, VerifierModel
from pvg.models.packing import padded_width
from pvg.verifier.scorer import ScoreBackend, ScoreCache, ScoredBatch, ScoreInput, ScoringModel
from pvg.workers.frames import Frame
from pvg.workers.pool import ModelCopies, WorkerPool
from pvg.workers.training import balanced

Int64 = NDArray[np.int64]


class ScoringSlots:
    """The workers' copies of the verifiers of a run: one for each verifier that is open."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self._copies: list[tuple[ScoringModel, ModelCopies]] = []
        self._closing: set[asyncio.Task[None]] = set()

    def of(self, model: ScoringModel) -> ModelCopies:
        """The copies of a model, which the caller owns. Closes those of models that are closed."""
        for entry in [entry for entry in self._copies if entry[0].closed]:
            self._copies.remove(entry)
            task = asyncio.get_running_loop().create_task(entry[1].close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        found = next((copies for known, copies in self._copies if known is model), None)
        if found is None:
            members, aggregation = 1, None
            if isinstance(model, VerifierEnsemble):
                members, aggregation = len(model.members), model.aggregation
            fields = {"what": "scorer", "members": members, "aggregation": aggregation}
            found = ModelCopies(self.pool, range(self.pool.count), fields, lambda: _tensors(model))
            self._copies.append((model, found))
        found.weights_changed()
        return found


def _tensors(model: ScoringModel) -> dict[str, Tensor]:
    if isinstance(model, VerifierModel):
        return model.trainable_state()
    own = dict(model.trainable_state())
    for number, member in enumerate(model.members):
        own |= {f"{number}.{name}": tensor for name, tensor in member.trainable_state().items()}
    return own


class WorkerBackend(ScoreBackend):
    """Scores with the workers' copies of a model. The model may change before `weights_changed`."""

    def __init__(self, slots: ScoringSlots, model: ScoringModel, token_budget: int) -> None:
        self.references = ScoreCache(1)  # none
        self._copies, self._pool = slots.of(model), slots.pool
        self._model = model
        self._token_budget = token_budget

    def batches(self, lengths: Sequence[int]) -> list[Int64]:
        """All inputs at once: `submit` divides them among the workers."""
        return [np.arange(len(lengths))] if len(lengths) else []

    def weights_changed(self) -> None:
        self._copies.weights_changed()

    def submit(self, inputs: Sequence[ScoreInput]) -> asyncio.Future[ScoredBatch]:
        return asyncio.create_task(self._scored(inputs))

    async def _scored(self, inputs: Sequence[ScoreInput]) -> ScoredBatch:
        slot = await self._copies.ready()
        parts = self._parts([len(entry.ids) for entry in inputs])
        asked = []
        for shard, rows in enumerate(parts):
            fields = {
                "slot": slot,
                "token_budget": self._token_budget,
                "ids": [inputs[row].ids for row in rows.tolist()],
                "prompt_lengths": [inputs[row].prompt_length for row in rows.tolist()],
            }
            asked.append(self._pool.submit(self._pool.sampling[shard], Frame("score", fields)))
        scores_N, passes = np.empty(len(inputs), dtype=np.float32), 0
        for rows, answer in zip(parts, await asyncio.gather(*asked), strict=True):
            scores_N[rows] = answer.fields["scores"]
            passes += answer.fields["passes"]
        return ScoredBatch(scores_N, passes)

    def _parts(self, lengths: Sequence[int]) -> list[Int64]:
        """Row numbers for each worker that scores now, with the same total of padded tokens."""
        widths_N = np.array([padded_width(length, self._model.max_length) for length in lengths], dtype=np.int64)
        shard_N = balanced(widths_N, len(self._pool.sampling))
        return [np.flatnonzero(shard_N == shard) for shard in np.unique(shard_N).tolist()]
