"""The parts of a training phase (pvg.game.round): batches, log-probs, a rule that ends it, and processes that help.

pvg.game.prover_phase chooses and opens them. An optional part that is off is an object that does nothing, so the loop
asks for no part whether it is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from pvg.models.language_model import LanguageModel
from pvg.records import Float32
from pvg.telemetry.events import Sample
from pvg.telemetry.spans import span
from pvg.training.batch import PolicyBatch
from pvg.training.losses import PolicyObjective

if TYPE_CHECKING:
    from torch import Tensor

    from pvg.game.players import Players
    from pvg.workers.models import ModelInWorkers

Progress = Mapping[str, Any]  # JSON data of a commit
Tensors = Mapping[str, "Tensor"]  # of a commit


class Batches:
    """What a phase trains on: pvg.game.round.GameBatches, or whole games (pvg.game.play_phase.PlayBatches). `metrics`:
    those of the newest batch; `done`: the number of batches so far. Here: batches that sample nothing ahead."""

    metrics: dict[str, float]
    done: int
    samples: Sequence[Sample] = ()  # of the newest batch

    @property
    def carried(self) -> int:
        """Rollouts that wait for the next batch."""
        return 0

    def start(self, version: int) -> None:
        """Begin work ahead; the engine has the trainer's `version`. Call it outside of spans."""

    async def next_batch(self) -> PolicyBatch:
        raise NotImplementedError

    async def published(self, version: int) -> dict[str, float]:
        """The engine has received `version`, which has learned from the whole batch. Returns metrics of what
        followed."""
        return {}

    async def close(self) -> None: ...

    async def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What the next batches depend on besides the weights."""
        return {}, {"done": self.done}

    def load_state(self, tensors: Tensors, progress: Progress) -> tuple[dict[str, Tensor], int]:
        """Restore a `state` whose tensors are among `tensors`. Returns the other tensors, and the number of unfinished
        rollouts that are lost."""
        self.done = progress["done"]
        return dict(tensors), 0


class TrainingStop(Protocol):
    """Decides whether a training ends early (`pvg.game.prover_phase.StopRule`, or an attack's goal). Commits store its
    state. `rewinds`: a training that ends early has the result of its last commit, and commits only while `honest`."""

    @property
    def rewinds(self) -> bool: ...

    @property
    def honest(self) -> bool: ...

    def observe(self, metrics: Mapping[str, float]) -> bool:
        """Called once per batch, after the last optimizer step on it."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Progress) -> None: ...


class Helper(Protocol):
    """What a phase opens before its first batch, such as other processes that train or score (pvg.workers)."""

    async def prepare(self) -> object: ...

    async def close(self) -> None: ...


# The log-probs that a batch's loss needs besides the sampler's: of the reference, and of the policy in training.


class BatchLogprobs(Helper):
    """Adds to a batch the log-probs that its loss needs. `learner`: the policy in training. `workers`: compute in its
    place, if given. `recomputed`: instead of the sampler's (`rollout.logprobs`). `reference`: of the KL penalty."""

    def __init__(
        self,
        players: Players,
        objective: PolicyObjective,
        learner: LanguageModel,
        *,
        workers: ModelInWorkers[PolicyBatch] | None = None,
        recomputed: bool = False,
    ) -> None:
        self._players, self._objective, self._learner, self._workers = players, objective, learner, workers
        self._recomputed = recomputed
        self.reference = players.base
        self.served = objective.needs_reference and players.engine.gives_reference  # the sampler asks for them

    async def prepare(self) -> None:
        """Open the reference, if the base prover is not where the trainer computes (Players.place_base)."""
        players = self._players
        here = self._objective.needs_reference and not self.served and self._workers is None
        if here and players.base.device != players.device:
            self.reference = await players.compute(self._open_reference)

    async def close(self) -> None:
        if self.reference is not self._players.base:
            self.reference.close()

    def _open_reference(self) -> LanguageModel:
        """A copy of the base prover, with products in the precision of passes."""
        from pvg.models.adapters import round_products

        reference = self._players.base.copy()
        round_products(reference.module, self._players.models.compute_dtype, head=True)
        reference.module.to(self._players.device)
        return reference

    async def add(self, batch: PolicyBatch) -> PolicyBatch:
        """`batch` with log-probs:

        - The reference's, if the loss has a KL term and the rollouts do not have them.
        - The current policy's, if the loss clips around them and the batch has several steps.
        - Recomputed ones instead of the sampler's, with `rollout.logprobs = "recomputed"`.
        """
        objective = self._objective
        if objective.needs_reference and batch.reference_logprobs is None:
            batch = replace(batch, reference_logprobs=await self._compute("reference", batch))
        if self._recomputed:
            batch = replace(batch, sampled_logprobs=await self._compute("recompute", batch))
        if objective.needs_start:
            return replace(batch, proximal_logprobs=await self._compute("recompute", batch))
        stale_N = batch.versions_N < self._players.engine.version
        if objective.decoupled and stale_N.any():
            if objective.one_step:
                return replace(batch, stale_N=stale_N)
            stale_M = np.flatnonzero(stale_N)
            recomputed = await self._compute("recompute", batch.select(stale_M))
            proximal = list(batch.sampled_logprobs)  # fresh rows: the sampler is the policy at the start of the batch
            for row, logprobs in zip(stale_M, recomputed, strict=True):
                proximal[row] = logprobs
            batch = replace(batch, proximal_logprobs=proximal)
        return batch

    async def _compute(self, part: Literal["reference", "recompute"], batch: PolicyBatch) -> list[Float32]:
        """The log-probs under the base prover ("reference") or the policy in training ("recompute")."""
        if self._workers is not None:
            with span(part):
                return await self._workers.logprobs("base" if part == "reference" else "learner", batch)
        model = self.reference if part == "reference" else self._learner

        def recompute() -> list[Float32]:
            # The span starts here, so the wait for the thread does not count as training.
            with span(part, device=True):
                found = self._objective.recompute(model.module, batch)
            first, trained = (next(each.module.parameters()) for each in (model, self._learner))
            if part == "reference" and first is not trained:  # adapters are trained on the base itself
                model.rest()  # training needs the memory now
            return found

        return await self._players.compute(recompute)
