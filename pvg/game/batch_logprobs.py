"""The log-probs that a batch's loss needs besides the sampler's: of the reference, and of the policy in training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from pvg.models.language_model import LanguageModel
from pvg.records import Float32, Rollout
from pvg.telemetry.spans import span
from pvg.training.batch import PolicyBatch, batch_of
from pvg.training.losses import PolicyObjective

if TYPE_CHECKING:
    from pvg.game.players import Players
    from pvg.workers.training import ModelInWorkers

Compute = Callable[[Sequence[Rollout]], Awaitable[list[Float32]]]


class EarlyReference:
    """Computes log-probs under the frozen reference while others sample the rest of a batch: servers, or other workers.

        early = EarlyReference(compute)        # compute(rollouts): their log-probs under the reference
        early.start()                          # outside of spans: its work overlaps with the wait
        async with early.compute_passes():          # around a wait for rollouts
            ...                                # early.arrived(rollouts), for each complete group
        known = early.take(rollouts, oldest)   # the available log-probs, by rollout id
        await early.close()

    While others sample, the trainer's processes are idle. One forward pass takes all groups that have arrived; groups
    that arrive during it go into the next pass. No pass starts outside of `compute_passes`, so no pass delays the
    trainer. With an engine in the trainer's processes there is no gain, because sampling needs the same threads.

    Invariant: the log-probs equal those of one pass over the whole batch, up to rounding. Call all methods from the
    thread of one event loop.
    """

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._arrived: list[Rollout] = []
        self._known: dict[str, tuple[int, Float32]] = {}  # rollout id -> version, log-probs
        self._waiting = False
        self._wanted = asyncio.Event()  # set when there are rollouts to compute and the trainer waits
        self._pass = asyncio.Lock()  # held during a forward pass
        self._worker: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._worker = asyncio.create_task(self._work(), name="early reference")

    async def close(self) -> None:
        """Wait for the current pass, then stop. Does nothing before `start`."""
        if self._worker is not None:
            worker, self._worker = self._worker, None
            async with self._pass:
                worker.cancel()
            await asyncio.wait([worker])

    def arrived(self, rollouts: Sequence[Rollout]) -> None:
        """Add a complete group; the rest of its batch is still in flight."""
        self._arrived += rollouts
        if self._waiting:
            self._wanted.set()

    @asynccontextmanager
    async def compute_passes(self) -> AsyncIterator[None]:
        """Compute arrived groups while the block runs. The block ends after the last pass. Raises the exception of a
        failed pass."""
        self._waiting = True
        if self._arrived:
            self._wanted.set()
        try:
            yield
        finally:
            self._waiting = False
            self._wanted.clear()
            async with self._pass:
                pass
        if self._worker is not None and self._worker.done():
            self._worker.result()

    def take(self, rollouts: Sequence[Rollout], oldest: int) -> dict[str, Float32]:
        """The log-probs of those `rollouts` that were computed early, by id. Forgets them, and all rollouts older than
        version `oldest`, because no step trains on those."""
        ids = {rollout.id for rollout in rollouts}
        found = {id_: logprobs for id_, (_, logprobs) in self._known.items() if id_ in ids}
        self._known = {id_: kept for id_, kept in self._known.items() if id_ not in ids and kept[0] >= oldest}
        self._arrived = [rollout for rollout in self._arrived if rollout.id not in ids and rollout.version >= oldest]
        return found

    async def _work(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if not (self._waiting and self._arrived):
                continue
            rollouts, self._arrived = self._arrived, []
            async with self._pass:
                found = await self._compute(rollouts)
            self._known |= {r.id: (r.version, logprobs) for r, logprobs in zip(rollouts, found, strict=True)}


class LateReference:
    """In place of an `EarlyReference` where the trainer's threads sample: nothing is computed early."""

    def start(self) -> None: ...

    async def close(self) -> None: ...

    def arrived(self, rollouts: Sequence[Rollout]) -> None: ...

    @asynccontextmanager
    async def compute_passes(self) -> AsyncIterator[None]:
        yield

    def take(self, rollouts: Sequence[Rollout], oldest: int) -> dict[str, Float32]:
        return {}


class BatchLogprobs:
    """Adds to a batch the log-probs that its loss needs. `learner`: the policy in training. `workers`: compute in its
    place, if given. `recomputed`: instead of the sampler's (`rollout.logprobs`). `staleness_budget`: the most versions
    that a rollout may be behind."""

    def __init__(
        self,
        players: Players,
        objective: PolicyObjective,
        learner: LanguageModel,
        *,
        workers: ModelInWorkers[PolicyBatch] | None = None,
        recomputed: bool = False,
        staleness_budget: int = 0,
    ) -> None:
        self._players, self._objective, self._learner, self._workers = players, objective, learner, workers
        self._recomputed, self._budget = recomputed, staleness_budget
        early = objective.needs_reference and players.samples_elsewhere
        self.early = EarlyReference(self._reference_of) if early else LateReference()

    async def add(self, batch: PolicyBatch, rollouts: Sequence[Rollout]) -> PolicyBatch:
        """`batch`, which consists of these `rollouts`, with log-probs:

        - The reference's, if the loss has a KL term.
        - The current policy's, if the loss clips around them and the batch has several steps.
        - Recomputed ones instead of the sampler's, with `rollout.logprobs = "recomputed"`.
        """
        objective = self._objective
        if objective.needs_reference:
            batch = replace(batch, reference_logprobs=await self.reference(batch, rollouts))
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

    async def reference(self, batch: PolicyBatch, rollouts: Sequence[Rollout]) -> list[Float32]:
        """The reference's log-probs: those computed early, and the rest computed now."""
        known = self.early.take(rollouts, self._players.engine.version - self._budget)
        missing_M = np.flatnonzero([rollout.id not in known for rollout in rollouts])
        if len(missing_M):
            rest = batch if len(missing_M) == len(batch) else batch.select(missing_M)
            for row, logprobs in zip(missing_M.tolist(), await self._compute("reference", rest), strict=True):
                known[rollouts[row].id] = logprobs
        return [known[rollout.id] for rollout in rollouts]

    async def _reference_of(self, rollouts: Sequence[Rollout]) -> list[Float32]:
        return await self._compute("reference", batch_of(rollouts, np.zeros(len(rollouts), dtype=np.float32)))

    async def _compute(self, part: Literal["reference", "recompute"], batch: PolicyBatch) -> list[Float32]:
        """The log-probs under the base prover ("reference") or the policy in training ("recompute")."""
        if self._workers is not None:
            with span(part):
                return await self._workers.logprobs("base" if part == "reference" else "learner", batch)
        model = self._players.base if part == "reference" else self._learner

        def recompute() -> list[Float32]:
            # The span starts here, so the wait for the thread does not count as training.
            with span(part, device=True):
                return self._objective.recompute(model.module, batch)

        return await self._players.compute(recompute)
