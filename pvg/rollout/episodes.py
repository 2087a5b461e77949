"""What `Dispatcher.sample` is asked for, the deadline that cuts stragglers, grading, and multi-turn episodes.

In an episode the prover writes, an environment observes, and the prover continues. Tokens in, tokens out.

    groups = await dispatcher.sample(orders, SampleCall(..., deadline=deadline, environment=environment))

The prompt of a turn is the exact token ids of everything before it. Sampled text is never tokenized again, so log-probs
stay exact, and a server's prefix cache contains everything but the observation.

All episodes of a call move in lockstep: when the last one has finished a turn, the environment observes all of them at
once. So it can compute in one batch, and a synchronous run always submits the same requests in the same order. A
deadline applies to one turn: its clock starts with the turn's first request, and an episode that it cuts is dropped
entirely.

Invariants:
- The turns of a rollout, concatenated, are its completion.
- `Rollout.sampled_mask` is True exactly for tokens that the engine sampled.
- Each token's version is the engine's version when the token was sampled.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from pvg.config.rollout import DeadlineSection, NoDeadline
from pvg.config.training import Training
from pvg.records import Float32, Grade, Group, Int32, Problem, Role, Rollout, SolverSolution, Timing, Turn, VersionSpan
from pvg.rollout.engine import Completion, Engine, GenerationRequest, Sampling
from pvg.servers.pool import together
from pvg.tasks.answers import same_answer
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


class DeadlineWatch:
    """Applies a deadline to one set of tasks: cancels the unfinished ones when the time is up and enough have
    finished."""

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

    def count(self, finished: int) -> None:
        """Count rollouts of the set that finished without a task: episodes that ended in an earlier turn."""
        self._finished += finished

    def begin(self) -> None:
        """Start the clock before the set's first request. Later calls do nothing."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._deadline.seconds, self._expire)

    def arrived(self) -> None:
        """Protect the running task from cuts: it has its completion, which a cut during grading would lose."""
        self._arrived.add(asyncio.current_task())

    def stop(self) -> None:
        """Stop the clock: no further cuts."""
        if self._timer is not None:
            self._timer.cancel()
        self._late = False

    def was_cut(self, task: asyncio.Task[Any]) -> bool:
        """Whether this watch cancelled `task` and the task did not finish anyway."""
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
            self._late = False  # a second cancellation would interrupt the cleanup after the first
            self._cut = {task for task in self._tasks if not task.done() and task not in self._arrived}
            for task in self._cut:
                task.cancel()


# --- groups and their tasks ------------------------------------------------------------------------------------------

T = TypeVar("T")

# Rollouts started per turn of the event loop: 2 ms of work. A mint's 4,096 at once would block it for 50 ms.
STARTED_AT_A_TIME = 64


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """Orders `size` rollouts of one problem and role. `prompt_ids` int32 [P]. `group` is unique within its phase.
    `solver`: the solution inside the prompt that the rollouts translate (decoupled game)."""

    problem: Problem
    role: Role
    prompt_ids: Int32
    group: int
    size: int
    solver: SolverSolution | None = None


@dataclass(frozen=True, slots=True)
class SampleCall:
    """What all rollouts of one call of `Dispatcher.sample` share.

    - `deadline`: stragglers are cancelled in the engine and left out. With a deadline for the whole batch, a group may
      end up empty.
    - `gate` replaces the call's own bound on the requests in flight.
    - `environment`: rollouts are multi-turn episodes (pvg.rollout.episodes).
    """

    round: int
    source: str
    step: int
    seed: int
    prefix: str
    deadline: Deadline | None = None
    gate: AbstractAsyncContextManager[None] | None = None
    environment: Environment | None = None

    def rollout_id(self, order: GroupOrder, index: int) -> str:
        return f"{self.prefix}/{order.group:05d}/{index:02d}"


@dataclass(slots=True)
class GroupSampling(Generic[T]):
    """One group while it is sampled. `sampled_tokens`: tokens of each rollout so far, if the engine reports them."""

    order: GroupOrder
    watch: DeadlineWatch | None
    tasks: list[asyncio.Task[T]] = field(default_factory=list)
    finishes: list[float] = field(default_factory=list)
    sampled_tokens: dict[int, int] = field(default_factory=dict)

    def start(self, work: Iterable[Coroutine[None, None, T]], group: asyncio.TaskGroup) -> int:
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
        work: Callable[[Callable[[], Awaitable[None]], Callable[[int], None] | None], Awaitable[T]],
    ) -> T:
        """The result of `work(leave, tell)`, with a place in the engine. `leave` frees the place; `tell` takes the
        number of tokens so far. It may make the engine stream, so it is None if there is no deadline."""
        async with AsyncExitStack() as place:
            await place.enter_async_context(bound)
            if self.watch is not None:
                self.watch.begin()
            tell = None if self.watch is None else partial(self.sampled_tokens.__setitem__, index)
            found = await work(partial(self.sampled, place), tell)
        self.finishes.append(time.perf_counter())
        return found

    async def sampled(self, place: AsyncExitStack) -> None:
        """Called by a task when its completion is sampled: frees its `place` in the engine."""
        if self.watch is not None:
            self.watch.arrived()
        await place.aclose()

    def stop(self) -> None:
        if self.watch is not None:
            self.watch.stop()

    @property
    def cut(self) -> set[int]:
        """Indices of the tasks that the deadline cut. Call it when all tasks have ended."""
        return {i for i, task in enumerate(self.tasks) if self.watch is not None and self.watch.was_cut(task)}

    @property
    def spread_s(self) -> float:
        return max(self.finishes) - min(self.finishes) if self.finishes else 0.0


def recorded(
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


def request_seed(seed: int, group: int, index: int, turn: int = 0) -> int:
    """A 64-bit seed for turn `turn` of rollout `index` of `group`, independent of other seeds. All arguments must be at
    least 0."""
    place = (seed, group, index, turn) if turn else (seed, group, index)
    return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0])


def gatherings_of(orders: Sequence[GroupOrder], deadline: Deadline | None) -> list[GroupSampling[Any]]:
    if deadline is None:
        return [GroupSampling(order, None) for order in orders]
    if deadline.over == "group":
        return [GroupSampling(order, DeadlineWatch(deadline)) for order in orders]
    watch = DeadlineWatch(deadline)
    return [GroupSampling(order, watch) for order in orders]


async def run_gatherings(
    gatherings: Sequence[GroupSampling[T]], works: Iterable[Iterable[Coroutine[None, None, T]]]
) -> None:
    """Run the tasks of all groups, of which `works` yields those of the next one. Stops their clocks at the end."""
    try:
        await all_or_none(partial(gathering.start, work) for gathering, work in zip(gatherings, works, strict=True))
    finally:
        for gathering in gatherings:
            gathering.stop()


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


@dataclass(frozen=True, slots=True)
class Observation:
    """The tokens that an environment adds for the prover: `token_ids` int32 [O], O >= 1, and their `text` for readers.
    The prover may answer with at most `max_tokens` tokens; 0: the episode ends with the observation."""

    token_ids: Int32
    text: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Transcript:
    """The part of an episode that an environment sees. The role is left out, because the verifier reads the
    observations.

    `prompt_ids` int32 [P]; `completion_ids` int32 [C] of all turns so far. `turn` is the number of the last turn, from
    0. `stopped`: the turn ended with a stop token.
    """

    id: str
    problem: Problem
    prompt_ids: Int32
    completion_ids: Int32
    turn: int
    stopped: bool


class Environment(Protocol):
    """Independent of tasks and engines. `graded_turn`: the prover turn that the task grades; 0 is the first, -1 the
    last."""

    @property
    def graded_turn(self) -> int: ...

    async def observe(self, transcripts: Sequence[Transcript]) -> list[Observation | None]:
        """The next observation of each episode; None ends it. Each may depend only on its own transcript."""


class EpisodeSampler(Protocol):
    """The part of the dispatcher that `play_episodes` needs (pvg.rollout.dispatcher imports this module)."""

    engine: Engine
    grader: Grader
    sampling: Sampling


@dataclass(slots=True, eq=False)
class _Episode:
    order: GroupOrder
    index: int
    id: str
    completions: list[Completion] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)

    def request(self, sampler: EpisodeSampler, seed: int, tell: Callable[[int], None] | None) -> GenerationRequest:
        turn, sampling = len(self.completions), sampler.sampling
        if not turn:
            return GenerationRequest(
                self.id, self.order.prompt_ids, sampling, seed, on_tokens=tell, group=self.order.group
            )
        sampling = replace(sampling, max_tokens=self.observations[-1].max_tokens)
        prompt_ids = np.concatenate([self.order.prompt_ids, *self.turn_tokens()])
        return GenerationRequest(
            f"{self.id}/{turn}", prompt_ids, sampling, seed, on_tokens=tell, group=self.order.group
        )

    def turn_tokens(self) -> list[Int32]:
        """The token ids of all turns so far, in order."""
        found: list[Int32] = []
        for turn, completion in enumerate(self.completions):
            found.append(completion.token_ids)
            if turn < len(self.observations):
                found.append(self.observations[turn].token_ids)
        return found

    def transcript(self) -> Transcript:
        completion_ids, last = np.concatenate(self.turn_tokens()), self.completions[-1]
        return Transcript(
            self.id,
            self.order.problem,
            self.order.prompt_ids,
            completion_ids,
            len(self.completions) - 1,
            last.finish_reason == "stop",
        )

    @property
    def tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    def joined(self, texts: Sequence[str]) -> tuple[Completion, tuple[Turn, ...]]:
        """All turns as one completion. `texts`: those of the prover's turns. An episode of one turn gets no turns."""
        tokens_by_turn, logprobs, spans, turns = self.turn_tokens(), list[Float32](), list[VersionSpan](), list[Turn]()
        start = 0
        for place, tokens in enumerate(tokens_by_turn):
            number, observed = divmod(place, 2)
            if observed:
                logprobs.append(np.zeros(len(tokens), dtype=np.float32))
                turns.append(Turn(start, False, self.observations[number].text))
            else:
                completion = self.completions[number]
                logprobs.append(completion.logprobs)
                shifted = [VersionSpan(start + span.start, span.version) for span in completion.spans]
                spans += [span for span in shifted if not spans or span.version != spans[-1].version]
                turns.append(Turn(start, True, texts[number]))
            start += len(tokens)
        whole = Completion(
            self.id,
            np.concatenate(tokens_by_turn),
            np.concatenate(logprobs),
            tuple(spans),
            self.completions[0].finish_reason,  # of the solution, which is graded
            Timing(
                sum(completion.timing.queued_s for completion in self.completions),
                sum(completion.timing.service_s for completion in self.completions),
            ),
            self.completions[0].routed_experts if len(self.completions) == 1 else None,
        )
        return whole, tuple(turns) if len(turns) > 1 else ()


@dataclass(slots=True)
class _EpisodeGroup:
    """The remaining episodes of one order."""

    order: GroupOrder
    episodes: list[_Episode]
    spread_s: float = 0.0
    cancelled: int = 0
    lost_tokens: int = 0


async def play_episodes(
    sampler: EpisodeSampler,
    orders: Sequence[GroupOrder],
    call: SampleCall,
    environment: Environment,
    bound: AbstractAsyncContextManager[None],
) -> list[Group]:
    """See `Dispatcher.sample`. Each request holds `bound`."""
    groups = [
        _EpisodeGroup(order, [_Episode(order, index, call.rollout_id(order, index)) for index in range(order.size)])
        for order in orders
    ]
    waiting = {episode for group in groups for episode in group.episodes}
    turn = 0
    while waiting:
        await _take_turn(sampler, groups, waiting, call, turn, bound)
        written = [episode for group in groups for episode in group.episodes if episode in waiting]
        observed = await environment.observe([episode.transcript() for episode in written])
        waiting = set()
        for episode, observation in zip(written, observed, strict=True):
            if observation is not None:
                episode.observations.append(observation)
                if observation.max_tokens:
                    waiting.add(episode)
        turn += 1
    finished = iter(await together([_finished(sampler, e, call, environment) for g in groups for e in g.episodes]))
    return [
        Group(
            group.order.problem,
            group.order.role,
            tuple(itertools.islice(finished, len(group.episodes))),
            group.spread_s,
            cancelled=group.cancelled,
            lost_tokens=group.lost_tokens,
        )
        for group in groups
    ]


async def _take_turn(
    sampler: EpisodeSampler,
    groups: Sequence[_EpisodeGroup],
    waiting: set[_Episode],
    call: SampleCall,
    turn: int,
    bound: AbstractAsyncContextManager[None],
) -> None:
    """Sample turn number `turn` of all `waiting` episodes. Removes those that the deadline cut from `groups`."""

    async def one(gathering: GroupSampling[Completion], place: int, episode: _Episode) -> Completion:
        async def sample(leave: Callable[[], Awaitable[None]], tell: Callable[[int], None] | None) -> Completion:
            seed = request_seed(call.seed, episode.order.group, episode.index, turn)
            completion = await sampler.engine.generate(episode.request(sampler, seed, tell))
            await leave()
            return completion

        return await gathering.admitted(place, bound, sample)

    live = [[episode for episode in group.episodes if episode in waiting] for group in groups]
    gatherings: list[GroupSampling[Completion]] = gatherings_of([group.order for group in groups], call.deadline)
    for group, episodes, gathering in zip(groups, live, gatherings, strict=True):
        if gathering.watch is not None:
            gathering.watch.count(len(group.episodes) - len(episodes))
    await run_gatherings(
        gatherings,
        (
            [one(gathering, place, episode) for place, episode in enumerate(episodes)]
            for gathering, episodes in zip(gatherings, live, strict=True)
        ),
    )
    for group, episodes, gathering in zip(groups, live, gatherings, strict=True):
        cut = gathering.cut
        for place, episode in enumerate(episodes):
            if place not in cut:
                episode.completions.append(gathering.tasks[place].result())
                continue
            group.episodes.remove(episode)
            waiting.discard(episode)
            group.lost_tokens += episode.tokens + gathering.sampled_tokens.get(place, 0)
        group.cancelled += len(cut)
        group.spread_s += gathering.spread_s


async def _finished(sampler: EpisodeSampler, episode: _Episode, call: SampleCall, environment: Environment) -> Rollout:
    texts = [sampler.grader.text(completion) for completion in episode.completions]
    graded = episode.completions[environment.graded_turn]
    _, grade = await sampler.grader.grade(episode.order.problem, graded)
    completion, turns = episode.joined(texts)
    text = "".join(turn.text for turn in turns) if turns else texts[0]
    return recorded(episode.order, call, episode.id, completion, text, grade, turns)
