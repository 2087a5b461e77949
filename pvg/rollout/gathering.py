"""Deadlines: when a set of rollouts stops waiting for its stragglers.

    deadline = Deadline(seconds=20.0, least=4, over="group")
    groups = await dispatcher.sample(orders, deadline=deadline, ...)

A set is one group, or the whole call where no statistics are taken over groups. Its clock starts when its first request
is handed to the engine. When its time is up, it is used with what has arrived; one that has fewer than `least` waits
until it has them, so that a deadline that is too short costs time and never a batch.

Invariant: only tasks that a watch has cut may end as cancelled without that being an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np

from pvg.records import Int32, Problem, Role, SolverSolution

if TYPE_CHECKING:
    from pvg.config.experiment import Experiment

Over = Literal["group", "batch"]


@dataclass(frozen=True, slots=True)
class Deadline:
    """A set of rollouts is cut `seconds` after its first request, or as soon after that as it has `least`.

    `over`: each group is a set of its own, or all groups of a call are one.
    """

    seconds: float
    least: int
    over: Over = "group"


def training_deadline(experiment: Experiment) -> Deadline | None:
    """That of the prover's training. spo and rae take no statistics of groups: all of their batch is one set;
    and so it is where groups that are not complete are carried over."""
    rollout = experiment.rollout
    if rollout.group_deadline_s is None:
        return None
    over: Over = "batch" if experiment.training.groupless or rollout.partial else "group"
    return Deadline(rollout.group_deadline_s, rollout.min_group, over)


def compares_within_groups(experiment: Experiment) -> bool:
    """Whether a rollout's advantage depends on others of its problem and role: by the loss, but for spo's and rae's,
    or by the reward. One of them alone would be paid for a comparison with itself."""
    return not experiment.training.groupless or experiment.game.reward.kind in ("src", "decoupled")


class Watch:
    """Cuts one set of tasks: cancels those that are not done when its deadline has passed and it has enough."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._tasks: list[asyncio.Task[Any]] = []
        self._cut: set[asyncio.Task[Any]] = set()
        self._arrived: set[asyncio.Task[Any] | None] = set()
        self._finished = 0
        self._timer: asyncio.TimerHandle | None = None
        self._late = False

    def add(self, task: asyncio.Task[Any]) -> None:
        self._tasks.append(task)
        task.add_done_callback(self._ended)

    def begin(self) -> None:
        """The set's first request is about to be made; later calls change nothing."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._deadline.seconds, self._expire)

    def arrived(self) -> None:
        """The running task has its completion, which would be lost if it were cut while it is being graded."""
        self._arrived.add(asyncio.current_task())

    def stop(self) -> None:
        """Nothing is cut any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._late = False

    def was_cut(self, task: asyncio.Task[Any]) -> bool:
        """Whether `task` ended because this cancelled it. (One that finished all the same is finished.)"""
        return task in self._cut and task.cancelled()

    def _expire(self) -> None:
        self._late = True
        self._cut_if_enough()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._finished += 1
            self._cut_if_enough()

    def _cut_if_enough(self) -> None:
        if self._late and self._finished >= self._deadline.least:
            self._late = False  # once: a second cancellation would interrupt the cleaning up after the first
            self._cut = {task for task in self._tasks if not task.done() and task not in self._arrived}
            for task in self._cut:
                task.cancel()


# What a dispatcher is asked for, and the tasks that are at it: groups of rollouts, begun, watched and awaited.

T = TypeVar("T")

# Rollouts that begin in one turn of the event loop: 10 ms of work. A mint's 4,096 at once would be 50 ms.
BEGUN_AT_A_TIME = 256


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """`size` rollouts wanted for one problem and role. `prompt_ids` int32 [P]; `group` is unique within its phase.
    `solver`: the solution in the prompt, which they translate (the decoupled game)."""

    problem: Problem
    role: Role
    prompt_ids: Int32
    group: int
    size: int
    solver: SolverSolution | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """What the rollouts of one call of `sample` have in common."""

    round: int
    source: str
    step: int
    seed: int
    prefix: str

    def rollout_id(self, order: GroupOrder, index: int) -> str:
        return f"{self.prefix}/{order.group:05d}/{index:02d}"


@dataclass(slots=True)
class Gathering(Generic[T]):
    """One group as it is sampled. `told`: the tokens of each rollout so far, from engines that tell."""

    order: GroupOrder
    watch: Watch | None
    tasks: list[asyncio.Task[T]] = field(default_factory=list)
    finishes: list[float] = field(default_factory=list)
    told: dict[int, int] = field(default_factory=dict)

    def start(self, work: Sequence[Coroutine[None, None, T]]) -> list[asyncio.Task[T]]:
        self.tasks = [asyncio.create_task(coroutine) for coroutine in work]
        if self.watch is not None:
            for task in self.tasks:
                self.watch.add(task)
        return self.tasks

    async def sampled(self, place: AsyncExitStack) -> None:
        """One of it leaves its `place` in the engine."""
        if self.watch is not None:
            self.watch.arrived()
        await place.aclose()

    def stop(self) -> None:
        if self.watch is not None:
            self.watch.stop()

    @property
    def cut(self) -> set[int]:
        """The tasks that the deadline has cut. When all have ended."""
        return {i for i, task in enumerate(self.tasks) if self.watch is not None and self.watch.was_cut(task)}

    @property
    def spread_s(self) -> float:
        return max(self.finishes) - min(self.finishes) if self.finishes else 0.0


def request_seed(seed: int, group: int, index: int, turn: int = 0) -> int:
    """A 64-bit seed for a turn of rollout `index` of `group`, unrelated to those of its neighbours. None may be
    negative."""
    place = (seed, group, index, turn) if turn else (seed, group, index)
    return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0])


def gatherings_of(orders: Sequence[GroupOrder], deadline: Deadline | None) -> list[Gathering[Any]]:
    if deadline is None:
        return [Gathering(order, None) for order in orders]
    if deadline.over == "group":
        return [Gathering(order, Watch(deadline)) for order in orders]
    watch = Watch(deadline)
    return [Gathering(order, watch) for order in orders]


async def all_or_none(parts: Iterable[Sequence[asyncio.Task[Any]]]) -> None:
    """Wait for all tasks of all `parts`, which are begun as they are asked for, over several turns of the event loop
    where they are many. On the first failure, or when cancelled, nothing is left running behind."""
    tasks: list[asyncio.Task[Any]] = []
    try:
        begun = 0
        for part in parts:
            tasks += part
            begun += len(part)
            if begun >= BEGUN_AT_A_TIME:
                begun = 0
                await asyncio.sleep(0)
        if not tasks:
            return
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                task.result()
    finally:
        # Nothing is left as a rule, and then thousands of tasks need not be waited for one by one.
        if left := [task for task in tasks if not task.done()]:
            for task in left:
                task.cancel()
            await asyncio.wait(left)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # seen
