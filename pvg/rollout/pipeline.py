"""`Pipeline`: groups are sampled ahead of the trainer, which takes them as they come.

    pipeline = Pipeline(sample, capacity=64, budget=2, concurrency=256, version=0)
    pipeline.start()
    taken = await pipeline.take(32)           # waits until 32 groups within the budget are there
    pipeline.published(1)                     # the trainer's new version has reached the engine
    await pipeline.close()

`sample(number, gate)` samples group `number`; it holds `gate` around each of its requests. Numbers go up from `begun`
and none is given twice. Groups, not batches, are kept in flight: one that takes long holds up no other.

Invariants: in flight and waiting there are never more than `capacity` groups, and never less while `start`ed, room and
groups `wanted`; requests in flight are at most `concurrency`; no rollout that `take` returns is
over the budget (pvg.rollout.buffer); the first error of a group, or of the pipeline itself, is raised by the next
`take`; after `close` nothing runs.

`take` always ends: no version is published while it waits, so what is begun meanwhile is not stale when it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pvg.records import Group
from pvg.rollout.buffer import GroupBuffer, Prefer, Taken
from pvg.telemetry.spans import span


class Gate:
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


Sample = Callable[[int, Gate], Coroutine[Any, Any, Group]]


@dataclass(frozen=True, slots=True)
class Lost:
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
        *,
        capacity: int,
        budget: int,
        concurrency: int,
        version: int,
        begun: int = 0,
        prefer: Prefer = "fresh",
        wanted: int | None = None,
    ) -> None:
        """`wanted`: how many groups will be taken in all; None: nobody knows."""
        if capacity < 1 or budget < 0:
            raise ValueError(f"a pipeline of {capacity} groups and {budget} versions")
        self.version = version
        self.begun = begun
        self._sample = sample
        self._capacity = capacity
        self._wanted = wanted
        self._budget = budget
        self._semaphore = asyncio.Semaphore(concurrency)  # first come, first served
        self._buffer = GroupBuffer(budget, prefer)
        self._running: dict[asyncio.Task[Group], Gate] = {}
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
    def lost(self) -> Lost:
        drops = self._buffer.drops
        return Lost(self._cancelled, drops.on_arrival, drops.waiting, drops.tokens)

    def start(self) -> None:
        """Begin to sample. To be called outside of the spans of single steps: this goes on beside them."""
        assert self._producer is None, "started twice"
        self._producer = asyncio.create_task(self._produce())
        self._producer.add_done_callback(self._ended)

    async def take(self, count: int) -> list[Taken]:
        """`count` groups, at most the capacity and what is wanted, in the order they came. Raises what a group failed
        with."""
        assert count <= self._capacity, "this would wait for ever"
        assert self._wanted is None or count <= self._wanted, "more than was said to be wanted"
        while True:
            if self._error is not None:
                raise self._error
            taken = self._buffer.take(count, self.version)
            self._room.set()  # for new ones, or because some were dropped
            if taken is not None:
                if self._wanted is not None:
                    self._wanted -= count
                return taken
            self._came.clear()
            self._starved = True
            try:
                await self._came.wait()
            finally:
                self._starved = False

    def published(self, version: int) -> None:
        """From here on the trainer has `version`. What cannot be within the budget any more is given up."""
        if version < self.version:
            raise ValueError(f"version {version} after {self.version}")
        self.version = version
        self._buffer.expire(version)
        for task, gate in self._running.items():
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
        """Begin new groups where there is room. Whether any is in flight."""
        # Before the last batch is taken there may be more than it needs: so it waits for no straggler either.
        wanted = self._error is None and self._wanted != 0
        while wanted and len(self._running) + len(self._buffer) < self._capacity:
            gate = Gate(self, self._semaphore)
            task = asyncio.create_task(self._sample(self.begun, gate))
            self.begun += 1
            self._running[task] = gate
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
            self._buffer.put(task.result(), self.version)
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
