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
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from pvg.config.rollout import SamplingAhead
from pvg.game.groups import FreshGroups
from pvg.game.orders import ProverOrders
from pvg.records import Float32, Group, Role, Rollout
from pvg.rollout.dispatcher import GroupOrder
from pvg.telemetry.spans import span
from pvg.verifier.scorer import VerifierScorer

# `Pipeline`: samples groups ahead of the trainer and hands them out in batches with the configured role shares.

Prefer = Literal["fresh", "old"]


@dataclass(frozen=True, slots=True)
class BufferedGroup:
    """A group, the trainer's version when it arrived, and the `oldest` version among its tokens. The latter is computed
    once, because every arrival compares all waiting groups."""

    group: Group
    arrived: int
    oldest: int


@dataclass(slots=True)
class LostRollouts:
    """Discarded work. `groups_cancelled` were too old while still in flight. The other fields count sampled rollouts
    that were too old when they arrived or after waiting, and their completion tokens."""

    groups_cancelled: int = 0
    on_arrival: int = 0
    waiting: int = 0
    tokens: int = 0


class GroupBuffer:
    """Finished groups that wait for the trainer. `budget`: the most versions that a rollout may be behind."""

    def __init__(self, budget: int, prefer: Prefer = "fresh") -> None:
        self.drops = LostRollouts()
        self._budget = budget
        self._sign = -1 if prefer == "fresh" else 1
        self._waiting: list[BufferedGroup] = []  # in order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def by_role(self) -> Counter[Role]:
        return Counter(arrival.group.role for arrival in self._waiting)

    def put(self, group: Group, version: int) -> None:
        """Add a group that arrives at trainer version `version`. Raises ValueError if it has no rollouts."""
        arrival = BufferedGroup(group, version, oldest(group))
        if self._within(arrival, version):
            self._waiting.append(arrival)
        else:
            self.drops.on_arrival += self._dropped(arrival)

    def expire(self, version: int) -> None:
        """Drop groups that are over the budget. Versions only go up, so they stay over it."""
        kept = []
        for arrival in self._waiting:
            if self._within(arrival, version):
                kept.append(arrival)
            else:
                self.drops.waiting += self._dropped(arrival)
        self._waiting = kept

    def take(self, wanted: Mapping[Role, int], version: int) -> list[BufferedGroup] | None:
        """The `wanted` number of groups of each role within the budget, in order of arrival; None if a role has too
        few. Among equally fresh groups, the first to arrive are taken."""
        self.expire(version)
        waiting = self.by_role
        if any(waiting[role] < count for role, count in wanted.items()):
            return None
        left = Counter(wanted)
        chosen = set()
        for place in sorted(range(len(self._waiting)), key=lambda place: self._sign * self._waiting[place].oldest):
            role = self._waiting[place].group.role  # the sort is stable: equally fresh groups keep their order
            if left[role] > 0:
                left[role] -= 1
                chosen.add(place)
        taken = [arrival for place, arrival in enumerate(self._waiting) if place in chosen]
        self._waiting = [arrival for place, arrival in enumerate(self._waiting) if place not in chosen]
        return taken

    def _within(self, arrival: BufferedGroup, version: int) -> bool:
        return version - arrival.oldest <= self._budget

    def _dropped(self, arrival: BufferedGroup) -> int:
        self.drops.tokens += sum(len(rollout.completion_ids) for rollout in arrival.group.rollouts)
        return len(arrival.group.rollouts)


def oldest(group: Group) -> int:
    return min(rollout.version for rollout in group.rollouts)


# --- the pipeline ----------------------------------------------------------------------------------------------------


class AdmissionGate:
    """Bounds the requests in flight over all groups that share `semaphore`. `version`: the trainer's version when the
    group's first request entered the engine, so no token is older; None: all its requests still wait."""

    def __init__(self, pipeline: Pipeline, semaphore: asyncio.Semaphore) -> None:
        self._pipeline = pipeline
        self._semaphore = semaphore
        self.version: int | None = None

    async def __aenter__(self) -> None:
        await self._semaphore.acquire()
        if self.version is None:
            self.version = self._pipeline.version

    async def __aexit__(self, *_: object) -> None:
        self._semaphore.release()


Sample = Callable[[Role, AdmissionGate], Coroutine[Any, Any, Group]]
Shares = Callable[[int], Mapping[Role, int]]


class Pipeline:
    """See the module docstring. Belongs to one event loop; only one task may call `take`."""

    def __init__(
        self,
        sample: Sample,
        shares: Shares,
        *,
        ahead: int,
        budget: int,
        concurrency: int,
        version: int,
        batch: int = 0,
        batches: int | None = None,
        prefer: Prefer = "fresh",
    ) -> None:
        """`ahead`: batches in flight or waiting beyond the next one. `batch`: number of the first batch. `batches`: how
        many will be taken in total; None: unknown."""
        self.version = version
        self._sample = sample
        self._shares = shares
        self._batch, self._batches, self._ahead = batch, batches, ahead
        # Target number of groups in flight or waiting, per role.
        self._room_for = Counter[Role]()
        for number in range(batch, batch + 1 + ahead):
            self._room_for.update(shares(number))
        self._budget = budget
        self._semaphore = asyncio.Semaphore(concurrency)  # first come, first served
        self._buffer = GroupBuffer(budget, prefer)
        self._running: dict[asyncio.Task[Group], tuple[Role, AdmissionGate]] = {}
        self._given_up: set[asyncio.Task[Group]] = set()
        self._producer: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self.starved = False  # whether `take` waits for a group
        self._room = asyncio.Event()
        self._result_arrived = asyncio.Event()

    @property
    def waiting(self) -> int:
        return len(self._buffer)

    @property
    def in_flight(self) -> int:
        return len(self._running)

    @property
    def lost(self) -> LostRollouts:
        """Since the pipeline was created."""
        return replace(self._buffer.drops)

    def start(self) -> None:
        """Start sampling. Call it outside the spans of single steps, because it continues during them."""
        assert self._producer is None, "started twice"
        self._producer = asyncio.create_task(self._produce())
        self._producer.add_done_callback(self._ended)

    async def take(self) -> list[BufferedGroup]:
        """The groups of the next batch, in order of arrival. Raises the error of a failed group."""
        assert self._batches != 0, "took more batches than the pipeline was created for"
        wanted = self._shares(self._batch)
        while True:
            if self._error is not None:
                raise self._error
            taken = self._buffer.take(wanted, self.version)
            self._room.set()  # a batch was taken or groups were dropped
            if taken is not None:
                self._room_for.subtract(wanted)
                self._batch += 1
                self._room_for.update(self._shares(self._batch + self._ahead))
                if self._batches is not None:
                    self._batches -= 1
                return taken
            self._result_arrived.clear()
            self.starved = True
            try:
                await self._result_arrived.wait()
            finally:
                self.starved = False

    def published(self, version: int) -> None:
        """The trainer has `version` from now on. Cancels groups that would arrive over the budget."""
        if version < self.version:
            raise ValueError(f"version {version} after {self.version}")
        self.version = version
        self._buffer.expire(version)
        for task, (_, gate) in self._running.items():
            if gate.version is not None and version - gate.version > self._budget:
                self._give_up(task)
        self._room.set()

    async def close(self) -> None:
        """Cancel and await all tasks. A second call does nothing."""
        producer, self._producer = self._producer, None
        tasks: list[asyncio.Task[Any]] = [*self._running]
        if producer is not None:
            tasks.append(producer)
            for task in tasks:
                if task not in self._given_up:
                    task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- producing -----------------------------------------------------------------------------------------------

    async def _produce(self) -> None:
        while True:
            if self._fill():
                with span("rollout"):  # while anything is in flight
                    while self._fill():
                        await self._room_changed()
            await self._room_changed()

    async def _room_changed(self) -> None:
        await self._room.wait()
        self._room.clear()

    def _fill(self) -> bool:
        """Start new groups of the roles that have room. Returns whether any group is in flight."""
        # Extra groups run until the last batch is taken, so that batch does not wait for stragglers either.
        if self._error is None and self._batches != 0:
            there = self._buffer.by_role
            there.update(role for role, _ in self._running.values())
            while lacking := [role for role, most in self._room_for.items() if there[role] < most]:
                # The role with the lowest share of its target comes first, because requests are served in order.
                role = min(lacking, key=lambda role: there[role] / self._room_for[role])
                gate = AdmissionGate(self, self._semaphore)
                task = asyncio.create_task(self._sample(role, gate))
                there[role] += 1
                self._running[task] = role, gate
                task.add_done_callback(self._on_sampled)
        return bool(self._running)

    def _on_sampled(self, task: asyncio.Task[Group]) -> None:
        del self._running[task]
        given_up = task in self._given_up
        self._given_up.discard(task)
        if task.cancelled():
            if given_up:
                self._buffer.drops.groups_cancelled += 1
            elif self._producer is not None:
                self._fail(RuntimeError("A group of rollouts was cancelled, but not by its pipeline."))
        elif error := task.exception():
            self._fail(error)
        else:
            try:
                self._buffer.put(task.result(), self.version)
            except ValueError as refused:  # asyncio only logs exceptions of callbacks, so pass it to `take`
                self._fail(refused)
        self._room.set()
        self._result_arrived.set()

    def _ended(self, producer: asyncio.Task[None]) -> None:
        """The producer ends only by cancellation or with an error."""
        if not producer.cancelled() and (error := producer.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Keep the first error and cancel everything in flight."""
        if self._error is None:
            self._error = error
        for task in self._running:
            self._give_up(task)
        self._result_arrived.set()

    def _give_up(self, task: asyncio.Task[Group]) -> None:
        """Cancel once. A second cancellation would interrupt the cleanup after the first."""
        if task not in self._given_up:
            self._given_up.add(task)
            task.cancel()


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


class Prefetcher(FreshGroups):
    """Groups of `orders`. `scored`: when a group is scored - as soon as it arrives, in the background with
    others, or with its batch. `budget`: the most versions that a rollout may be behind."""

    ahead = True

    def __init__(
        self,
        orders: ProverOrders,
        scorer: VerifierScorer,
        settings: SamplingAhead,
        *,
        budget: int,
        concurrency: int,
        scored: WhenScored,
    ) -> None:
        super().__init__(orders)
        self._scorer, self._settings, self._budget = scorer, settings, budget
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
        """After the last of the `batches` is taken, no new group begins."""
        self._pipeline = Pipeline(
            self._sample,
            lambda number: Counter(self._orders.roles(number)),
            ahead=self._settings.batches,
            budget=self._budget,
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
        if self._scored == "background":  # together with others, or at once if the trainer waits
            self._unscored += group.rollouts
            if len(self._unscored) >= SCORED_TOGETHER or self._open.starved:
                rollouts, self._unscored = self._unscored, []
                self._scoring.add(asyncio.create_task(self._scorer.score(rollouts)))
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

    def _check_scoring(self) -> None:
        done = {task for task in self._scoring if task.done()}
        self._scoring -= done
        errors = [error for task in done if (error := task.exception()) is not None]
        if errors:
            raise errors[0]

    async def batch(self, number: int) -> tuple[list[Group], dict[str, float]]:
        taken = await self._open.take()
        self._check_scoring()
        groups = [
            replace(each.group, rollouts=tuple(replace(r, step=number, group=place) for r in each.group.rollouts))
            for place, each in enumerate(taken)
        ]
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
