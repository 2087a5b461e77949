"""The groups of the discrete-event model: begun by role, bounded, buffered, dropped and cancelled as in
pvg.rollout.pipeline and pvg.rollout.dispatcher.

Without `World.ahead`, the groups of one batch begin together, and all of them must end before the trainer begins.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from pvg.planning.decoding import SimulatedRequest, SimulatedWorkers
from pvg.planning.world import World
from pvg.records import Role

DRAWN_AT_ONCE = 256  # groups
At = Callable[[float, Callable[[], None]], None]  # calls a function after some seconds


@dataclass(slots=True, eq=False)
class SimulatedWatch:
    """A deadline over the requests of one group, or of all groups of a batch."""

    groups: list[SimulatedGroup] = field(default_factory=list)
    started: bool = False
    late: bool = False
    finished: int = 0


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    """`admitted`: the trainer's version when its first request entered an engine. `versions` and `tokens`: of its
    finished rollouts."""

    role: Role
    requests: list[SimulatedRequest] = field(default_factory=list)
    left: int = 0
    admitted: int | None = None
    hopeless: bool = False
    versions: list[int] = field(default_factory=list)
    tokens: int = 0
    watch: SimulatedWatch | None = None

    @property
    def oldest(self) -> int:
        return min(self.versions)


@dataclass(slots=True)
class LostWork:
    """Rollouts dropped so far: too old on arrival, too old while they waited, or cancelled with their groups."""

    on_arrival: int = 0
    waiting: int = 0
    cancelled: int = 0


class SimulatedGroups:
    """Begins groups and hands out batches. `at` schedules a call; `came` is called when a group arrives."""

    def __init__(self, world: World, seed: int, at: At, came: Callable[[], None]) -> None:
        self.version = 0
        self.lost = LostWork()
        self.sampled_tokens = 0
        self.workers = SimulatedWorkers(world, self._finished)
        self._world, self._at, self._came = world, at, came
        self._seed = seed
        self._lengths = {role: _drawn(world, role, seed) for role in world.roles}
        self._request_steps = world.request_s / world.decoding_s(1)
        self._batch = 0
        self._wanted = self.shares(0)
        self._room_for = Counter[Role]()
        self._there = Counter[Role]()  # in flight or waiting
        self._running: dict[SimulatedGroup, None] = {}  # in the order they began
        self._buffer: list[SimulatedGroup] = []  # in order of arrival
        self._waiting = Counter[Role]()  # of the buffer
        self._queue: deque[SimulatedRequest] = deque()  # waits for one of `concurrency` places
        self._in_flight = 0
        if world.ahead is not None:
            for number in range(1 + world.ahead.batches):
                self._room_for.update(self.shares(number))
            self._fill()

    def shares(self, number: int) -> Counter[Role]:
        """Groups of each role in batch `number`, as pvg.game.roles.assign_roles rounds them."""
        exact = self._world.groups * self._world.sneaky_share
        sneaky = int(exact)
        if exact > sneaky:
            sneaky += int(np.random.default_rng([self._seed, 1, number]).random() < exact - sneaky)
        return Counter({Role.HELPFUL: self._world.groups - sneaky, Role.SNEAKY: sneaky})

    # --- the trainer's side ------------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """Without `ahead`: begin the groups of the next batch, roles in random order."""
        if self._world.ahead is None:
            roles = list(self.shares(self._batch).elements())
            order = np.random.default_rng([self._seed, 2, self._batch]).permutation(len(roles))
            watch = SimulatedWatch() if self._world.cut and self._world.cut.whole_batch else None
            for place in order:
                self._begin(roles[place], watch)
            self._admit()

    def take(self) -> list[SimulatedGroup] | None:
        """The groups of the next batch, or None if they have not all arrived."""
        if self._world.ahead is None:
            if self._running:
                return None
            taken, self._buffer = self._buffer, []
            self._there.clear()
            self._waiting.clear()
            self._batch += 1
            return taken
        wanted = self._wanted
        chosen: list[SimulatedGroup] | None = None
        if all(self._waiting[role] >= count for role, count in wanted.items()):
            chosen = self._chosen(wanted)
            self._room_for.subtract(wanted)
            self._batch += 1
            self._wanted = self.shares(self._batch)
            self._room_for.update(self.shares(self._batch + self._world.ahead.batches))
        self._fill()
        return chosen

    def published(self, version: int) -> None:
        """The trainer has `version`. Drops groups that are too old, and cancels those that would be on arrival."""
        self.version = version
        if self._world.ahead is None:
            return
        self._expire()
        for group in list(self._running):
            if group.admitted is not None and version - group.admitted > self._world.ahead.budget:
                self._cancel(group)
        self._fill()
        self._admit()

    def _chosen(self, wanted: Counter[Role]) -> list[SimulatedGroup]:
        assert self._world.ahead is not None
        sign = -1 if self._world.ahead.prefer == "fresh" else 1
        left, chosen = Counter(wanted), set()
        for place in sorted(range(len(self._buffer)), key=lambda place: sign * self._buffer[place].oldest):
            role = self._buffer[place].role
            if left[role] > 0:
                left[role] -= 1
                chosen.add(place)
        taken = [group for place, group in enumerate(self._buffer) if place in chosen]
        self._buffer = [group for place, group in enumerate(self._buffer) if place not in chosen]
        gone = Counter(group.role for group in taken)
        self._there.subtract(gone)
        self._waiting.subtract(gone)
        return taken

    def _expire(self) -> None:
        kept = []
        for group in self._buffer:
            if self._fresh_enough(group):
                kept.append(group)
            else:
                self.lost.waiting += len(group.versions)
                self._there[group.role] -= 1
                self._waiting[group.role] -= 1
        self._buffer = kept

    def _fresh_enough(self, group: SimulatedGroup) -> bool:
        return self._world.ahead is None or self.version - group.oldest <= self._world.ahead.budget

    # --- groups and their requests -----------------------------------------------------------------------------------

    def _fill(self) -> None:
        room_for, there = self._room_for, self._there
        while lacking := [role for role, most in room_for.items() if there[role] < most]:
            self._begin(min(lacking, key=lambda role: there[role] / room_for[role]), None)
        self._admit()

    def _begin(self, role: Role, watch: SimulatedWatch | None) -> None:
        group = SimulatedGroup(role, watch=watch)
        lengths = next(self._lengths[role])
        if self._world.cut is not None:
            group.watch = watch or SimulatedWatch()
            group.watch.groups.append(group)
        group.requests = [SimulatedRequest(group, n, n + self._request_steps) for n in lengths]
        group.left = len(group.requests)
        self._running[group] = None
        self._there[role] += 1
        self._queue.extend(group.requests)

    def _admit(self) -> None:
        while self._queue and self._in_flight < self._world.concurrency:
            request = self._queue.popleft()
            if request.cancelled:
                continue
            self._in_flight += 1
            request.admitted = True
            group: SimulatedGroup = request.group
            if group.admitted is None:
                group.admitted = self.version
            watch, cut = group.watch, self._world.cut
            if watch is not None and cut is not None and not watch.started:
                watch.started = True
                self._at(cut.seconds, lambda watch=watch: self._time_is_up(watch))  # type: ignore[misc]
            self.workers.send(request)

    def _finished(self, request: SimulatedRequest) -> None:
        group: SimulatedGroup = request.group
        assert request.version is not None
        self._give_place_back(request)
        group.versions.append(request.version)
        group.tokens += request.length
        self.sampled_tokens += request.length
        group.left -= 1
        self._admit()
        if group.left == 0:
            self._complete(group)
        if group.watch is not None:
            group.watch.finished += 1
            self._cut_if_enough(group.watch)

    def _complete(self, group: SimulatedGroup) -> None:
        if self._world.score_s and group.versions:
            self._at(self._world.score_s, lambda: self._arrive(group))
        else:
            self._arrive(group)

    def _arrive(self, group: SimulatedGroup) -> None:
        if group.hopeless:
            return
        del self._running[group]
        if not group.versions:  # a deadline of the whole batch may leave nothing of a group
            self._there[group.role] -= 1
        elif self._fresh_enough(group):
            self._buffer.append(group)
            self._waiting[group.role] += 1
        else:
            self.lost.on_arrival += len(group.versions)
            self._there[group.role] -= 1
        if self._world.ahead is not None:
            self._fill()
        self._came()

    def _cancel(self, group: SimulatedGroup) -> None:
        """Give up a whole group."""
        group.hopeless = True
        del self._running[group]
        self._there[group.role] -= 1
        self.lost.cancelled += self._world.group_size
        self._cut(group)

    def _cut(self, group: SimulatedGroup) -> None:
        """Cancel the group's unfinished requests."""
        for request in group.requests:
            if request.worker is not None or request.ends < 0:
                self._give_place_back(request)
                self.workers.cancel(request)

    def _give_place_back(self, request: SimulatedRequest) -> None:
        """A request also holds a place while no worker is up and it waits for one."""
        self._in_flight -= request.admitted
        request.admitted = False

    # --- deadlines ---------------------------------------------------------------------------------------------------

    def _time_is_up(self, watch: SimulatedWatch) -> None:
        watch.late = True
        self._cut_if_enough(watch)

    def _cut_if_enough(self, watch: SimulatedWatch) -> None:
        cut = self._world.cut
        if cut is None or not watch.late or watch.finished < cut.least:
            return
        watch.late = False
        for group in watch.groups:
            if group.left and not group.hopeless:
                self._cut(group)
                group.left = 0
                self._complete(group)
        self._admit()


def _drawn(world: World, role: Role, seed: int) -> Iterator[list[int]]:
    """The lengths of one group after another. They depend on the role, the seed and the group's number alone, so two
    worlds with other workers have the same groups."""
    generator = np.random.default_rng([seed, 3, role.number])
    pool = world.lengths[role]
    while True:
        yield from pool[generator.integers(len(pool), size=(DRAWN_AT_ONCE, world.group_size))].tolist()
