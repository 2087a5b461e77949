"""`Dispatcher`: samples and grades groups of rollouts, with a bound on the requests in flight.

Invariant: without a deadline, the same orders and seed submit the same requests in the same order. So a synchronous run
is reproducible bit for bit.
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


GROUPS_AT_A_TIME = 32  # records made per turn of the event loop: a millisecond of work


def _group(gathering: GroupSampling[Rollout]) -> Group:
    """The group of a finished gathering. Raises CancelledError for a task cancelled by anything but the deadline."""
    cut = gathering.cut
    return Group(
        gathering.order.problem,
        gathering.order.role,
        tuple(task.result() for i, task in enumerate(gathering.tasks) if i not in cut),
        gathering.spread_s,
        cancelled=len(cut),
        lost_tokens=sum(gathering.sampled_tokens.get(i, 0) for i in cut),
    )


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
        """Sample the groups, in the order of `orders`. Rollout i of group g has the id `{prefix}/{g:05d}/{i:02d}`.

        - Request seeds depend only on (seed, group, i).
        - `on_done` is called after each rollout with the number finished.
        - If one fails or the caller is cancelled, all others are cancelled and awaited before the error is raised.
        - `deadline`: stragglers are cancelled in the engine and left out. With a deadline for the whole batch, a group
          may end up empty.
        - `gate` replaces this call's own bound on the requests in flight.
        - `environment`: rollouts are multi-turn episodes (pvg.rollout.episodes).
        - `on_group` receives the rollouts of each group as soon as it is complete. It is not called for episodes or for
          groups that a deadline cut.
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
                # Reporting token counts may make the engine stream, so ask for it only if they are used.
                tell = None if gathering.watch is None else partial(gathering.sampled_tokens.__setitem__, index)
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
        groups: list[Group] = []
        for gathering in gatherings:
            groups.append(_group(gathering))
            gathering.tasks.clear()  # 32,000 tasks freed at once would block the event loop for 60 ms
            if len(groups) % GROUPS_AT_A_TIME == 0:
                await asyncio.sleep(0)
        return groups

    async def rollout(
        self,
        order: GroupOrder,
        index: int,
        call: SampleCall,
        *,
        leave: Callable[[], Awaitable[None]],
        tell: Callable[[int], None] | None = None,
        resumed_from: PartialCompletion | None = None,
    ) -> Rollout:
        """Sample and grade rollout `index` of `order`; with `resumed_from`, continue a completion that was cut short.

        Calls `leave` after sampling, before grading, to free its place in the engine. So grading does not affect which
        request the engine gets next, or when. Raises CutShort if the engine cuts the request (`SampleCall.rollout_id`
        is its id).
        """
        rollout_id = call.rollout_id(order, index)
        seed = request_seed(call.seed, order.group, index)
        request = GenerationRequest(
            rollout_id,
            order.prompt_ids,
            self.sampling,
            seed,
            on_tokens=tell,
            resumed_from=resumed_from,
            group=order.group,
        )
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
