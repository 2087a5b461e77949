"""Score backends: the `ScoreBackend` protocol below `VerifierScorer`'s queue and cache, and `TorchBackend`.

Invariant: a backend uses the weights that its verifier has when `submit` is called, or later ones. It does not know
which, so the scorer discards work in flight when the weights change.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pvg.models.padding import PaddedBatch, batches, rectangle
from pvg.records import Float32, Int32
from pvg.telemetry.spans import span, submit_in
from pvg.verifier.cache import ScoreCache, ScoreKey
from pvg.verifier.protocol import ScoringModel


@dataclass(frozen=True, slots=True, eq=False)
class ScoreInput:
    """A solution in the verifier's input format: `ids` int32 [L], the solution starts at `prompt_length`; `digest`
    identifies them; `rollout_id` is for messages."""

    ids: Int32
    prompt_length: int
    digest: bytes
    rollout_id: str


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """The result of a batch: scores float32 [n], the start of the work on each (perf_counter), the batch's total
    seconds, and its number of forward passes or server requests."""

    scores: Float32
    began: Sequence[float]
    seconds: float
    passes: int = 1


class ScoreBackend(Protocol):
    """Computes the scores of one verifier. `references`: values of solutions that do not depend on its version."""

    references: ScoreCache

    def batches(self, lengths: Sequence[int]) -> list[NDArray[np.int64]]:
        """Splits inputs of these lengths: the row numbers of each batch for `submit`, in order."""
        ...

    def weights_changed(self) -> None:
        """Tells the backend that the verifier's weights have changed."""
        ...

    def submit(self, inputs: Sequence[ScoreInput]) -> asyncio.Future[ScoredBatch]:
        """Start a batch. The caller waits for it before the next one. If the future is a Task, the caller may cancel
        it; it then ends when nothing uses the model any more."""
        ...


class TorchBackend:
    """Runs forward passes of `model` in the executor's thread. The caller owns the model."""

    def __init__(
        self,
        model: ScoringModel,
        template_key: str,
        references: ScoreCache,
        *,
        token_budget: int,
        executor: Executor,
    ) -> None:
        self.references = references  # used only by the forward pass, of which there is one at a time
        self._model = model
        self._template_key = template_key
        self._token_budget = token_budget
        self._executor = executor

    def batches(self, lengths: Sequence[int]) -> list[NDArray[np.int64]]:
        return batches(lengths, self._token_budget, self._model.max_length)

    def weights_changed(self) -> None:
        """Does nothing: the forward passes use the model itself."""

    def submit(self, inputs: Sequence[ScoreInput]) -> asyncio.Future[ScoredBatch]:
        return submit_in(self._executor, self._forward, inputs)

    def _forward(self, inputs: Sequence[ScoreInput]) -> ScoredBatch:
        """Runs in the executor's thread."""
        began = time.perf_counter()
        with torch.inference_mode(), span("score_service", device=True):
            packed = rectangle(
                [entry.ids for entry in inputs],
                [entry.prompt_length for entry in inputs],
                self._model.tokenizer.pad_id,
                self._model.device,
                token_budget=self._token_budget,
                max_length=self._model.max_length,
            )
            scores_B = self._model(*packed, self._reference(inputs, packed))
            scores: Float32 = scores_B[: len(inputs)].cpu().numpy()
        return ScoredBatch(scores, [began] * len(inputs), time.perf_counter() - began)

    def _reference(self, inputs: Sequence[ScoreInput], packed: PaddedBatch) -> Tensor | None:
        """The head's references [B]. Computes none if all rows are in the cache; their version does not matter."""
        if not self._model.needs_reference:
            return None
        keys = [ScoreKey("", self._template_key, entry.digest) for entry in inputs]
        known = [self.references.get(key) for key in keys]
        if all(value is not None for value in known):
            repeated = known + known[:1] * (len(packed.lengths_B) - len(known))
            return torch.tensor(repeated, dtype=torch.float32, device=packed.ids_BL.device)
        reference_B = self._model.reference(*packed)
        for key, value in zip(keys, reference_B.tolist(), strict=False):
            self.references.put(key, value)
        return reference_B
