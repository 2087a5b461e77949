"""`WorkerBackend`: a `ScoreBackend` whose forward passes run in the workers of a pool.

A score's bits do not depend on its batch (pvg.models.packing.pad_batch), so the rows are divided such that all workers
have the same work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pvg.models.heads import VerifierEnsemble, VerifierModel
from pvg.models.packing import batches, padded_width
from pvg.verifier.scorer import ScoreBackend, ScoreCache, ScoredBatch, ScoreInput, ScoreKey, ScoringModel
from pvg.workers.frames import Array, Frame
from pvg.workers.pool import WorkerPool
from pvg.workers.training import balanced

Int64 = NDArray[np.int64]


class ScoringSlot:
    """The workers' copies of `model`, which the caller owns. They are opened at the first use."""

    def __init__(self, pool: WorkerPool, model: ScoringModel) -> None:
        self.model = model
        self.pool = pool
        self._slot: int | None = None
        self._changes, self._sent = 0, -1  # the weights' changes, and how many of them the workers have
        self._loading = asyncio.Lock()

    def weights_changed(self) -> None:
        self._changes += 1

    async def ready(self) -> int:
        """The slot's number, once all copies have the model's weights."""
        async with self._loading:
            if self._slot is None:
                self._slot = await self.pool.open(self._fields())
            if self._sent != self._changes:
                changes = self._changes
                await self.pool.load(self._slot, self._tensors())
                self._sent = changes
            return self._slot

    async def close(self) -> None:
        async with self._loading:
            if self._slot is not None:
                slot, self._slot = self._slot, None
                await self.pool.close_slot(slot)

    def _fields(self) -> dict[str, Any]:
        model = self.model
        if isinstance(model, VerifierEnsemble):
            return {"what": "scorer", "members": len(model.members), "aggregation": model.aggregation}
        return {"what": "scorer", "members": 1, "aggregation": None}

    def _tensors(self) -> dict[str, Tensor]:
        model = self.model
        if isinstance(model, VerifierEnsemble):
            own = dict(model.trainable_state())
            for number, member in enumerate(model.members):
                own |= {f"{number}.{name}": tensor for name, tensor in member.trainable_state().items()}
            return own
        assert isinstance(model, VerifierModel)
        return model.trainable_state()


class ScoringSlots:
    """The slots of a run: one for each verifier that is open."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._slots: list[ScoringSlot] = []
        self._closing: set[asyncio.Task[None]] = set()

    def of(self, model: ScoringModel) -> ScoringSlot:
        """The model's slot, which loads the model's weights again before its next use. Closes the slots of models that
        are closed."""
        for slot in [slot for slot in self._slots if slot.model.closed]:
            self._slots.remove(slot)
            task = asyncio.get_running_loop().create_task(slot.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        found = next((slot for slot in self._slots if slot.model is model), None)
        if found is None:
            found = ScoringSlot(self._pool, model)
            self._slots.append(found)
        found.weights_changed()
        return found

    async def prepare(self, model: ScoringModel) -> None:
        """Open the workers' copies of `model` now."""
        await self.of(model).ready()


class WorkerBackend(ScoreBackend):
    """Scores with the workers' copies of a model. The model may change before `weights_changed`."""

    def __init__(self, slot: ScoringSlot, template_key: str, references: ScoreCache, token_budget: int) -> None:
        self.references = references
        self._slot = slot
        self._pool = slot.pool
        self._model = slot.model
        self._template_key = template_key
        self._token_budget = token_budget

    def batches(self, lengths: Sequence[int]) -> list[Int64]:
        """All inputs at once: `submit` divides them among the workers."""
        return [np.arange(len(lengths))] if len(lengths) else []

    def weights_changed(self) -> None:
        self._slot.weights_changed()

    def submit(self, inputs: Sequence[ScoreInput]) -> asyncio.Future[ScoredBatch]:
        return asyncio.create_task(self._scored(inputs))

    async def _scored(self, inputs: Sequence[ScoreInput]) -> ScoredBatch:
        slot = await self._slot.ready()
        lengths = [len(entry.ids) for entry in inputs]
        known_N = self._known(inputs)
        parts = self._parts(lengths)
        passes = 0
        asked = []
        for shard, rows in enumerate(parts):
            own = batches([lengths[row] for row in rows.tolist()], self._token_budget, self._model.max_length)
            passes += len(own)
            fields = {
                "slot": slot,
                "token_budget": self._token_budget,
                "ids": [inputs[row].ids for row in rows.tolist()],
                "batches": own,
                "prompt_lengths": np.array([inputs[row].prompt_length for row in rows.tolist()], dtype=np.int64),
                "references": None if known_N is None else known_N[rows],
            }
            asked.append(self._pool.submit(self._pool.sampling[shard], Frame("score", fields)))
        scores_N = np.empty(len(inputs), dtype=np.float32)
        for rows, answer in zip(parts, await asyncio.gather(*asked), strict=True):
            scores_N[rows] = answer.fields["scores"]
            if known_N is not None:
                self._keep(inputs, rows, answer.fields["references"])
        return ScoredBatch(scores_N, passes)

    def _parts(self, lengths: Sequence[int]) -> list[Int64]:
        """Row numbers for each worker that scores now, with the same total of padded tokens."""
        widths_N = np.array([padded_width(length, self._model.max_length) for length in lengths], dtype=np.int64)
        shard_N = balanced(widths_N, len(self._pool.sampling))
        return [np.flatnonzero(shard_N == shard) for shard in np.unique(shard_N).tolist()]

    def _known(self, inputs: Sequence[ScoreInput]) -> Array | None:
        """The known references float32 [N], NaN where not known; None if the head needs none."""
        if not self._model.needs_reference:
            return None
        found = [self.references.get(ScoreKey("", self._template_key, entry.digest)) for entry in inputs]
        return np.array([np.nan if value is None else value for value in found], dtype=np.float32)

    def _keep(self, inputs: Sequence[ScoreInput], rows: Int64, references_N: Array) -> None:
        for row, value in zip(rows.tolist(), references_N.tolist(), strict=True):
            self.references.put(ScoreKey("", self._template_key, inputs[row].digest), value)


class ScoringCopies:
    """The workers' copies of one verifier: `prepare` opens them before its first score. They close with the verifier's
    slot."""

    def __init__(self, slots: ScoringSlots, verifier: ScoringModel) -> None:
        self._slots, self._verifier = slots, verifier

    async def prepare(self) -> None:
        await self._slots.prepare(self._verifier)

    async def close(self) -> None: ...
