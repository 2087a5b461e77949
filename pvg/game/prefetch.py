"""`Prefetcher`: the prover's groups, sampled, graded and scored ahead of its trainer (`rollout.prefetch`).

Where servers compute the scores (`verifier.engine = "vllm"`), what comes is scored at once. In this process it is the
trainer's thread that computes them: there they wait for the batch, as rewards and credit do, unless the trainer has
nothing else to do. Either way they are true, for the verifier is frozen while the prover learns.

Groups are numbered in the order of the synchronous game's batches, and their rollouts have its ids. A rollout's `step`
and `group` are those of the batch that it is trained in. The numbers begun are part of a commit: a resumed run goes on
behind them, so no id of a committed rollout comes again, and what was in flight or waiting is sampled no more.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pvg.game.orders import ProverOrders
from pvg.records import Group
from pvg.rollout.buffer import Taken
from pvg.rollout.dispatcher import GroupOrder
from pvg.rollout.pipeline import Gate, Lost, Pipeline
from pvg.telemetry.spans import span
from pvg.verifier.scorer import VerifierScorer


class Prefetcher:
    def __init__(self, orders: ProverOrders, scorer: VerifierScorer) -> None:
        self._orders = orders
        self._scorer = scorer
        self._experiment = orders.session.experiment
        self._pipeline: Pipeline | None = None
        self._begun = 0  # groups, by this process and those before it
        self._batches: dict[int, list[GroupOrder]] = {}  # by number: what of it is not begun yet
        self._lost = Lost()

    @property
    def begun(self) -> int:
        return self._begun if self._pipeline is None else self._pipeline.begun

    def resume(self, begun: int) -> None:
        """Go on behind the first `begun` groups."""
        self._begun = begun

    def start(self, version: int, batches: int) -> None:
        """Begin to sample; the trainer has `version`, and so has the engine. `batches` are left of the phase, which may
        end before: when the last is taken nothing more is begun, as nobody would train on it."""
        rollout, groups = self._experiment.rollout, self._experiment.training.groups
        self._pipeline = Pipeline(
            self._sample,
            capacity=(1 + rollout.prefetch) * groups,
            budget=rollout.staleness_budget,
            concurrency=rollout.concurrency,
            version=version,
            begun=self._begun,
            prefer=rollout.prefer,
            wanted=batches * groups,
        )
        self._pipeline.start()

    def published(self, version: int) -> None:
        self._open.published(version)

    async def close(self) -> None:
        """Cancel and await what is in flight, scores included."""
        if self._pipeline is not None:
            await self._pipeline.close()
            await self._scorer.drop()

    async def _sample(self, number: int, gate: Gate) -> Group:
        """Group `number` of the phase, scored where that holds up nobody."""
        batch, place = divmod(number, self._experiment.training.groups)
        order = self._order(batch, place)
        (group,) = await self._orders.sample([order], batch, gate)
        if self._experiment.verifier.engine == "torch" and not self._open.starved:
            return group
        with span("score"):
            scores_N = await self._scorer.score(group.rollouts)
        version = self._scorer.version
        return replace(
            group,
            rollouts=tuple(
                replace(rollout, score=float(score), verifier_version=version)
                for rollout, score in zip(group.rollouts, scores_N, strict=True)
            ),
        )

    def _order(self, batch: int, place: int) -> GroupOrder:
        """Orders are made by the batch and begun one by one, in order; a resumed phase may begin within a batch."""
        if batch not in self._batches:
            self._batches = {batch: self._orders.batch(batch)}
        return self._batches[batch][place]

    async def batch(self, number: int) -> tuple[list[Group], dict[str, float]]:
        """The groups of training batch `number`, and metrics."""
        taken = await self._open.take(self._experiment.training.groups)
        groups = [_renumbered(arrival.group, number, place) for place, arrival in enumerate(taken)]
        return groups, self._metrics(taken)

    def _metrics(self, taken: list[Taken]) -> dict[str, float]:
        """How old the batch is by where it aged, what is on its way, and what was lost since the batch before."""
        pipeline = self._open
        before, self._lost = self._lost, pipeline.lost
        now, size = self._lost, self._experiment.rollout.group_size
        in_flight_N = [arrival.arrived - rollout.version for arrival in taken for rollout in arrival.group.rollouts]
        in_queue_N = [pipeline.version - arrival.arrived for arrival in taken for _ in arrival.group.rollouts]
        lost = {
            "stale_cancelled": float(size * (now.groups_cancelled - before.groups_cancelled)),
            "stale_on_arrival": float(now.on_arrival - before.on_arrival),
            "stale_waiting": float(now.waiting - before.waiting),
        }
        return {
            "staleness_in_flight": float(np.mean(in_flight_N)),
            "staleness_in_queue": float(np.mean(in_queue_N)),
            "groups_in_flight": float(pipeline.in_flight),
            "groups_waiting": float(pipeline.waiting),
            "dropped_stale": sum(lost.values()),
            **lost,
            "stale_tokens": float(now.tokens - before.tokens),
        }

    @property
    def _open(self) -> Pipeline:
        assert self._pipeline is not None, "start comes first"
        return self._pipeline


def _renumbered(group: Group, step: int, place: int) -> Group:
    return replace(group, rollouts=tuple(replace(rollout, step=step, group=place) for rollout in group.rollouts))
