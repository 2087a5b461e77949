"""The workers of the discrete-event model: which request decodes where, and when it ends.

A worker decodes its rows in steps: each step gives every row one token. So all rows of a worker advance alike, and a
worker is one number: the steps since its start. A row ends when that number has grown by the row's length. The speed
changes only when a row comes or goes (`World.row_s`). Therefore each worker needs one event, the end of its next row.

All times here are those of the engine's clock, which stands still while an update pauses the workers.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from pvg.planning.world import World


class SimulatedRequest:
    """A rollout on its way. `group` is its group, `work` its length in decoding steps. `version`: that of the weights
    when its first token is decoded; None before. `admitted`: it has one of the `World.concurrency` places."""

    __slots__ = ("admitted", "cancelled", "ends", "group", "length", "version", "work", "worker")

    def __init__(self, group: Any, length: int, work: float) -> None:
        self.group, self.length, self.work = group, length, work
        self.version: int | None = None
        self.worker: SimulatedWorker | None = None
        self.ends = -1.0  # in its worker's steps; below 0: it waits for a row
        self.cancelled = False
        self.admitted = False


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """`steps`: decoding steps until `since`. `rows` are decoded, `outstanding` also counts requests in `waiting`."""

    number: int
    up: bool = True
    steps: float = 0.0
    since: float = 0.0
    rows: int = 0
    outstanding: int = 0
    row_seconds: float = 0.0
    waiting: deque[SimulatedRequest] = field(default_factory=deque)
    decoded: list[tuple[float, int, SimulatedRequest]] = field(default_factory=list)  # a heap by end
    planned: tuple[float, int, SimulatedRequest] | None = None  # the row whose end the worker's event is for
    event: int = 0  # the number of its valid event


class SimulatedWorkers:
    """All workers. `finished` is called with each request that ends. `now` is the engine's clock."""

    def __init__(self, world: World, finished: Callable[[SimulatedRequest], None]) -> None:
        self.now = 0.0
        self.version = 0
        self.paused = False
        self._world = world
        self._finished = finished
        self._workers = [SimulatedWorker(number) for number in range(world.workers)]
        # (outstanding, number): an entry is valid if it agrees with its worker.
        self._by_load = [(0, number) for number in range(world.workers)]
        self._events: list[tuple[float, int, SimulatedWorker]] = []
        self._numbers = count(1)
        self._homeless: deque[SimulatedRequest] = deque()  # while no worker is up
        self._began_in_pause: list[SimulatedRequest] = []

    # --- requests ----------------------------------------------------------------------------------------------------

    def send(self, request: SimulatedRequest) -> None:
        """Give the request to the worker with the fewest outstanding requests, as pvg.servers.fleet does."""
        worker = self._least_loaded()
        if worker is None:
            self._homeless.append(request)
            return
        request.worker = worker
        self._count(worker, 1)
        if worker.rows < self._world.slots:
            self._begin(worker, request)
        else:
            worker.waiting.append(request)

    def cancel(self, request: SimulatedRequest) -> None:
        request.cancelled = True
        worker, request.worker = request.worker, None
        if worker is None:
            return
        self._count(worker, -1)
        if request.ends >= 0:
            self._leave(worker)
        else:
            worker.waiting.remove(request)

    @property
    def next_s(self) -> float | None:
        """When the next row ends; None if no row is decoded."""
        while self._events and self._events[0][1] != self._events[0][2].event:
            heapq.heappop(self._events)
        return self._events[0][0] if self._events else None

    def end_next(self) -> None:
        """End the row that `next_s` is about."""
        at, _, worker = heapq.heappop(self._events)
        self.now = max(self.now, at)
        self._advance(worker)
        ends, _, request = heapq.heappop(worker.decoded)
        worker.steps, worker.planned = ends, None  # without the rounding errors of `_advance`
        request.worker = None
        self._count(worker, -1)
        self._leave(worker)
        self._finished(request)

    # --- weights and failures ----------------------------------------------------------------------------------------

    def resume(self, version: int) -> None:
        """All workers have the weights `version` from now on."""
        self.version, self.paused = version, False
        for request in self._began_in_pause:
            request.version = version
        self._began_in_pause = []

    def fail(self, number: int) -> None:
        """The worker ends. Its requests begin again on others."""
        worker = self._workers[number]
        self._advance(worker)
        lost = [request for _, _, request in sorted(worker.decoded, key=lambda row: row[1])]
        lost = [r for r in (*lost, *worker.waiting) if not r.cancelled and r.worker is worker]
        worker.up, worker.rows, worker.outstanding, worker.planned = False, 0, 0, None
        worker.decoded, worker.waiting, worker.event = [], deque(), 0
        for request in lost:
            request.worker, request.ends = None, -1.0
            self.send(request)

    def return_(self, number: int) -> None:
        worker = self._workers[number]
        worker.up, worker.since = True, self.now
        heapq.heappush(self._by_load, (0, number))
        waiting, self._homeless = self._homeless, deque()
        for request in waiting:
            if not request.cancelled:
                self.send(request)

    def row_seconds(self) -> float:
        """Rows x seconds decoded so far, over all workers."""
        for worker in self._workers:
            self._advance(worker)
        return sum(worker.row_seconds for worker in self._workers)

    # --- one worker --------------------------------------------------------------------------------------------------

    def _least_loaded(self) -> SimulatedWorker | None:
        while self._by_load:
            outstanding, number = self._by_load[0]
            worker = self._workers[number]
            if worker.up and worker.outstanding == outstanding:
                return worker
            heapq.heappop(self._by_load)
        return None

    def _count(self, worker: SimulatedWorker, change: int) -> None:
        worker.outstanding += change
        heapq.heappush(self._by_load, (worker.outstanding, worker.number))

    def _advance(self, worker: SimulatedWorker) -> None:
        passed = self.now - worker.since
        if passed > 0 and worker.rows:
            worker.steps += passed / self._world.decoding_s(worker.rows)
            worker.row_seconds += passed * worker.rows
        worker.since = self.now

    def _begin(self, worker: SimulatedWorker, request: SimulatedRequest) -> None:
        self._advance(worker)
        request.ends = worker.steps + request.work
        request.version = self.version
        if self.paused:
            self._began_in_pause.append(request)
        heapq.heappush(worker.decoded, (request.ends, next(self._numbers), request))
        worker.rows += 1
        self._plan(worker)

    def _leave(self, worker: SimulatedWorker) -> None:
        """A row has ended or was cancelled; the next request takes its place."""
        self._advance(worker)
        worker.rows -= 1
        if worker.waiting:
            self._begin(worker, worker.waiting.popleft())
        else:
            self._plan(worker)

    def _plan(self, worker: SimulatedWorker) -> None:
        while worker.decoded and worker.decoded[0][2].cancelled:
            heapq.heappop(worker.decoded)
        if not worker.decoded:
            worker.planned, worker.event = None, 0
            return
        first = worker.decoded[0]
        if worker.planned is first and self._world.row_s == 0:
            return
        worker.planned, worker.event = first, next(self._numbers)
        at = self.now + max(0.0, first[0] - worker.steps) * self._world.decoding_s(worker.rows)
        heapq.heappush(self._events, (at, worker.event, worker))
