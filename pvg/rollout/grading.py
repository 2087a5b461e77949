"""`Grader`: turns completions into text and grades, off the event loop.

    grader = Grader(task, tokenizer, executor)      # None: immediately, on the event loop
    text, grade = await grader.grade(problem, completion)

Decoding and grading a long completion takes milliseconds, and many completions finish together, so on the event loop
they would delay everything else. They go to the executor several at a time, because handing over a short one takes
longer than grading it.

Invariant: a grade depends only on the text, not on where or with which others it is graded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pvg.records import Grade, Int32, Problem
from pvg.rollout.engine import Completion
from pvg.tasks.task import GradesInBatches
from pvg.telemetry.spans import span, submit_in

if TYPE_CHECKING:
    from pvg.models.tokenizer import Tokenizer
    from pvg.tasks.task import Task

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
