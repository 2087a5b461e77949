from __future__ import annotations

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvg.telemetry.spans import UNACCOUNTED, Tracer, run_in, span, submit_in


class Clock:
    """Time that moves only when the test moves it."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def executor():
    with ThreadPoolExecutor(2, "worker") as pool:
        yield pool


def without_zeros(seconds):
    return {name: value for name, value in seconds.items() if value != 0}


# --- one line of execution -------------------------------------------------------------------------------------------


def test_a_nested_span_is_charged_to_itself_alone(clock):
    tracer = Tracer(clock=clock)
    with tracer.drive():
        clock.now += 1  # outside of all spans
        with span("rollout"):
            clock.now += 2
            with span("grade"):
                clock.now += 4
            clock.now += 8
        budget = tracer.close_step()
    assert budget.exposed == budget.busy == {"rollout": 10.0, "grade": 4.0, UNACCOUNTED: 1.0}
    assert budget.wall_s == 15.0
    grade, rollout = tracer.take_spans()
    assert (grade.name, grade.depth, grade.track) == ("grade", 1, "driver")
    assert (rollout.name, rollout.depth, rollout.end_s - rollout.start_s) == ("rollout", 0, 14.0)
    assert grade.start_s - rollout.start_s == pytest.approx(2.0)
    assert tracer.take_spans() == []


def test_the_seconds_of_the_trainer_count_while_it_still_works(clock, executor):
    tracer = Tracer(clock=clock)
    with tracer.drive():
        with span("forward_backward"):
            clock.now += 2
            with span("score"):  # within the trainer's time
                clock.now += 1
            assert tracer.trained_s() == 3.0
        with span("rollout"):
            clock.now += 4
        with span("optimizer"):
            clock.now += 0.5
        assert tracer.trained_s() == 3.5
        tracer.close_step()  # the sum is that of the whole run
        assert tracer.trained_s() == 3.5
    with tracer.drive():
        asking = contextvars.copy_context()
        started, go_on = threading.Event(), threading.Event()

        def packs():
            with span("pack"):
                started.set()
                go_on.wait()

        work = executor.submit(asking.run, packs)
        started.wait()
        clock.now += 8
        assert tracer.trained_s() == 11.5  # another thread trains
        go_on.set()
        work.result()
        assert tracer.trained_s() == 11.5


PLANS = st.recursive(st.just([]), lambda inner: st.lists(st.tuples(st.sampled_from("abc"), inner), max_size=4))


# --- threads that are waited for ------------------------------------------------------------------------------------


def test_a_thread_that_is_waited_for_works_on_the_waiters_track(clock, executor):
    def train():
        clock.now += 1
        with span("optimizer"):
            clock.now += 2

    async def main():
        tracer = Tracer(clock=clock)
        with tracer.drive():
            with span("step"):
                await run_in(executor, train)
            return tracer.close_step(), tracer.take_spans()

    budget, spans = asyncio.run(main())
    assert budget.exposed == budget.busy == {"step": 1, "optimizer": 2, UNACCOUNTED: 0}
    assert [(s.name, s.depth, s.track) for s in spans] == [("optimizer", 1, "driver"), ("step", 0, "driver")]


def test_a_thread_that_outlives_the_span_it_was_started_in_held_nobody_up(clock, executor):
    begun, go_on = threading.Event(), threading.Event()

    def work():
        with span("background"):
            begun.set()
            assert go_on.wait(10)
            clock.now += 7

    async def main():
        tracer = Tracer(clock=clock)
        with tracer.drive():
            with span("start"):
                future = submit_in(executor, work)
                await asyncio.to_thread(begun.wait, 10)
                clock.now += 1  # the driver still waits inside "start", and the thread works for it
            with span("own"):
                clock.now += 2
            first = tracer.close_step()
            go_on.set()
            await future
            return first, tracer.close_step(), tracer.take_spans()

    first, second, spans = asyncio.run(main())
    assert without_zeros(first.exposed) == {"background": 1, "own": 2}
    assert without_zeros(first.busy) == {"background": 3, "own": 2}
    assert without_zeros(second.exposed) == {UNACCOUNTED: 7}
    assert without_zeros(second.busy) == {UNACCOUNTED: 7, "background": 7}
    assert {s.name: s.track.split("_")[0] for s in spans} == {
        "start": "driver",
        "own": "driver",
        "background": "worker",
    }


# --- tasks beside the driver -----------------------------------------------------------------------------------------


def test_of_two_that_work_for_one_wait_the_innermost_and_then_the_older_gets_the_time(clock):
    """Three tasks work for the wait; by hand: 0-1 none, 1-2 old, 2-4 old (young is hidden), 4-7 deep, 7-8 old."""

    async def old(turn):
        await turn(1)
        with span("old"):
            await turn(4)
            with span("deep"):
                await turn(7)
            await turn(8)

    async def young(turn):
        await turn(2)
        with span("young"):
            await turn(6)

    async def main():
        tracer, changed = Tracer(clock=clock), asyncio.Condition()

        async def turn(moment):
            async with changed:
                await changed.wait_for(lambda: clock.now >= 100 + moment)

        with tracer.drive():
            with span("wait"):
                tasks = [asyncio.create_task(old(turn)), asyncio.create_task(young(turn))]
                for moment in range(1, 9):
                    clock.now = 100.0 + moment
                    async with changed:
                        changed.notify_all()
                    for _ in range(5):
                        await asyncio.sleep(0)
                await asyncio.gather(*tasks)
            return tracer.close_step()

    budget = asyncio.run(main())
    assert without_zeros(budget.exposed) == {"wait": 1, "old": 4, "deep": 3}
    assert without_zeros(budget.busy) == {"wait": 1, "old": 4, "deep": 3, "young": 4}


def test_a_task_over_several_steps_is_counted_once_in_each(clock):
    async def sample(go_on):
        with span("decode"):
            await go_on.wait()

    async def main():
        tracer, go_on = Tracer(clock=clock), asyncio.Event()
        with tracer.drive():
            task = asyncio.create_task(sample(go_on))
            await asyncio.sleep(0)
            budgets = []
            for seconds in (1, 2, 4):
                with span("train"):
                    clock.now += seconds
                budgets.append(tracer.close_step())
            clock.now += 8
            go_on.set()
            await task
            return [*budgets, tracer.close_step()]

    budgets = asyncio.run(main())
    assert [budget.busy["decode"] for budget in budgets] == [1, 2, 4, 8]
    assert [budget.exposed.get("train", 0) for budget in budgets] == [1, 2, 4, 0]
    assert budgets[-1].exposed[UNACCOUNTED] == 8


@pytest.mark.slow
@given(st.data())
def test_the_budget_closes_whatever_runs_beside_the_driver(data):
    """Random tasks in random nesting, on a clock that moves at every switch."""
    clock = Clock()
    plan = data.draw(st.lists(st.tuples(PLANS, st.booleans()), min_size=1, max_size=4))
    ticks = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=20))

    def tick():
        clock.now += ticks[int(clock.now) % len(ticks)] or 1

    async def play(spans):
        for name, inner in spans:
            with span(name):
                tick()
                await asyncio.sleep(0)
                await play(inner)
            await asyncio.sleep(0)

    async def main():
        tracer = Tracer(clock=clock)
        budgets, tasks = [], []
        with tracer.drive():
            for spans, alone in plan:
                if alone:
                    tasks.append(asyncio.create_task(play(spans)))
                else:
                    with span("wait"):
                        await asyncio.gather(play(spans), asyncio.create_task(play(spans)))
                tick()
                budgets.append(tracer.close_step())
            await asyncio.gather(*tasks)
            budgets.append(tracer.close_step())
        return budgets

    budgets = asyncio.run(main())
    assert sum(budget.wall_s for budget in budgets) == pytest.approx(clock.now - 100)
    for budget in budgets:
        assert sum(budget.exposed.values()) == pytest.approx(budget.wall_s)
        assert all(seconds >= -1e-9 for seconds in budget.exposed.values())
        assert all(budget.busy.get(part, 0) >= seconds - 1e-9 for part, seconds in budget.exposed.items())


# --- devices ---------------------------------------------------------------------------------------------------------


class SlowDevice:
    """A device whose marks are reached when `ready` says so; each mark is one second after the one before."""

    def __init__(self):
        self.marks, self.ready = 0, False

    def mark(self):
        self.marks += 1
        return self.marks

    def elapsed_s(self, start, end):
        return float(end - start) if self.ready else None


def test_device_time_is_read_when_the_device_is_there_and_never_waited_for(clock):
    device = SlowDevice()
    tracer = Tracer(clock=clock, device_clock=device)
    with tracer.drive():
        with span("forward", device=True), span("inner", device=True):
            clock.now += 1
        with span("host"):
            pass
        assert tracer.close_step().device_s == {}
        assert [s.name for s in tracer.take_spans()] == ["host"]
        device.ready = True
        assert tracer.close_step().device_s == {"inner": 1.0, "forward": 3.0}
        assert [(s.name, s.device_s) for s in tracer.take_spans()] == [("inner", 1.0), ("forward", 3.0)]
