"""Partial rollouts: rollouts cut by a deadline continue under the next policy version instead of being discarded.

    partial = partial_sampling(experiment, dispatcher)      # None unless rollout.deadline is "continue"
    groups = await partial.sample(plan, step=0)             # complete groups; the others are carried over
    ...                                                     # the trainer's step; the engine gets the next version
    groups = await partial.sample(plan, step=1)             # continues carried groups, and starts fewer new ones

The clock of a call starts with its first request. When its time is up and enough rollouts are in complete groups, all
others are cut: the engine returns their tokens, log-probs and versions, and the next call continues from these.

A group is carried as a whole and returned when complete, so its mean covers all its members. If the fast members were
used at once, they would be compared only with each other, and the slow ones later with none. Where neither the loss nor
the reward compares members of a group, each rollout is returned separately.

A carried group ages. When its oldest token is more than `versions` behind the sampling policy, its finished rollouts
are used if they are two or more. The rest is discarded and counted.

Related work: Kimi k1.5 (arXiv 2501.12599) keeps unfinished parts of long rollouts for later iterations. APRIL (arXiv
2509.18521) carries groups that are incomplete when a batch is full, and loses no token.

Invariants:
- Every ordered rollout is returned once, or counted once as cancelled, or carried. Rollouts that are carried when the
  process is killed are lost, but they were not recorded, so none is recorded twice.
- Order n of a phase is entry n % groups of batch n // groups of a run without partial rollouts, with the same ids and
  seeds. So no id is used twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pvg.config.rollout import ContinuingDeadline
from pvg.errors import StateError
from pvg.records import Group, Rollout
from pvg.rollout.dispatcher import Dispatcher, GroupOrder, SampleCall, all_or_none
from pvg.rollout.engine import CutShort, Engine, PartialCompletion
from pvg.rollout.gathering import Deadline, compares_within_groups, training_deadline

if TYPE_CHECKING:
    from pvg.config.experiment import Experiment

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


class _Cut:
    """Cuts unfinished requests once the time is up and `least` rollouts are in complete units."""

    def __init__(self, deadline: Deadline, engine: Engine) -> None:
        self._deadline = deadline
        self._engine = engine
        self._timer: asyncio.TimerHandle | None = None
        self._late = False
        self._complete = 0
        self._error: Exception | None = None
        self.in_engine: dict[str, asyncio.Task[None]] = {}  # requests in the engine, by id
        self.done = False

    def begin(self) -> None:
        """Start the clock before the first request. Later calls do nothing."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._deadline.seconds, self._expire)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def check(self) -> None:
        """Raise the error of the engine's `cut`, if it failed in the timer."""
        if self._error is not None:
            raise self._error

    def ended(self, unit: _Unit) -> None:
        if unit.complete:
            self._complete += len(unit.indices)
            self._cut_if_enough()

    def _expire(self) -> None:
        self._late = True
        try:
            self._cut_if_enough()
        except Exception as error:  # noqa: BLE001 - nothing awaits a timer, so `check` raises it
            self._error = error
            for task in self.in_engine.values():
                task.cancel()

    def _cut_if_enough(self) -> None:
        if self._late and not self.done and self._complete >= self._deadline.least:
            self.done = True
            self._engine.cut(self.in_engine.keys())


class PartialSampling:
    """Keeps about `groups` groups of `size` rollouts in the engine, or up to `size` - 1 rollouts more if those carried
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
        batches = {number: plan(number) for number in _batches(first, self._ordered, self._groups)}
        units = []
        for number in range(first, self._ordered):
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
            cut.ended(unit)

        for unit in units:
            unit.finishes.clear()
        try:
            await all_or_none(
                [asyncio.create_task(one(unit, index)) for index in unit.indices if index not in unit.finished]
                for unit in units
            )
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


def partial_sampling(experiment: Experiment, dispatcher: Dispatcher) -> PartialSampling | None:
    """Partial sampling for prover training; None without `rollout.deadline = "continue"`."""
    deadline, section = training_deadline(experiment), experiment.rollout.deadline
    if deadline is None or not isinstance(section, ContinuingDeadline):
        return None
    return PartialSampling(
        dispatcher,
        deadline,
        versions=section.max_versions,
        groups=experiment.training.groups,
        size=experiment.rollout.group_size,
        whole=compares_within_groups(experiment),
    )


def _batches(first: int, end: int, groups: int) -> range:
    """The batches that orders `first` to `end` (exclusive) belong to."""
    return range(first // groups, -(-end // groups)) if end > first else range(0)
