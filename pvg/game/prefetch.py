"""Prefetch: sample, grade and score the prover's groups ahead of its trainer (`rollout.prefetch`).

Where scores are computed:

- on servers (`verifier.engine = "vllm"`): a group is scored when it arrives;
- in the scoring thread of this process (`Players.scoring`): a few groups at a time, in the background; the batch then
  finds the scores in the scorer's cache;
- otherwise in the trainer's thread: with the batch, or when a group arrives while the trainer waits.

All three give the same scores, because the verifier is frozen while the prover learns.

A batch has the same role shares as the synchronous game's batch of the same number. Each role has its own queue. It
holds that role's groups of the synchronous game, in the same order and with the same ids. When groups of a role become
too stale and are dropped, the next groups of that role replace them. A rollout's `step` and `group` are those of the
batch that trains it.

A group's number is `batch * training.groups + place` in the synchronous game. A commit stores, for each role, the
number up to which groups have started. A resumed run continues there. So it never reuses the id of a committed rollout,
and it loses rollouts that were in flight or waiting.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from pvg.config.rollout import SamplingAhead
from pvg.game.orders import ProverOrders
from pvg.records import Float32, Group, Role, Rollout
from pvg.rollout.dispatcher import GroupOrder
from pvg.rollout.pipeline import AdmissionGate, BufferedGroup, LostRollouts, Pipeline
from pvg.telemetry.spans import span
from pvg.verifier.scorer import VerifierScorer

# Rollouts per forward pass in the thread `Players.scoring`. A pass of a small model has a fixed cost of 20 to 30 of its
# rows. Most of this cost holds Python's interpreter lock, which the trainer needs too.
SCORED_TOGETHER = 64


WhenScored = Literal["arrival", "background", "batch"]


@dataclass
class RoleQueue:
    """The groups of one role, in the order of the synchronous game's batches. Groups with numbers below `started` have
    started, in this process or an earlier one."""

    orders: ProverOrders
    role: Role
    size: int
    started: int = 0
    _made: deque[tuple[int, GroupOrder]] = field(default_factory=deque)  # with the batch number
    _next: int = field(init=False)

    def __post_init__(self) -> None:
        self._next = self.started // self.size

    def pop(self) -> tuple[int, GroupOrder]:
        """The next group and its batch number. Creates the orders of one batch at a time, on demand."""
        while not self._made:
            made = [(self._next, order) for order in self.orders.batch(self._next, self.role)]
            self._made.extend(item for item in made if self._number(*item) >= self.started)
            self._next += 1
        batch, order = self._made.popleft()
        self.started = self._number(batch, order) + 1
        return batch, order

    def _number(self, batch: int, order: GroupOrder) -> int:
        return batch * self.size + order.group


class Prefetcher:
    """A `GroupSource` of `orders`. `scored`: when a group is scored - as soon as it arrives, in the background with
    others, or with its batch."""

    ahead = True
    carried = 0

    def __init__(
        self,
        orders: ProverOrders,
        scorer: VerifierScorer,
        settings: SamplingAhead,
        *,
        concurrency: int,
        scored: WhenScored,
    ) -> None:
        self._orders, self._scorer, self._settings = orders, scorer, settings
        self._concurrency, self._scored = concurrency, scored
        self._pipeline: Pipeline | None = None
        self._queues = {role: RoleQueue(orders, role, orders.groups) for role in Role}
        self._lost = LostRollouts()
        self._unscored: list[Rollout] = []  # in the background
        self._scoring: set[asyncio.Task[Float32]] = set()

    def state(self) -> dict[str, int]:
        """For each role, the number up to which its groups have started."""
        return {role.value: queue.started for role, queue in self._queues.items()}

    def load_state(self, state: Mapping[str, Any]) -> int:
        """Continue after the groups that have started. Groups in progress were never recorded, so none is lost."""
        self._queues = {role: RoleQueue(self._orders, role, self._orders.groups, state[role.value]) for role in Role}
        return 0

    def start(self, version: int, batch: int, batches: int) -> None:
        """Begin to sample for batch number `batch`; trainer and engine have `version`. `batches`: batches that remain
        in the phase. After the last one is taken, no new group begins."""
        self._pipeline = Pipeline(
            self._sample,
            lambda number: Counter(self._orders.roles(number)),
            ahead=self._settings.batches,
            budget=self._settings.staleness_budget,
            concurrency=self._concurrency,
            version=version,
            batch=batch,
            batches=batches,
            prefer=self._settings.kind,
        )
        self._pipeline.start()

    def published(self, version: int) -> None:
        self._open.published(version)

    async def close(self) -> None:
        """Cancel and await work in flight, scores included."""
        if self._pipeline is not None:
            await self._pipeline.close()
            for task in self._scoring:  # a task that still prepares its input would request scores after `drop`
                task.cancel()
            await asyncio.gather(*self._scoring, return_exceptions=True)
            await self._scorer.drop()

    def _sample(self, role: Role, gate: AdmissionGate) -> Coroutine[Any, Any, Group]:
        return self._sampled(*self._queues[role].pop(), gate)

    async def _sampled(self, batch: int, order: GroupOrder, gate: AdmissionGate) -> Group:
        """Sample the ordered group, and score it unless that delays the trainer."""
        (group,) = await self._orders.sample([order], batch, gate)
        if self._scored == "background":
            self._score_soon(group)
            return group
        if self._scored == "batch" and not self._open.starved:
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

    def _score_soon(self, group: Group) -> None:
        """Score the group in the background together with others, or at once if the trainer waits."""
        self._unscored += group.rollouts
        if len(self._unscored) >= SCORED_TOGETHER or self._open.starved:
            rollouts, self._unscored = self._unscored, []
            self._scoring.add(asyncio.create_task(self._scorer.score(rollouts)))

    def _check_scoring(self) -> None:
        done = {task for task in self._scoring if task.done()}
        self._scoring -= done
        errors = [error for task in done if (error := task.exception()) is not None]
        if errors:
            raise errors[0]

    async def batch(self, number: int) -> tuple[list[Group], dict[str, float]]:
        """The groups of training batch `number`, and metrics."""
        taken = await self._open.take()
        self._check_scoring()
        groups = [_renumbered(arrival.group, number, place) for place, arrival in enumerate(taken)]
        return groups, self._metrics(taken)

    def _metrics(self, taken: list[BufferedGroup]) -> dict[str, float]:
        """Staleness by where it arose (in flight, in the queue), work in flight, and losses since the previous
        batch."""
        pipeline = self._open
        before, self._lost = self._lost, pipeline.lost
        now, size = self._lost, self._orders.size
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
        assert self._pipeline is not None, "call start first"
        return self._pipeline


def _renumbered(group: Group, step: int, place: int) -> Group:
    return replace(group, rollouts=tuple(replace(rollout, step=step, group=place) for rollout in group.rollouts))
