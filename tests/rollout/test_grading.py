"""Grading in a thread: the loop continues, grades and requests are the same as on the loop, errors are reported."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_policies import TOKENIZER, orders, with_engine

from pvg.records import Grade, Group, Problem, Timing, VersionSpan
from pvg.rollout.dispatcher import Dispatcher, SampleCall
from pvg.rollout.engine import Completion, GenerationRequest, Sampling
from pvg.rollout.gathering import Deadline, Grader
from pvg.rollout.torch_engine import TorchEngine

EOS = TOKENIZER.eos_id
PROBLEM = Problem("p", "1+1?", "2")
LIMIT_S = 60.0


class LengthTask:
    """Notes the length of the text; does `before` first."""

    def __init__(self, before: Any = None) -> None:
        self.before = before
        self.threads: list[str] = []

    def grade(self, problem: Problem, completion: str) -> Grade:
        self.threads.append(threading.current_thread().name)
        if self.before is not None:
            self.before(completion)
        return Grade(len(completion) % 2 == 0, bool(completion), note=str(len(completion)))


def completion(text: str, *, stopped: bool = True, repeats: int = 1) -> Completion:
    ids = np.tile(TOKENIZER.encode(text), repeats)
    ids = np.append(ids, np.int32(EOS)) if stopped else ids
    zeros = np.zeros(len(ids), np.float32)
    return Completion("r", ids, zeros, (VersionSpan(0, 0),), "stop" if stopped else "length", Timing())


@pytest.fixture
def thread() -> Any:
    with ThreadPoolExecutor(1, "grading") as found:
        yield found


def test_the_text_is_without_its_stop_token_and_graded_where_it_is_asked_for(thread: ThreadPoolExecutor) -> None:
    async def play(grader: Grader) -> Any:
        stopped, cut = completion("7=12"), completion("7=1", stopped=False)
        return await asyncio.gather(grader.grade(PROBLEM, stopped), grader.grade(PROBLEM, cut))

    found = []
    for executor, names in ((None, {"MainThread"}), (thread, {"grading_0"})):
        task = LengthTask()
        found.append(asyncio.run(play(Grader(task, TOKENIZER, executor))))
        assert set(task.threads) == names
    assert found[0] == found[1] == [("7=12", Grade(True, True, note="4")), ("7=1", Grade(False, True, note="3"))]


def test_the_loop_goes_on_while_a_completion_is_graded(thread: ThreadPoolExecutor) -> None:
    """The task waits for what only the loop can do: on the loop, it would wait for ever."""
    seen = threading.Event()

    def wait(_: str) -> None:
        assert seen.wait(LIMIT_S), "the loop stood still"

    async def play() -> None:
        grading = asyncio.create_task(Grader(LengthTask(wait), TOKENIZER, thread).grade(PROBLEM, completion("1")))
        await asyncio.sleep(0.01)
        seen.set()
        assert (await grading)[0] == "1"

    asyncio.run(play())


def test_what_a_task_raises_is_told_and_the_next_is_graded(thread: ThreadPoolExecutor) -> None:
    def refuse(text: str) -> None:
        if text == "8":
            raise ValueError("a grader's defect")

    async def play() -> None:
        grader = Grader(LengthTask(refuse), TOKENIZER, thread)
        with pytest.raises(ValueError, match="a grader's defect"):
            await grader.grade(PROBLEM, completion("8"))
        assert (await grader.grade(PROBLEM, completion("9")))[0] == "9"

    asyncio.run(play())


# --- with the dispatcher -----------------------------------------------------------------------------------------


async def sampled(engine: Any, executor: Any, task: Any, **options: Any) -> list[Group]:
    dispatcher = Dispatcher(engine, task, TOKENIZER, Sampling(8, (EOS,)), 16, executor)
    return await dispatcher.sample(orders([8] * 6), SampleCall(0, "base", 0, 5, "r", **options))


def test_where_it_is_graded_changes_no_bit_of_what_is_sampled(thread: ThreadPoolExecutor) -> None:
    """More rollouts than places: a slow grader must not delay the requests, whose company decides their last bits."""

    def play(executor: Any) -> list[Group]:
        async def use(engine: TorchEngine) -> list[Group]:
            return await sampled(engine, executor, LengthTask())

        found: list[Group] = with_engine(use, max_rows=16, max_in_flight=16)
        return found

    for one, other in zip(play(None), play(thread), strict=True):
        for left, right in zip(one.rollouts, other.rollouts, strict=True):
            assert (left.id, left.text, left.grade) == (right.id, right.text, right.grade)
            assert left.completion_ids.tobytes() == right.completion_ids.tobytes()
            assert left.logprobs.tobytes() == right.logprobs.tobytes()


class Ready:
    """Answers at once."""

    version, max_in_flight = 0, 1000

    def __init__(self) -> None:
        self.asked = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        self.asked += 1
        await asyncio.sleep(0)
        return completion("7=")


def test_a_deadline_does_not_cut_what_is_sampled_and_waits_for_its_grade(thread: ThreadPoolExecutor) -> None:
    free = threading.Event()
    task = LengthTask(lambda _: free.wait(LIMIT_S))

    async def play() -> list[Group]:
        deadline = Deadline(0.001, least=0)
        sampling = asyncio.create_task(sampled(Ready(), thread, task, deadline=deadline))
        await asyncio.sleep(0.05)
        free.set()
        return await sampling

    assert [(len(group.rollouts), group.cancelled) for group in asyncio.run(play())] == [(8, 0)] * 6


def test_a_deadline_does_not_cut_what_waits_for_its_reference(thread: ThreadPoolExecutor) -> None:
    class Slow(Ready):
        async def with_reference(self, request: GenerationRequest, found: Completion) -> Completion:
            await asyncio.sleep(0.05)
            return replace(found, reference_logprobs=found.logprobs - 1)

    call = sampled(Slow(), thread, LengthTask(), deadline=Deadline(0.001, least=0), reference=True)
    for group in asyncio.run(call):
        assert len(group.rollouts) == 8
        assert all(np.array_equal(each.reference_logprobs, each.logprobs - 1) for each in group.rollouts)


class TogetherTask(LengthTask):
    """Grades many at once, and notes how many."""

    def __init__(self, before: Any = None) -> None:
        super().__init__(before)
        self.sizes: list[int] = []

    def grade_many(self, solutions: Sequence[tuple[Problem, str]]) -> list[Grade]:
        self.sizes.append(len(solutions))
        return [self.grade(problem, text) for problem, text in solutions]


def test_a_task_that_grades_many_at_once_gets_what_waits(thread: ThreadPoolExecutor) -> None:
    first, go = threading.Event(), threading.Event()

    def before(_: str) -> None:
        first.set()
        assert go.wait(LIMIT_S)

    task = TogetherTask(before)

    async def play() -> Any:
        grader = Grader(task, TOKENIZER, thread)
        texts = ["1", "22", "333", "4444"]
        calls = [asyncio.create_task(grader.grade(PROBLEM, completion(text))) for text in texts]
        await asyncio.to_thread(first.wait, LIMIT_S)  # one is away, and the others are waiting
        go.set()
        return await asyncio.gather(*calls)

    found = asyncio.run(play())
    assert [text for text, _ in found] == ["1", "22", "333", "4444"]
    assert [grade.note for _, grade in found] == ["1", "2", "3", "4"]
    assert task.sizes == [1, 3]
