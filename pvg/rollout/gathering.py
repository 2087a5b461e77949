"""Groups of rollouts while they are sampled: their orders, the deadline that cuts stragglers, and the grader."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pvg.config.rollout import DeadlineSection, NoDeadline
from pvg.config.training import Training
from pvg.records import Grade, Int32, Problem, Role, SolverSolution
from pvg.rollout.engine import Completion
from pvg.tasks.task import GradesInBatches
from pvg.telemetry.spans import span, submit_in

if TYPE_CHECKING:
    from pvg.models.tokenizer import Tokenizer
    from pvg.tasks.task import Task


# Tasks that sample a group of rollouts, and the deadline that cuts stragglers.

Over = Literal["group", "batch"]


@dataclass(frozen=True, slots=True)
class Deadline:
    """Cuts a set of rollouts `seconds` after its first request, or later, once `least` of them have finished.

    `over`: "group" makes each group a set, "batch" makes all groups of a call one set.
    """

    seconds: float
    least: int
    over: Over = "group"


def training_deadline(section: DeadlineSection, training: Training) -> Deadline | None:
    """The deadline of prover training, or None. It is over the batch for spo and rae, which use no group statistics,
    and with the kind `continue`, which carries incomplete groups over."""
    if isinstance(section, NoDeadline):
        return None
    over: Over = "batch" if training.groupless or section.kind == "continue" else "group"
    return Deadline(section.seconds, section.min_rollouts, over)


def compares_within_groups(training: Training, reward: str) -> bool:
    """Whether a rollout's advantage depends on others of its problem and role: through the loss (all but spo and rae)
    or through the reward. If so, a single rollout would be compared with itself."""
    return not training.groupless or reward in ("src", "decoupled")


class DeadlineClock:
    """Calls `cut` once: when the time is up and enough rollouts have finished."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._finished = 0
        self._timer: asyncio.TimerHandle | None = None
        self._late = False

    def begin(self) -> None:
        """Start the clock before the first request. Later calls do nothing."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._deadline.seconds, self._expire)

    def stop(self) -> None:
        """Stop the clock: no further cuts."""
        if self._timer is not None:
            self._timer.cancel()
        self._late = False

    def count(self, finished: int) -> None:
        """Count rollouts that have finished."""
        self._finished += finished
        if self._late and self._finished >= self._deadline.least:
            self._late = False  # a second cancellation would interrupt the cleanup after the first
            self.cut()

    def _expire(self) -> None:
        self._late = True
        self.count(0)

    def cut(self) -> None:
        raise NotImplementedError


class DeadlineWatch(DeadlineClock):
    """Applies a deadline to one set of tasks: cancels the unfinished ones."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__(deadline)
        self._tasks: list[asyncio.Task[Any]] = []
        self._cut: set[asyncio.Task[Any]] = set()
        self._arrived: set[asyncio.Task[Any] | None] = set()

    def add(self, task: asyncio.Task[Any]) -> None:
        self._tasks.append(task)
        task.add_done_callback(self._ended)

    def arrived(self) -> None:
        """Protect the running task from cuts: it has its completion, which a cut during grading would lose."""
        self._arrived.add(asyncio.current_task())

    def was_cut(self, task: asyncio.Task[Any]) -> bool:
        """Whether this watch cancelled `task` and the task did not finish anyway."""
        return task in self._cut and task.cancelled()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.count(not task.cancelled() and task.exception() is None)

    def cut(self) -> None:
        self._cut = {task for task in self._tasks if not task.done() and task not in self._arrived}
        for task in self._cut:
            task.cancel()


# --- groups and their tasks ------------------------------------------------------------------------------------------

# Rollouts started per turn of the event loop: 2 ms of work. A mint's 4,096 at once would block it for 50 ms.
STARTED_AT_A_TIME = 64


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """Orders `size` rollouts of one problem and role. `prompt_ids` int32 [P]. `group` is unique within its phase.
    `solver`: the solution inside the prompt that the rollouts translate (decoupled game). `shared`: the number of
    phases that the rollouts have in common before each goes on alone, and learns from the next phase only; None: they
    share nothing, and learn from all phases."""

    problem: Problem
    role: Role
    prompt_ids: Int32
    group: int
    size: int
    solver: SolverSolution | None = None
    shared: int | None = None


@dataclass(slots=True)
class GroupSampling:
    """One group while it is sampled. `sampled_tokens`: tokens of each rollout so far, if the engine reports them."""

    watch: DeadlineWatch | None = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    finishes: list[float] = field(default_factory=list)
    sampled_tokens: dict[int, int] = field(default_factory=dict)

    def start(self, work: Iterable[Coroutine[None, None, None]], group: asyncio.TaskGroup) -> int:
        """Start the tasks. Returns their number."""
        self.tasks = [group.create_task(coroutine) for coroutine in work]
        if self.watch is not None:
            for task in self.tasks:
                self.watch.add(task)
        return len(self.tasks)

    async def admitted(
        self,
        index: int,
        bound: AbstractAsyncContextManager[None],
        work: Callable[[Callable[[], Awaitable[None]], Callable[[int], None] | None], Awaitable[None]],
    ) -> None:
        """Run `work(leave, tell)` with a place in the engine. `leave` frees the place; `tell` takes the number of
        tokens so far. It may make the engine stream, so it is None if there is no deadline."""
        async with AsyncExitStack() as place:
            await place.enter_async_context(bound)
            if self.watch is None:
                await work(place.aclose, None)
            else:
                self.watch.begin()
                place.callback(self.watch.arrived)  # protects the task from here on
                await work(place.aclose, partial(self.sampled_tokens.__setitem__, index))
        self.finishes.append(time.perf_counter())

    @property
    def cut(self) -> set[int]:
        """Indices of the tasks that the deadline cut. Call it when all tasks have ended."""
        return {i for i, task in enumerate(self.tasks) if self.watch is not None and self.watch.was_cut(task)}

    @property
    def spread_s(self) -> float:
        return max(self.finishes) - min(self.finishes) if self.finishes else 0.0


def request_seed(seed: int, group: int, index: int, turn: int = 0) -> int:
    """A 64-bit seed for turn `turn` of rollout `index` of `group`, independent of other seeds. All arguments must be at
    least 0."""
    place = (seed, group, index, turn) if turn else (seed, group, index)
    return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0])


def gatherings_of(groups: int, deadline: Deadline | None) -> list[GroupSampling]:
    if deadline is None:
        return [GroupSampling() for _ in range(groups)]
    whole = DeadlineWatch(deadline)
    return [GroupSampling(whole if deadline.over == "batch" else DeadlineWatch(deadline)) for _ in range(groups)]


async def all_or_none(starts: Iterable[Callable[[asyncio.TaskGroup], int]]) -> None:
    """Wait for all tasks that `starts` start in the group. Each returns their number; many are spread over several
    turns of the event loop. On the first failure or on cancellation, all other tasks are cancelled and awaited."""
    try:
        async with asyncio.TaskGroup() as group:
            started = 0
            for start in starts:
                started += start(group)
                if started >= STARTED_AT_A_TIME:
                    started = 0
                    await asyncio.sleep(0)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


# `Grader`: turns completions into text and grades, off the event loop.

Graded = tuple[str, Grade]
# Most tokens per trip to the executor (a longer completion goes alone): about 5 ms of work before results return.
TRIP_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class _Waiting:
    problem: Problem
    completion: Completion
    graded: asyncio.Future[Graded]


class Grader:
    """Belongs to one event loop. Uses `executor` for one trip at a time; the caller owns it."""

    def __init__(self, task: Task, tokenizer: Tokenizer, executor: Executor | None = None) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._executor = executor
        self._queue: deque[_Waiting] = deque()
        self._away = False

    async def grade(self, problem: Problem, completion: Completion) -> Graded:
        """The completion's text without its stop token, and the task's grade. Raises what the task raises."""
        if self._executor is None:
            with span("grade"):
                return self._graded(problem, completion)
        waiting = _Waiting(problem, completion, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        if not self._away:
            self._send()
        return await waiting.graded

    def text(self, completion: Completion) -> str:
        return self._tokenizer.decode(_without_stop(completion))

    def _send(self) -> None:
        """Send the completions that have waited longest to the executor."""
        trip: list[_Waiting] = []
        tokens = 0
        while self._queue and (not trip or tokens + len(self._queue[0].completion.token_ids) <= TRIP_TOKENS):
            waiting = self._queue.popleft()
            if not waiting.graded.done():  # otherwise the caller was cancelled
                trip.append(waiting)
                tokens += len(waiting.completion.token_ids)
        if trip:
            self._away = True
            work = submit_in(self._executor, self._trip, trip)
            work.add_done_callback(partial(self._returned, trip))

    def _trip(self, trip: list[_Waiting]) -> list[Graded]:
        with span("grade"):
            if not isinstance(self._task, GradesInBatches):
                return [self._graded(waiting.problem, waiting.completion) for waiting in trip]
            solutions = [(w.problem, self._tokenizer.decode(_without_stop(w.completion))) for w in trip]
            grades = self._task.grade_many(solutions)
            return [(text, grade) for (_, text), grade in zip(solutions, grades, strict=True)]

    def _returned(self, trip: list[_Waiting], work: asyncio.Future[list[Graded]]) -> None:
        """Hand results to the callers. A task should never raise; if it does, all callers of this trip get the
        error."""
        self._away = False
        error = work.exception()
        found: list[Graded | None] = [None] * len(trip) if error is not None else list(work.result())
        for waiting, graded in zip(trip, found, strict=True):
            if waiting.graded.done():
                continue
            if graded is not None:
                waiting.graded.set_result(graded)
            elif error is not None:
                waiting.graded.set_exception(error)
        if self._queue:
            self._send()

    def _graded(self, problem: Problem, completion: Completion) -> Graded:
        text = self._tokenizer.decode(_without_stop(completion))
        return text, self._task.grade(problem, text)


def _without_stop(completion: Completion) -> Int32:
    return completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids
