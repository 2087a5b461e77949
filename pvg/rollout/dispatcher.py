"""`Dispatcher`: groups of rollouts from an engine, graded, with a bound on the requests in flight.

Invariant: without a deadline, the same orders and seed submit the same requests in the same order, so that a
synchronous run can be repeated bit by bit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pvg.errors import ConfigurationError
from pvg.records import Group, Int32, Problem, Role, Rollout, SolverSolution
from pvg.rollout.deadlines import Deadline, Watch
from pvg.rollout.engine import Begun, Engine, GenerationRequest, Sampling
from pvg.rollout.grading import Grader
from pvg.tasks.answers import same_answer

if TYPE_CHECKING:
    from pvg.models.tokenizer import Tokenizer
    from pvg.tasks.task import Task


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
class _Gathering:
    """One group as it is sampled. `told`: the tokens of each rollout so far, from engines that tell."""

    order: GroupOrder
    watch: Watch | None
    tasks: list[asyncio.Task[Rollout]] = field(default_factory=list)
    finishes: list[float] = field(default_factory=list)
    told: dict[int, int] = field(default_factory=dict)

    def start(self, work: Sequence[Coroutine[None, None, Rollout]]) -> list[asyncio.Task[Rollout]]:
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

    def result(self) -> Group:
        """When all tasks have ended. Raises what one of them was cancelled by, where that was no deadline."""
        cut = {i for i, task in enumerate(self.tasks) if self.watch is not None and self.watch.was_cut(task)}
        return Group(
            self.order.problem,
            self.order.role,
            tuple(task.result() for i, task in enumerate(self.tasks) if i not in cut),
            _spread(self.finishes),
            cancelled=len(cut),
            lost_tokens=sum(self.told.get(i, 0) for i in cut),
        )


class Dispatcher:
    """At most `concurrency` requests are in the engine at once. `grading`: see pvg.rollout.grading.

    Raises ConfigurationError at once when the engine would not take that many.
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
        self._grader = Grader(task, tokenizer, grading)
        self._sampling = sampling

    async def sample(
        self,
        orders: Sequence[GroupOrder],
        *,
        round_: int,
        source: str,
        step: int,
        seed: int,
        prefix: str,
        on_done: Callable[[int], None] | None = None,
        deadline: Deadline | None = None,
        gate: AbstractAsyncContextManager[None] | None = None,
    ) -> list[Group]:
        """The groups, in the order of `orders`; rollout i of group g has the id `{prefix}/{g:05d}/{i:02d}`.

        Request seeds depend on (seed, group, i) alone. `on_done` is told after each rollout how many are finished. If
        one fails, or the caller is cancelled, the others are cancelled and awaited before that surfaces. `deadline`:
        stragglers are cancelled on the engine and left out; where it is the batch's, a group may be left with none.
        `gate` is held around each request instead of the bound that this call would have for itself.
        """
        if len({order.group for order in orders}) != len(orders):
            raise ValueError("two orders have the same group number")
        call = Call(round_, source, step, seed, prefix)
        bound = asyncio.Semaphore(self.concurrency) if gate is None else gate  # first come, first served
        finished = 0

        async def one(gathering: _Gathering, index: int) -> Rollout:
            nonlocal finished
            async with AsyncExitStack() as place:
                await place.enter_async_context(bound)
                if gathering.watch is not None:
                    gathering.watch.begin()
                # Telling how many tokens there are may cost the engine a stream: only where somebody will count them.
                tell = None if gathering.watch is None else partial(gathering.told.__setitem__, index)
                leave = partial(gathering.sampled, place)
                rollout = await self.rollout(gathering.order, index, call, leave=leave, tell=tell)
            finished += 1
            gathering.finishes.append(time.perf_counter())
            if on_done is not None:
                on_done(finished)
            return rollout

        gatherings = _gatherings(orders, deadline)
        try:
            await all_or_none(
                gathering.start([one(gathering, index) for index in range(gathering.order.size)])
                for gathering in gatherings
            )
        finally:
            for gathering in gatherings:
                gathering.stop()
        return [gathering.result() for gathering in gatherings]

    async def rollout(
        self,
        order: GroupOrder,
        index: int,
        call: Call,
        *,
        leave: Callable[[], Awaitable[None]],
        tell: Callable[[int], None] | None = None,
        begun: Begun | None = None,
    ) -> Rollout:
        """Rollout `index` of `order`, graded; one that was cut short goes on from what it had `begun`. Raises CutShort
        where the engine is told to cut it (`Call.rollout_id` is the request's id).

        `leave` frees its place in the engine, once it has been sampled: what the engine is asked next, and when, does
        not depend on who grades."""
        rollout_id = call.rollout_id(order, index)
        seed = request_seed(call.seed, order.group, index)
        request = GenerationRequest(rollout_id, order.prompt_ids, self._sampling, seed, on_tokens=tell, begun=begun)
        completion = await self.engine.generate(request)
        await leave()
        text, grade = await self._grader.grade(order.problem, completion)
        return Rollout(
            id=rollout_id,
            problem_id=order.problem.id,
            question=order.problem.question,
            reference=order.problem.answer,
            role=order.role,
            round=call.round,
            source=call.source,
            step=call.step,
            group=order.group,
            prompt_ids=order.prompt_ids,
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            spans=completion.spans,
            finish_reason=completion.finish_reason,
            text=text,
            grade=grade,
            timing=completion.timing,
            routed_experts=completion.routed_experts,
            solver=order.solver,
            kept_answer=None if order.solver is None else same_answer(grade.answer, order.solver.answer),
        )


def request_seed(seed: int, group: int, index: int) -> int:
    """A 64-bit seed for rollout `index` of `group`, unrelated to those of its neighbours. None may be negative."""
    return int(np.random.SeedSequence((seed, group, index)).generate_state(1, np.uint64)[0])


def _spread(finishes: Sequence[float]) -> float:
    return max(finishes) - min(finishes) if finishes else 0.0


def _gatherings(orders: Sequence[GroupOrder], deadline: Deadline | None) -> list[_Gathering]:
    if deadline is None:
        return [_Gathering(order, None) for order in orders]
    if deadline.over == "group":
        return [_Gathering(order, Watch(deadline)) for order in orders]
    watch = Watch(deadline)
    return [_Gathering(order, watch) for order in orders]


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
