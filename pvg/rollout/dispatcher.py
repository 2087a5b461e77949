"""`Dispatcher`: groups of rollouts from an engine, graded, with a bound on the requests in flight.

Invariant: without a deadline, the same orders and seed submit the same requests in the same order, so that a
synchronous run can be repeated bit by bit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from pvg.errors import ConfigurationError
from pvg.records import Grade, Group, Rollout, Turn
from pvg.rollout.engine import Completion, Engine, GenerationRequest, PartialCompletion, Sampling
from pvg.rollout.episodes import Environment, play_episodes
from pvg.rollout.gathering import (
    Deadline,
    GroupOrder,
    GroupSampling,
    SampleCall,
    all_or_none,
    gatherings_of,
    request_seed,
)
from pvg.rollout.grading import Grader
from pvg.tasks.answers import same_answer

__all__ = ["Dispatcher", "GroupOrder", "SampleCall", "all_or_none", "request_seed"]

if TYPE_CHECKING:
    from pvg.models.tokenizer import Tokenizer
    from pvg.tasks.task import Task


def _group(gathering: GroupSampling[Rollout]) -> Group:
    """When all tasks have ended. Raises what one of them was cancelled by, where that was no deadline."""
    cut = gathering.cut
    return Group(
        gathering.order.problem,
        gathering.order.role,
        tuple(task.result() for i, task in enumerate(gathering.tasks) if i not in cut),
        gathering.spread_s,
        cancelled=len(cut),
        lost_tokens=sum(gathering.told.get(i, 0) for i in cut),
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
        self.grader = Grader(task, tokenizer, grading)
        self.sampling = sampling

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
        environment: Environment | None = None,
        on_group: Callable[[Sequence[Rollout]], None] | None = None,
    ) -> list[Group]:
        """The groups, in the order of `orders`; rollout i of group g has the id `{prefix}/{g:05d}/{i:02d}`.

        Request seeds depend on (seed, group, i) alone. `on_done` is told after each rollout how many are finished. If
        one fails, or the caller is cancelled, the others are cancelled and awaited before that surfaces. `deadline`:
        stragglers are cancelled on the engine and left out; where it is the batch's, a group may be left with none.
        `gate` is held around each request instead of the bound that this call would have for itself. `environment`:
        rollouts are episodes of several turns (pvg.rollout.episodes). `on_group` gets the rollouts of each group as
        soon as the group is complete; not those of episodes, and not of groups that a deadline has cut.
        """
        if len({order.group for order in orders}) != len(orders):
            raise ValueError("two orders have the same group number")
        call = SampleCall(round_, source, step, seed, prefix)
        bound = asyncio.Semaphore(self.concurrency) if gate is None else gate  # first come, first served
        if environment is not None:
            return await play_episodes(self, orders, call, environment, bound=bound, deadline=deadline, on_done=on_done)
        finished = 0

        async def one(gathering: GroupSampling[Rollout], index: int) -> Rollout:
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
            if on_group is not None:
                whole = arrived.setdefault(gathering.order.group, {})
                whole[index] = rollout
                if len(whole) == gathering.order.size:
                    on_group([whole[place] for place in range(len(whole))])
            return rollout

        arrived: dict[int, dict[int, Rollout]] = {}
        gatherings: list[GroupSampling[Rollout]] = gatherings_of(orders, deadline)
        try:
            await all_or_none(
                gathering.start([one(gathering, index) for index in range(gathering.order.size)])
                for gathering in gatherings
            )
        finally:
            for gathering in gatherings:
                gathering.stop()
        return [_group(gathering) for gathering in gatherings]

    async def rollout(
        self,
        order: GroupOrder,
        index: int,
        call: SampleCall,
        *,
        leave: Callable[[], Awaitable[None]],
        tell: Callable[[int], None] | None = None,
        begun: PartialCompletion | None = None,
    ) -> Rollout:
        """Rollout `index` of `order`, graded; one that was cut short goes on from what it had `begun`. Raises CutShort
        where the engine is told to cut it (`SampleCall.rollout_id` is the request's id).

        `leave` frees its place in the engine, once it has been sampled: what the engine is asked next, and when, does
        not depend on who grades."""
        rollout_id = call.rollout_id(order, index)
        seed = request_seed(call.seed, order.group, index)
        request = GenerationRequest(rollout_id, order.prompt_ids, self.sampling, seed, on_tokens=tell, begun=begun)
        completion = await self.engine.generate(request)
        await leave()
        text, grade = await self.grader.grade(order.problem, completion)
        return self.recorded(order, call, rollout_id, completion, text, grade)

    def recorded(
        self,
        order: GroupOrder,
        call: SampleCall,
        rollout_id: str,
        completion: Completion,
        text: str,
        grade: Grade,
        turns: tuple[Turn, ...] = (),
    ) -> Rollout:
        """The rollout that a completion of `order` is."""
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
            turns=turns,
        )
