"""`Pipeline`: samples groups ahead of the trainer and hands them out in batches with the configured role shares.

    pipeline = Pipeline(sample, shares, ahead=1, budget=2, concurrency=256, version=0)
    pipeline.start()
    taken = await pipeline.take()             # the next batch; waits until its groups are there
    pipeline.published(1)                     # the trainer's new version has reached the engine
    await pipeline.close()

`shares(k)` gives the number of groups of each role in batch k. `sample(role, gate)` samples one group of a role and
holds `gate` around each of its requests. The pipeline keeps groups in flight, not batches, so a slow group does not
delay the others. For each role, the groups in flight and waiting are at most those of the next batch and of the `ahead`
batches after it. When a group grows too old, the pipeline drops it and starts another one of the same role.

`GroupBuffer` holds the finished groups. The staleness of a rollout is the trainer's version when it is trained on minus
the oldest version among its tokens, so time in flight and time in the buffer both count. A group is as stale as its
stalest rollout. `GroupBuffer.take` chooses within each role: the freshest groups first or, with prefer="old", those
closest to the budget. It never replaces a missing role by another, because roles with short solutions would fill the
batches.

Invariants:
- No rollout that `take` returns exceeds the staleness budget, and each batch has exactly the shares of its number.
- Each group is handed out once, dropped once, or still waits.
- While started, without an error and with batches left, each role has exactly the number of groups given above in
  flight or waiting, and requests in flight are at most `concurrency`.
- The first error of a group or of the pipeline is raised by the next `take`. After `close` nothing runs.

`take` always ends: every role has enough groups in flight or waiting, and no version is published while `take` waits,
so none of them becomes stale before it arrives.
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
    """A group, the trainer's version when it arrived, and the `oldest` version among its tokens. The latter is computed
    once, because every arrival compares all waiting groups."""

    group: Group
    arrived: int
    oldest: int


@dataclass(slots=True)
class DroppedRollouts:
    """Sampled rollouts that were too old when they arrived or after waiting, and their completion tokens."""

    on_arrival: int = 0
    waiting: int = 0
    tokens: int = 0


class GroupBuffer:
    """Finished groups that wait for the trainer. `budget`: the most versions that a rollout may be behind."""

    def __init__(self, budget: int, prefer: Prefer = "fresh") -> None:
        self.drops = DroppedRollouts()
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._semaphore.release()


Sample = Callable[[Role, AdmissionGate], Coroutine[Any, Any, Group]]
Shares = Callable[[int], Mapping[Role, int]]


@dataclass(frozen=True, slots=True)
class LostRollouts:
    """Discarded work since the pipeline was created. `groups_cancelled` were too old while still in flight. The other
    fields count sampled rollouts that were too old, and their tokens."""

    groups_cancelled: int = 0
    on_arrival: int = 0
    waiting: int = 0
    tokens: int = 0


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
        if ahead < 0 or budget < 0:
            raise ValueError(f"ahead ({ahead}) and budget ({budget}) must be at least 0")
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
        self._cancelled = 0
        self._producer: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._starved = False
        self._room = asyncio.Event()
        self._result_arrived = asyncio.Event()

    @property
    def waiting(self) -> int:
        return len(self._buffer)

    @property
    def in_flight(self) -> int:
        return len(self._running)

    @property
    def starved(self) -> bool:
        return self._starved

    @property
    def lost(self) -> LostRollouts:
        drops = self._buffer.drops
        return LostRollouts(self._cancelled, drops.on_arrival, drops.waiting, drops.tokens)

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
            self._starved = True
            try:
                await self._result_arrived.wait()
            finally:
                self._starved = False

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
                self._cancelled += 1
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
