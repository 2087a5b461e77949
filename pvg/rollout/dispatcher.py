"""`Dispatcher`: groups of rollouts from an engine, graded, with a bound on the requests in flight.

Invariant: the same orders and seed submit the same requests in the same order, so that a synchronous run can be
repeated bit by bit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pvg.errors import ConfigurationError
from pvg.records import Group, Int32, Problem, Role, Rollout
from pvg.rollout.engine import Completion, Engine, GenerationRequest, Sampling
from pvg.telemetry.spans import span

if TYPE_CHECKING:
    from pvg.models.tokenizer import Tokenizer
    from pvg.tasks.task import Task


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """`size` rollouts wanted for one problem and role. `prompt_ids` int32 [P]; `group` is unique within its phase."""

    problem: Problem
    role: Role
    prompt_ids: Int32
    group: int
    size: int


@dataclass(frozen=True, slots=True)
class _Call:
    """What the rollouts of one call of `sample` have in common."""

    round: int
    source: str
    step: int
    seed: int
    prefix: str


class Dispatcher:
    """At most `concurrency` requests are in the engine at once.

    Raises ConfigurationError at once when the engine would not take that many.
    """

    def __init__(self, engine: Engine, task: Task, tokenizer: Tokenizer, sampling: Sampling, concurrency: int) -> None:
        if concurrency < 1:
            raise ConfigurationError(f"rollout.concurrency is {concurrency}, but must be at least 1.")
        if engine.max_in_flight < concurrency:
            raise ConfigurationError(
                f"rollout.concurrency is {concurrency}, but the engine takes {engine.max_in_flight} requests at once.",
                "Lower rollout.concurrency, or open the engine with a larger max_in_flight.",
            )
        self._engine = engine
        self._task = task
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._concurrency = concurrency

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
    ) -> list[Group]:
        """The groups, in the order of `orders`; rollout i of group g has the id `{prefix}/{g:05d}/{i:02d}`.

        Request seeds depend on (seed, group, i) alone. `on_done` is told after each rollout how many are finished. If
        one fails, or the caller is cancelled, the others are cancelled and awaited before that surfaces.
        """
        if len({order.group for order in orders}) != len(orders):
            raise ValueError("two orders have the same group number")
        call = _Call(round_, source, step, seed, prefix)
        semaphore = asyncio.Semaphore(self._concurrency)  # first come, first served
        finished = 0
        finishes: dict[int, list[float]] = {order.group: [] for order in orders}

        async def one(order: GroupOrder, index: int) -> Rollout:
            nonlocal finished
            async with semaphore:
                rollout = await self._rollout(order, index, call)
            finished += 1
            finishes[order.group].append(time.perf_counter())
            if on_done is not None:
                on_done(finished)
            return rollout

        rollouts = await _all_or_none([one(order, index) for order in orders for index in range(order.size)])
        ends = np.cumsum([order.size for order in orders], dtype=np.int64).tolist()
        return [
            Group(order.problem, order.role, tuple(rollouts[end - order.size : end]), _spread(finishes[order.group]))
            for order, end in zip(orders, ends, strict=True)
        ]

    async def _rollout(self, order: GroupOrder, index: int, call: _Call) -> Rollout:
        rollout_id = f"{call.prefix}/{order.group:05d}/{index:02d}"
        seed = request_seed(call.seed, order.group, index)
        request = GenerationRequest(rollout_id, order.prompt_ids, self._sampling, seed)
        completion = await self._engine.generate(request)
        with span("grade"):
            text = self._tokenizer.decode(_without_stop(completion))
            grade = self._task.grade(order.problem, text)
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
        )


def request_seed(seed: int, group: int, index: int) -> int:
    """A 64-bit seed for rollout `index` of `group`, unrelated to those of its neighbours. None may be negative."""
    return int(np.random.SeedSequence((seed, group, index)).generate_state(1, np.uint64)[0])


def _spread(finishes: Sequence[float]) -> float:
    return max(finishes) - min(finishes) if finishes else 0.0


def _without_stop(completion: Completion) -> Int32:
    return completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids


async def _all_or_none(coroutines: Sequence[Coroutine[None, None, Rollout]]) -> list[Rollout]:
    """All results in order. On the first failure, or when cancelled, nothing is left running behind."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in tasks if task.done() and not task.cancelled() and task.exception() is not None]
        return [task.result() for task in (failed[:1] or tasks)]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
