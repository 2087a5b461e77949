"""`Dispatcher`: samples and grades groups of rollouts, with a bound on the requests in flight.

Invariant: without a deadline, the same orders and seed submit the same requests in the same order. So a synchronous run
is reproducible bit for bit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from pvg.config.rollout import ContinuingDeadline, Rollouts
from pvg.config.training import Training
from pvg.errors import ConfigurationError, StateError
from pvg.records import Group, Rollout
from pvg.rollout.engine import CutShort, Engine, PartialCompletion, Sampling
from pvg.rollout.gathering import (
    Deadline,
    DeadlineClock,
    Grader,
    GroupOrder,
    all_or_none,
    compares_within_groups,
    request_seed,
    training_deadline,
)
from pvg.rollout.interaction import Line, SampleCall, sample_groups

__all__ = ["Dispatcher", "GroupOrder", "SampleCall", "request_seed"]

if TYPE_CHECKING:
    from pvg.models.tokenizer import Tokenizer
    from pvg.tasks.task import Task


class Dispatcher:
    """Keeps at most `concurrency` requests in the engine. `grading`: the executor that grades; None: the event loop.

    Raises ConfigurationError if the engine accepts fewer requests than `concurrency`.
    """

    def __init__(
        self,
        engine: Engine,
        task: Task,
        tokenizer: Tokenizer,
        sampling: Sampling,
        concurrency: int,
        grading: Executor | None = None,
    ) -> None:
        if concurrency < 1:
            raise ConfigurationError(f"rollout.concurrency is {concurrency}, but must be at least 1.")
        if engine.max_in_flight < concurrency:
            raise ConfigurationError(
                f"rollout.concurrency is {concurrency}, but the engine takes {engine.max_in_flight} requests at once.",
                "Lower rollout.concurrency, or open the engine with a larger max_in_flight.",
            )
        self.engine = engine
        self.concurrency = concurrency
        self.grader = Grader(task, tokenizer, grading)
        self.sampling = sampling

    async def sample(self, orders: Sequence[GroupOrder], call: SampleCall) -> list[Group]:
        """Sample the groups, in the order of `orders`. Rollout i of group g has the id `{prefix}/{g:05d}/{i:02d}`, and
        its request's seed depends only on (seed, g, i). If one fails or the caller is cancelled, all others are
        cancelled and awaited before the error is raised."""
        if len({order.group for order in orders}) != len(orders):
            raise ValueError("two orders have the same group number")
        return await sample_groups(self, orders, call)

    async def rollout(
        self,
        order: GroupOrder,
        index: int,
        call: SampleCall,
        *,
        leave: Callable[[], Awaitable[None]],
        resumed_from: PartialCompletion | None = None,
    ) -> Rollout:
        """Sample and grade rollout `index` of `order`; with `resumed_from`, continue a completion that was cut short.

        Calls `leave` after sampling, before grading, to free its place in the engine. So grading does not affect which
        request the engine gets next, or when. Raises CutShort if the engine cuts the request (`SampleCall.rollout_id`
        is its id).
        """
        line = Line(call.rollout_id(order, index), order)
        request = line.request(call, index, self.sampling, resumed_from=resumed_from)
        completion = await self.engine.generate(request)
        await leave()
        if call.reference:
            completion = await self.engine.with_reference(request, completion)
        line.say(completion, *await self.grader.grade(order.problem, completion))
        return line.rollout(call)


# Partial rollouts: rollouts cut by a deadline continue under the next policy version instead of being discarded.

LEAST_OF_GROUP = 2  # fewer have no meaningful mean

# Returns the orders of batch b of the phase, and their call.
Plan = Callable[[int], tuple[Sequence[GroupOrder], SampleCall]]


@dataclass(slots=True)
class _Unit:
    """Rollouts that are returned together: those at `indices` of order `number` of the phase."""

    number: int
    order: GroupOrder
    call: SampleCall
    indices: tuple[int, ...]
    finished: dict[int, Rollout] = field(default_factory=dict)
    partials: dict[int, PartialCompletion] = field(default_factory=dict)
    finishes: list[float] = field(default_factory=list)  # times in the current call

    @property
    def complete(self) -> bool:
        return len(self.finished) == len(self.indices)

    @property
    def partial_tokens(self) -> int:
        return sum(len(partial.token_ids) for partial in self.partials.values())

    def behind(self, version: int) -> int:
        """Versions from its oldest token to `version`; 0 without tokens."""
        versions = [rollout.version for rollout in self.finished.values()]
        versions += [partial.version for partial in self.partials.values()]
        return version - min(versions, default=version)

    def group(self, kept: Sequence[Rollout]) -> Group:
        """A group of the rollouts `kept`. The others count as cancelled."""
        tokens = self.partial_tokens + sum(len(rollout.completion_ids) for rollout in self.finished.values())
        return Group(
            self.order.problem,
            self.order.role,
            tuple(kept),
            spread_s=max(self.finishes) - min(self.finishes) if self.finishes else 0.0,
            cancelled=len(self.indices) - len(kept),
            lost_tokens=tokens - sum(len(rollout.completion_ids) for rollout in kept),
        )


class _Cut(DeadlineClock):
    """Cuts unfinished requests once the time is up and `least` rollouts are in complete units."""

    def __init__(self, deadline: Deadline, engine: Engine) -> None:
        super().__init__(deadline)
        self._engine = engine
        self._error: Exception | None = None
        self.in_engine: dict[str, asyncio.Task[None]] = {}  # requests in the engine, by id
        self.done = False

    def check(self) -> None:
        """Raise the error of the engine's `cut`, if it failed."""
        if self._error is not None:
            raise self._error

    def cut(self) -> None:
        self.done = True
        try:
            self._engine.cut(self.in_engine.keys())
        except Exception as error:  # noqa: BLE001 - nothing awaits a timer, so `check` raises it
            self._error = error
            for task in self.in_engine.values():
                task.cancel()


class PartialSampling:
    """When the time of a call is up and enough rollouts are in complete groups, all others are cut, and the next call
    continues from their tokens. A group is carried as a whole, so its mean covers all its members. When its oldest
    token is more than `versions` behind, its finished rollouts are used if they are two or more; the rest counts as
    cancelled. Every ordered rollout is returned once, or counted once as cancelled, or carried (and lost if the process
    is killed).

    Keeps about `groups` groups of `size` rollouts in the engine, or up to `size` - 1 rollouts more if those carried
    are not a whole number of groups. `whole`: return whole groups; otherwise each rollout separately.

    `metrics` describe the newest batch. Raises StateError if the engine cannot cut requests.
    """

    def __init__(
        self, dispatcher: Dispatcher, deadline: Deadline, *, versions: int, groups: int, size: int, whole: bool
    ) -> None:
        if getattr(type(dispatcher.engine), "cut", Engine.cut) is Engine.cut:
            raise StateError(
                f"{type(dispatcher.engine).__name__} cannot return unfinished completions.",
                "Set rollout.deadline to 'none' or 'cut'.",
            )
        self._dispatcher = dispatcher
        self._deadline = deadline
        self._versions = versions
        self._groups = groups
        self._size = size
        self._whole = whole
        self._ordered = 0
        self._carried: list[_Unit] = []
        self.metrics: dict[str, float] = {}

    @property
    def carried(self) -> int:
        """Rollouts carried to the next batch, finished or not."""
        return sum(len(unit.indices) for unit in self._carried)

    async def sample(self, plan: Plan, step: int) -> list[Group]:
        """Returns the complete groups; those carried longest come first. Groups that grew too old are included too,
        with the rollouts that could be kept (possibly none). `plan` gives the `groups` orders of each batch.
        `Rollout.group` numbers them consecutively, and `Rollout.step` is the `step` of the call that ordered the
        rollout.

        If a rollout fails or the caller is cancelled, all others are stopped, and carried rollouts are lost.
        """
        version = self._dispatcher.engine.version
        units, self._carried = self._carried, []
        given_up = [unit for unit in units if unit.behind(version) > self._versions]
        units = [unit for unit in units if unit.behind(version) <= self._versions]
        continued = sum(unit.partial_tokens for unit in units)
        units += self._new(plan, step, sum(len(unit.indices) for unit in units))
        await self._play(units)
        groups = [unit.group(()) for unit in given_up]
        version = self._dispatcher.engine.version
        for unit in units:
            if unit.complete:
                groups.append(unit.group([unit.finished[index] for index in unit.indices]))
            elif unit.behind(version) >= self._versions:  # it would be too old at the next version
                left = [unit.finished[index] for index in sorted(unit.finished)]
                groups.append(unit.group(left if len(left) >= LEAST_OF_GROUP else ()))
            else:
                self._carried.append(unit)
        self.metrics = {"groups_carried": float(len(self._carried)), "tokens_continued": float(continued)}
        return groups

    def _new(self, plan: Plan, step: int, there: int) -> list[_Unit]:
        """The next orders, in addition to `there` carried rollouts."""
        first = self._ordered
        self._ordered += max(0, -(-(self._groups * self._size - there) // self._size))
        numbers = range(first, self._ordered)
        batches = {batch: plan(batch) for batch in sorted({number // self._groups for number in numbers})}
        units = []
        for number in numbers:
            orders, call = batches[number // self._groups]
            order, call = orders[number % self._groups], replace(call, step=step)
            indices = tuple(range(order.size))
            parts = [indices] if self._whole else [(index,) for index in indices]
            units += [_Unit(number, order, call, part) for part in parts]
        return units

    async def _play(self, units: Sequence[_Unit]) -> None:
        """Run until every rollout has finished or was cut. Raises an error of the engine's `cut`."""
        cut = _Cut(self._deadline, self._dispatcher.engine)
        bound = asyncio.Semaphore(self._dispatcher.concurrency)  # first come, first served

        async def one(unit: _Unit, index: int) -> None:
            async with AsyncExitStack() as place:
                await place.enter_async_context(bound)
                if cut.done:
                    return  # not requested in this call
                cut.begin()
                name = unit.call.rollout_id(unit.order, index)
                task = asyncio.current_task()
                assert task is not None
                cut.in_engine[name] = task
                try:
                    rollout = await self._dispatcher.rollout(
                        unit.order, index, unit.call, leave=place.aclose, resumed_from=unit.partials.get(index)
                    )
                except CutShort as short:
                    if short.partial is not None:
                        unit.partials[index] = short.partial
                    return
                finally:
                    del cut.in_engine[name]
            unit.finished[index] = replace(rollout, group=unit.number)  # group numbers of two batches overlap
            unit.partials.pop(index, None)
            unit.finishes.append(time.perf_counter())
            if unit.complete:
                cut.count(len(unit.indices))

        def start(unit: _Unit, group: asyncio.TaskGroup) -> int:
            left = [index for index in unit.indices if index not in unit.finished]
            for index in left:
                group.create_task(one(unit, index))
            return len(left)

        for unit in units:
            unit.finishes.clear()
        try:
            await all_or_none(partial(start, unit) for unit in units)
        finally:
            cut.stop()
        cut.check()

    # --- resuming ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, int]:
        """For `load_state`. Carried rollouts are not included, because they were never committed."""
        return {"ordered": self._ordered, "carried": self.carried}

    def load_state(self, state: dict[str, int]) -> int:
        """Continue after the last order. Returns the number of rollouts that were carried then and are lost."""
        self._ordered = state["ordered"]
        return state["carried"]


def partial_sampling(
    rollout: Rollouts, training: Training, reward: str, dispatcher: Dispatcher
) -> PartialSampling | None:
    """Partial sampling for prover training with the reward of this name; None without
    `rollout.deadline = "continue"`."""
    deadline, section = training_deadline(rollout.deadline, training), rollout.deadline
    if deadline is None or not isinstance(section, ContinuingDeadline):
        return None
    return PartialSampling(
        dispatcher,
        deadline,
        versions=rollout.continued_versions,
        groups=training.groups,
        size=rollout.group_size,
        whole=compares_within_groups(training, reward),
    )
