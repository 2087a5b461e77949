"""What a dispatcher is asked for, and the tasks that are at it: groups of rollouts, begun, watched and awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from pvg.records import Int32, Problem, Role, SolverSolution
from pvg.rollout.deadlines import Deadline, Watch

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
