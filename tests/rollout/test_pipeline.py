"""The pipeline: how much is in flight, what is given up, who learns of errors, and that nothing is left running."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_groups import made_group
from virtual_time import run_in_virtual_time

from pvg.errors import StateError
from pvg.records import Group
from pvg.rollout.buffer import Taken
from pvg.rollout.dispatcher import all_or_none
from pvg.rollout.pipeline import Gate, Pipeline
from pvg.telemetry.spans import Tracer, span


class Sampler:
    """Group n takes `seconds[n]` (the last of them for all others) once its request is in; `fails[n]` is raised then.

    A group's tokens have the version the pipeline had when its request went in, and the one it has when it comes."""

    def __init__(self, seconds: list[float], fails: dict[int, BaseException] | None = None) -> None:
        self.seconds, self.fails = seconds, fails or {}
        self.begun: list[int] = []
        self.asked: list[int] = []
        self.cancelled: list[int] = []
        self.now = self.most = 0
        self.pipeline: Pipeline

    async def __call__(self, number: int, gate: Gate) -> Group:
        self.begun.append(number)
        async with gate:
            self.asked.append(number)
            self.now += 1
            self.most = max(self.most, self.now)
            first = self.pipeline.version
            try:
                await asyncio.sleep(self.seconds[min(number, len(self.seconds) - 1)])
            except asyncio.CancelledError:
                self.cancelled.append(number)
                await asyncio.sleep(0)  # an engine has to clean up
                raise
            finally:
                self.now -= 1
            if number in self.fails:
                raise self.fails[number]
            return made_group(str(number), [[first, self.pipeline.version], [self.pipeline.version]])


def opened(
    sampler: Sampler,
    *,
    capacity: int = 4,
    budget: int = 2,
    concurrency: int = 100,
    version: int = 0,
    begun: int = 0,
    wanted: int | None = None,
) -> Pipeline:
    sampler.pipeline = Pipeline(
        sampler, capacity=capacity, budget=budget, concurrency=concurrency, version=version, begun=begun, wanted=wanted
    )
    sampler.pipeline.start()
    return sampler.pipeline


def run(work: Coroutine[Any, Any, None]) -> None:
    async def whole() -> None:
        await work
        assert len(asyncio.all_tasks()) == 1  # nothing is left running

    run_in_virtual_time(whole())


def numbers(taken: list[Taken]) -> list[int]:
    return [int(arrival.group.problem.id) for arrival in taken]


def test_in_flight_and_waiting_fill_the_capacity_and_never_more() -> None:
    async def work() -> None:
        sampler = Sampler([1.0, 1.1, 1.2, 1.3])
        pipeline = opened(sampler, capacity=4)
        await asyncio.sleep(0.5)
        assert (pipeline.in_flight, pipeline.waiting) == (4, 0)
        await asyncio.sleep(10)
        assert (pipeline.in_flight, pipeline.waiting, sampler.begun) == (0, 4, [0, 1, 2, 3])
        assert numbers(await pipeline.take(3)) == [0, 1, 2]
        await asyncio.sleep(0.5)
        assert (pipeline.in_flight, pipeline.waiting, sampler.begun) == (3, 1, [*range(7)])
        await pipeline.close()
        await pipeline.close()
        assert sampler.cancelled == [4, 5, 6]

    run(work())


def test_no_group_is_begun_after_the_last_that_is_wanted_was_taken() -> None:
    async def work() -> None:
        sampler = Sampler([1.0])
        pipeline = opened(sampler, capacity=6, budget=9, wanted=8)
        taken = []
        for step in range(4):
            await asyncio.sleep(5)
            taken += numbers(await pipeline.take(2))
            pipeline.published(step + 1)
        await asyncio.sleep(5)
        assert len(set(taken)) == 8
        assert sampler.begun == [*range(6 + 6)]  # those taken before the last two made room, and these two did not
        await pipeline.close()
        assert sampler.cancelled == []

    run(work())


def test_a_straggler_holds_up_no_other_group() -> None:
    async def work() -> None:
        sampler = Sampler([50.0, 1.0])
        pipeline = opened(sampler, capacity=4, budget=9)
        loop = asyncio.get_running_loop()
        for step in range(3):
            taken = numbers(await pipeline.take(2))
            assert 0 not in taken
            assert loop.time() <= 2.5 * (step + 1)
            pipeline.published(step + 1)
        await asyncio.sleep(60)
        assert numbers(await pipeline.take(4))[-1] == 0  # within the budget of 9 it is used when it comes
        await pipeline.close()

    run(work())


def test_requests_in_flight_are_bounded_over_all_groups() -> None:
    async def work() -> None:
        sampler = Sampler([1.0])
        pipeline = opened(sampler, capacity=8, concurrency=3)
        await pipeline.take(8)
        assert sampler.most == 3
        assert sampler.asked[:8] == [*range(8)]
        await pipeline.close()

    run(work())


def test_what_can_only_come_too_late_is_cancelled_and_its_place_is_free() -> None:
    async def work() -> None:
        sampler = Sampler([100.0, 1.0])
        pipeline = opened(sampler, capacity=2, budget=1)
        for version in (1, 2):
            await pipeline.take(1)
            pipeline.published(version)
        await asyncio.sleep(1)
        assert sampler.cancelled == [0]
        assert pipeline.lost.groups_cancelled == 1
        assert pipeline.in_flight + pipeline.waiting == 2
        await pipeline.close()
        assert pipeline.lost.groups_cancelled == 1  # closing gives up nothing for its age

    run(work())


def test_waiting_for_the_gate_makes_nothing_stale() -> None:
    async def work() -> None:
        sampler = Sampler([3.0, 1.0])
        pipeline = opened(sampler, capacity=2, budget=0, concurrency=1)
        await asyncio.sleep(0.5)
        pipeline.published(5)  # group 0 is in flight, and group 1 has asked for nothing yet
        (taken,) = await pipeline.take(1)
        assert (sampler.cancelled, numbers([taken]), taken.group.rollouts[0].version) == ([0], [1], 5)
        await pipeline.close()

    run(work())


def test_numbers_go_on_behind_those_that_were_begun_before() -> None:
    async def work() -> None:
        sampler = Sampler([1.0])
        pipeline = opened(sampler, capacity=3, begun=17)
        assert numbers(await pipeline.take(2)) == [17, 18]
        await asyncio.sleep(0.1)
        assert pipeline.begun == 22
        await pipeline.close()

    run(work())


def test_an_error_surfaces_in_the_next_batch_and_stops_the_others() -> None:
    async def work() -> None:
        sampler = Sampler([2.0, 1.0, 9.0], {0: StateError("the engine is gone")})
        pipeline = opened(sampler, capacity=3)
        await asyncio.sleep(5)  # the trainer works
        assert sampler.cancelled == [2]
        with pytest.raises(StateError, match="the engine is gone"):
            await pipeline.take(1)
        await asyncio.sleep(5)
        assert sampler.begun == [0, 1, 2]
        await pipeline.close()

    run(work())


def test_an_error_surfaces_where_a_batch_is_waited_for() -> None:
    async def work() -> None:
        pipeline = opened(Sampler([2.0, 9.0], {0: StateError("the engine is gone")}), capacity=3)
        with pytest.raises(StateError, match="the engine is gone"):
            await pipeline.take(3)
        await pipeline.close()

    run(work())


@pytest.mark.parametrize("how", ["closed", "closed twice", "failed"])
def test_what_was_given_up_is_left_to_clean_up(how: str) -> None:
    """Each request of a group takes 5 s to leave the engine; whoever cancels it again meanwhile leaves it there."""
    in_engine: set[int] = set()

    async def request(index: int, gate: Gate) -> None:
        async with gate:
            in_engine.add(index)
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(5)
                in_engine.discard(index)

    async def sample(number: int, gate: Gate) -> Group:
        if number:
            await asyncio.sleep(3)  # the second group has asked for nothing yet, and fails while the first cleans up
            raise StateError("the engine is gone")
        await all_or_none([[asyncio.create_task(request(index, gate)) for index in range(3)]])
        raise AssertionError("never")

    async def work() -> None:
        pipeline = Pipeline(sample, capacity=2 if how == "failed" else 1, budget=0, concurrency=9, version=0)
        pipeline.start()
        await asyncio.sleep(1)
        pipeline.published(1)
        if how == "failed":
            with pytest.raises(StateError, match="the engine is gone"):
                await pipeline.take(1)
        await asyncio.sleep(1)  # it has begun to clean up
        assert in_engine == {0, 1, 2}
        if how == "closed twice":
            await asyncio.gather(pipeline.close(), pipeline.close())
        else:
            await pipeline.close()
        assert in_engine == set()

    run(work())


def test_who_waits_for_a_batch_can_be_cancelled() -> None:
    async def work() -> None:
        sampler = Sampler([9.0])
        pipeline = opened(sampler)
        taking = asyncio.create_task(pipeline.take(1))
        await asyncio.sleep(1)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        await pipeline.close()
        assert sampler.cancelled == [0, 1, 2, 3]

    run(work())


def test_the_trainer_waits_for_rollouts_and_what_overlaps_is_busy() -> None:
    async def work() -> None:
        clock = asyncio.get_running_loop().time
        tracer = Tracer(clock=clock)
        with tracer.drive():
            pipeline = opened(Sampler([4.0]), capacity=2)
            tracer.close_step()
            for step in range(3):
                with span("wait_for_rollouts"):
                    await pipeline.take(1)
                with span("forward_backward"):
                    await asyncio.sleep(3.0)
                pipeline.published(step + 1)
                budget = tracer.close_step()
                assert sum(budget.exposed.values()) == pytest.approx(budget.wall_s)
                assert "rollout" not in budget.exposed
                assert budget.exposed["unaccounted"] == pytest.approx(0.0)
                if step == 0:
                    assert budget.exposed["wait_for_rollouts"] == pytest.approx(4.0)
                    assert budget.busy["rollout"] == pytest.approx(7.0)  # all the time something was in flight
            await pipeline.close()

    run(work())


@settings(deadline=None, max_examples=60)
@given(
    seconds=st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, 20.0]), min_size=1, max_size=30),
    trained=st.lists(st.sampled_from([0.0, 0.7, 2.0, 8.0]), min_size=1, max_size=12),
    prefetch=st.integers(1, 3),
    budget=st.integers(0, 3),
    concurrency=st.integers(1, 8),
)
def test_whatever_the_order_of_arrivals_and_updates_no_batch_is_over_the_budget(
    seconds: list[float], trained: list[float], prefetch: int, budget: int, concurrency: int
) -> None:
    count = 2

    async def work() -> None:
        sampler = Sampler([*seconds, 1.0])
        capacity = (1 + prefetch) * count
        pipeline = opened(sampler, capacity=capacity, budget=budget, concurrency=concurrency)
        seen: list[int] = []
        for step, time in enumerate(trained):
            taken = await pipeline.take(count)
            for arrival in taken:
                for rollout in arrival.group.rollouts:
                    assert 0 <= step - rollout.version <= budget
                    assert step - arrival.arrived >= 0
            seen += numbers(taken)
            await asyncio.sleep(time)
            assert pipeline.in_flight + pipeline.waiting <= capacity
            assert sampler.most <= concurrency
            pipeline.published(step + 1)
        assert len(set(seen)) == len(seen)
        assert sampler.begun == [*range(len(sampler.begun))]
        await pipeline.close()
        lost = pipeline.lost
        dropped_groups = (lost.on_arrival + lost.waiting) // 2
        assert lost.tokens == 4 * (lost.on_arrival + lost.waiting)
        assert len(seen) + lost.groups_cancelled + dropped_groups + pipeline.waiting <= len(sampler.begun)

    run(work())
