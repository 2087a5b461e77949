"""`GroupBuffer`: finished groups that wait for the trainer. No group that it returns is over the staleness budget.

    buffer = GroupBuffer(budget=2)
    buffer.put(group, version=7)              # 7: the trainer's version when the group arrives
    taken = buffer.take({Role.HELPFUL: 16, Role.SNEAKY: 16}, version=8)   # None: too few groups of a role wait

The staleness of a rollout is the trainer's version when it is trained on, less the oldest version among its tokens. So
time in flight and time in the buffer both count. A group is as stale as the stalest of its rollouts.

`take` chooses within each role: the freshest groups first, or with prefer="old" those nearest to the budget. It never
takes more of one role because another role is late: a role that writes short solutions would fill the batches. Groups
over the budget are dropped and counted. The buffer knows nothing of time, tasks or engines.

Invariants: every group that `take` returns is within the budget; a batch has exactly the role counts that were asked
for; each group that was put is handed out once, dropped once, or still waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from pvg.records import Group, Role
from pvg.telemetry.spans import span

Prefer = Literal["fresh", "old"]


@dataclass(frozen=True, slots=True)
class BufferedGroup:
    """A group, and the trainer's version when it arrived: before that, the group aged in flight. `oldest` is the oldest
    version among its tokens. It is computed once, because every arrival compares all groups that wait."""

    group: Group
    arrived: int
    oldest: int


@dataclass(slots=True)
class DroppedRollouts:
    """Rollouts that were sampled and are too old to train on, by when that was found, and their completion tokens."""

    on_arrival: int = 0
    waiting: int = 0
    tokens: int = 0


class GroupBuffer:
    """`budget`: versions that a rollout may be behind."""

    def __init__(self, budget: int, prefer: Prefer = "fresh") -> None:
        self.drops = DroppedRollouts()
        self._budget = budget
        self._sign = -1 if prefer == "fresh" else 1
        self._waiting: list[BufferedGroup] = []  # as they came

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def by_role(self) -> Counter[Role]:
        """How many groups of each role wait."""
        return Counter(arrival.group.role for arrival in self._waiting)

    def put(self, group: Group, version: int) -> None:
        """Raises ValueError for a group without rollouts: it has no version."""
        arrival = BufferedGroup(group, version, oldest(group))
        if self._within(arrival, version):
            self._waiting.append(arrival)
        else:
            self.drops.on_arrival += self._dropped(arrival)

    def expire(self, version: int) -> None:
        """Drop what is over the budget now. Versions only go up, so it would never be within it again."""
        kept = []
        for arrival in self._waiting:
            if self._within(arrival, version):
                kept.append(arrival)
            else:
                self.drops.waiting += self._dropped(arrival)
        self._waiting = kept

    def take(self, wanted: Mapping[Role, int], version: int) -> list[BufferedGroup] | None:
        """`wanted` groups of each role, all within the budget, in the order they arrived; None when a role has fewer.
        Of equally fresh groups, those that arrived first are taken."""
        self.expire(version)
        waiting = self.by_role
        if any(waiting[role] < count for role, count in wanted.items()):
            return None
        left = Counter(wanted)
        chosen = set()
        for place in sorted(range(len(self._waiting)), key=lambda place: self._sign * self._waiting[place].oldest):
            role = self._waiting[place].group.role  # the sort is stable: equally fresh groups stay in their order
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
    """The oldest policy version among the tokens of a group."""
    return min(rollout.version for rollout in group.rollouts)


# `Pipeline`: samples groups ahead of the trainer, and hands them out in batches with the configured role shares.
#
#     pipeline = Pipeline(sample, shares, ahead=1, budget=2, concurrency=256, version=0)
#     pipeline.start()
#     taken = await pipeline.take()             # the next batch; waits until its groups are there
#     pipeline.published(1)                     # the trainer's new version has reached the engine
#     await pipeline.close()
#
# `shares(k)` gives the number of groups of each role in batch k. `sample(role, gate)` begins one more group of a
# role; it holds `gate` around each of its requests. The pipeline keeps groups, not batches, in flight: a slow group
# does not hold up the others.
#
# For each role, the groups in flight and waiting are at most those of the next batch and of the `ahead` batches after
# it. When a group grows too old, the pipeline drops it and begins another one of the same role. So no role can fill
# it.
#
# Invariants: while started, without an error and with batches left to take, each role has exactly that many groups in
# flight or waiting; requests in flight are at most `concurrency`; no rollout that `take` returns is over the budget,
# and the batch has the shares of its number (pvg.rollout.pipeline); the first error of a group, or of the pipeline
# itself, is raised by the next `take`; after `close` nothing runs.
#
# `take` always ends: every role has enough groups in flight or waiting, and no version is published while `take`
# waits, so none of them becomes stale before it arrives.


class AdmissionGate:
    """Bounds the requests in flight, over all groups that share `semaphore`. `version` is that of the trainer when the
    group's first request went in: no token of it is older. None: all of them wait."""

    def __init__(self, pipeline: Pipeline, semaphore: asyncio.Semaphore) -> None:
        self._pipeline = pipeline
        self._semaphore = semaphore
        self.version: int | None = None

    async def __aenter__(self) -> None:
        await self._semaphore.acquire()
        if self.version is None:
            self.version = self._pipeline.version

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._semaphore.release()


Sample = Callable[[Role, AdmissionGate], Coroutine[Any, Any, Group]]
Shares = Callable[[int], Mapping[Role, int]]


@dataclass(frozen=True, slots=True)
class LostRollouts:
    """Rollouts that were sampled, or begun, for nothing: they were too old. Totals since the pipeline was made.

    `groups_cancelled` were still in flight; the others are counted in rollouts, and `tokens` are theirs."""

    groups_cancelled: int = 0
    on_arrival: int = 0
    waiting: int = 0
    tokens: int = 0


class Pipeline:
    """See the module. All of it belongs to one event loop, and one task takes."""

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
        many will be taken in all; None: unknown."""
        if ahead < 0 or budget < 0:
            raise ValueError(f"a pipeline of {ahead} batches and {budget} versions")
        self.version = version
        self._sample = sample
        self._shares = shares
        self._batch, self._batches, self._ahead = batch, batches, ahead
        # Groups of each role that are to be in flight or waiting.
        self._room_for = Counter[Role]()
        for number in range(batch, batch + 1 + ahead):
            self._room_for.update(shares(number))
        self._budget = budget
        self._semaphore = asyncio.Semaphore(concurrency)  # first come, first served
        self._buffer = GroupBuffer(budget, prefer)
        self._running: dict[asyncio.Task[Group], tuple[Role, AdmissionGate]] = {}
        self._hopeless: set[asyncio.Task[Group]] = set()
        self._cancelled = 0
        self._producer: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._starved = False
        self._room = asyncio.Event()
        self._came = asyncio.Event()

    @property
    def waiting(self) -> int:
        return len(self._buffer)

    @property
    def in_flight(self) -> int:
        return len(self._running)

    @property
    def starved(self) -> bool:
        """Whether the trainer is waiting for groups."""
        return self._starved

    @property
    def lost(self) -> LostRollouts:
        drops = self._buffer.drops
        return LostRollouts(self._cancelled, drops.on_arrival, drops.waiting, drops.tokens)

    def start(self) -> None:
        """Begin to sample. To be called outside of the spans of single steps: this goes on beside them."""
        assert self._producer is None, "started twice"
        self._producer = asyncio.create_task(self._produce())
        self._producer.add_done_callback(self._ended)

    async def take(self) -> list[BufferedGroup]:
        """The groups of the next batch, in the order they arrived. Raises what a group failed with."""
        assert self._batches != 0, "more batches than the pipeline was made for"
        wanted = self._shares(self._batch)
        while True:
            if self._error is not None:
                raise self._error
            taken = self._buffer.take(wanted, self.version)
            self._room.set()  # for new groups, or because some were dropped
            if taken is not None:
                self._room_for.subtract(wanted)
                self._batch += 1
                self._room_for.update(self._shares(self._batch + self._ahead))
                if self._batches is not None:
                    self._batches -= 1
                return taken
            self._came.clear()
            self._starved = True
            try:
                await self._came.wait()
            finally:
                self._starved = False

    def published(self, version: int) -> None:
        """The trainer has `version` from now on. Groups that can no longer be within the budget are given up."""
        if version < self.version:
            raise ValueError(f"version {version} after {self.version}")
        self.version = version
        self._buffer.expire(version)
        for task, (_, gate) in self._running.items():
            if gate.version is not None and version - gate.version > self._budget:
                self._give_up(task)
        self._room.set()

    async def close(self) -> None:
        """Cancel and await everything. Closing twice does nothing."""
        producer, self._producer = self._producer, None
        tasks: list[asyncio.Task[Any]] = [*self._running]
        if producer is not None:
            tasks.append(producer)
            for task in tasks:
                if task not in self._hopeless:
                    task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- producing -----------------------------------------------------------------------------------------------

    async def _produce(self) -> None:
        while True:
            if self._fill():
                with span("rollout"):  # for as long as anything is in flight
                    while self._fill():
                        await self._woken()
            await self._woken()

    async def _woken(self) -> None:
        await self._room.wait()
        self._room.clear()

    def _fill(self) -> bool:
        """Begin new groups of the roles that have room. Whether any group is in flight."""
        # Until the last batch is taken there are more groups than it needs, so it does not wait for stragglers either.
        if self._error is None and self._batches != 0:
            there = self._buffer.by_role
            there.update(role for role, _ in self._running.values())
            while lacking := [role for role, most in self._room_for.items() if there[role] < most]:
                # The role that lacks most of its groups comes first: requests are served in the order they were made.
                role = min(lacking, key=lambda role: there[role] / self._room_for[role])
                gate = AdmissionGate(self, self._semaphore)
                task = asyncio.create_task(self._sample(role, gate))
                there[role] += 1
                self._running[task] = role, gate
                task.add_done_callback(self._landed)
        return bool(self._running)

    def _landed(self, task: asyncio.Task[Group]) -> None:
        del self._running[task]
        given_up = task in self._hopeless
        self._hopeless.discard(task)
        if task.cancelled():
            if given_up:
                self._cancelled += 1
            elif self._producer is not None:
                self._fail(RuntimeError("A group of rollouts was cancelled, and not by its pipeline."))
        elif error := task.exception():
            self._fail(error)
        else:
            try:
                self._buffer.put(task.result(), self.version)
            except ValueError as refused:  # the event loop would only log what a callback raises
                self._fail(refused)
        self._room.set()
        self._came.set()

    def _ended(self, producer: asyncio.Task[None]) -> None:
        """The producer never ends by itself."""
        if not producer.cancelled() and (error := producer.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """The first error; what is in flight would be for nothing."""
        if self._error is None:
            self._error = error
        for task in self._running:
            self._give_up(task)
        self._came.set()

    def _give_up(self, task: asyncio.Task[Group]) -> None:
        """Once: a second cancellation would interrupt the cleaning up after the first."""
        if task not in self._hopeless:
            self._hopeless.add(task)
            task.cancel()
