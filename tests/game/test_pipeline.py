"""The pipeline: how much is in flight, what is given up, who learns of errors, and that nothing is left running."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_groups import made_group
from virtual_time import run_in_virtual_time

from pvg.errors import StateError
from pvg.game.prefetch import AdmissionGate, BufferedGroup, Pipeline, Prefer, Shares
from pvg.records import Group, Role

pytestmark = pytest.mark.slow


class Sampler:
    """Group n, counted over all roles, takes `seconds[n]` (the last of them for all others) once its request is in;
    `fails[n]` is raised then. `by_role`: a role's own seconds, group after group of that role.

    A group's tokens have the version the pipeline had when its request went in, and the one it has when it comes."""

    def __init__(
        self,
        seconds: list[float],
        fails: dict[int, BaseException] | None = None,
        by_role: dict[Role, list[float]] | None = None,
    ) -> None:
        self.seconds, self.fails, self.by_role = seconds, fails or {}, by_role or {}
        self.begun: list[int] = []
        self.roles: list[Role] = []  # of the groups begun
        self.asked: list[int] = []
        self.cancelled: list[int] = []
        self.now = self.most = 0
        self.pipeline: Pipeline

    def __call__(self, role: Role, gate: AdmissionGate) -> Coroutine[Any, Any, Group]:
        number, of_role = len(self.begun), self.roles.count(role)
        self.begun.append(number)
        self.roles.append(role)
        seconds, place = (self.by_role[role], of_role) if role in self.by_role else (self.seconds, number)
        return self.sample(number, role, seconds[min(place, len(seconds) - 1)], gate)

    async def sample(self, number: int, role: Role, seconds: float, gate: AdmissionGate) -> Group:
        async with gate:
            self.asked.append(number)
            self.now += 1
            self.most = max(self.most, self.now)
            first = self.pipeline.version
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                self.cancelled.append(number)
                await asyncio.sleep(0)  # an engine has to clean up
                raise
            finally:
                self.now -= 1
            if number in self.fails:
                raise self.fails[number]
            return made_group(str(number), [[first, self.pipeline.version], [self.pipeline.version]], role=role)


def opened(
    sampler: Sampler,
    *,
    count: int | Shares = 1,
    ahead: int = 3,
    budget: int = 2,
    concurrency: int = 100,
    version: int = 0,
    batches: int | None = None,
    prefer: Prefer = "fresh",
) -> Pipeline:
    """`count`: groups in a batch, all of one role; or the shares of each batch."""
    shares: Shares = count if callable(count) else lambda number: {Role.HELPFUL: count}
    sampler.pipeline = Pipeline(
        sampler,
        shares,
        ahead=ahead,
        budget=budget,
        concurrency=concurrency,
        version=version,
        batches=batches,
        prefer=prefer,
    )
    sampler.pipeline.start()
    return sampler.pipeline


def run(work: Coroutine[Any, Any, None]) -> None:
    async def whole() -> None:
        await work
        assert len(asyncio.all_tasks()) == 1  # nothing is left running

    run_in_virtual_time(whole())


def numbers(taken: list[BufferedGroup]) -> list[int]:
    return [int(arrival.group.problem.id) for arrival in taken]


def test_in_flight_and_waiting_fill_their_room_and_never_more() -> None:
    async def work() -> None:
        sampler = Sampler([1.0, 1.1, 1.2, 1.3])
        pipeline = opened(sampler, count=2, ahead=1)
        await asyncio.sleep(0.5)
        assert (pipeline.in_flight, pipeline.waiting) == (4, 0)
        await asyncio.sleep(10)
        assert (pipeline.in_flight, pipeline.waiting, sampler.begun) == (0, 4, [0, 1, 2, 3])
        assert numbers(await pipeline.take()) == [0, 1]
        await asyncio.sleep(0.5)
        assert (pipeline.in_flight, pipeline.waiting, sampler.begun) == (2, 2, [*range(6)])
        await pipeline.close()
        await pipeline.close()
        assert sampler.cancelled == [4, 5]

    run(work())


def test_a_straggler_holds_up_no_other_group() -> None:
    async def work() -> None:
        sampler = Sampler([50.0, 1.0])
        pipeline = opened(sampler, count=2, ahead=1, budget=9)
        loop = asyncio.get_running_loop()
        for step in range(3):
            taken = numbers(await pipeline.take())
            assert 0 not in taken
            assert loop.time() <= 2.5 * (step + 1)
            pipeline.published(step + 1)
        await asyncio.sleep(60)
        taken = numbers(await pipeline.take()) + numbers(await pipeline.take())
        assert 0 in taken  # within the budget of 9 it is used when it comes
        await pipeline.close()

    run(work())


# --- roles -----------------------------------------------------------------------------------------------------------


def halves(number: int) -> dict[Role, int]:
    return {Role.HELPFUL: 2, Role.SNEAKY: 2}


def roles_of(taken: list[BufferedGroup]) -> Counter[Role]:
    return Counter(arrival.group.role for arrival in taken)


def test_the_role_with_the_lowest_share_of_its_target_begins_next() -> None:
    async def work() -> None:
        sampler = Sampler([9.0])
        pipeline = opened(sampler, count=lambda number: {Role.HELPFUL: 3, Role.SNEAKY: 1}, ahead=1)
        await asyncio.sleep(1)
        assert Counter(sampler.roles[:4]) == {Role.HELPFUL: 3, Role.SNEAKY: 1}
        await pipeline.close()

    run(work())


def test_what_is_ahead_are_the_groups_of_the_next_batches() -> None:
    roles = [Role.HELPFUL, Role.HELPFUL, Role.SNEAKY, Role.HELPFUL, Role.SNEAKY, Role.SNEAKY]

    async def work() -> None:
        sampler = Sampler([1.0])
        pipeline = opened(sampler, count=lambda number: {roles[number]: 1}, ahead=2)
        for taken in range(4):
            await asyncio.sleep(2)
            assert Counter(sampler.roles) == Counter(roles[: taken + 3])
            if taken < 3:
                assert roles_of(await pipeline.take()) == {roles[taken]: 1}
        await pipeline.close()

    run(work())


@pytest.mark.parametrize(("prefer", "first"), [("fresh", 1), ("old", 0)])
def test_the_fresh_or_the_old_groups_are_taken_first(prefer: Prefer, first: int) -> None:
    async def work() -> None:
        pipeline = opened(Sampler([1.0]), ahead=1, concurrency=1, prefer=prefer)
        await asyncio.sleep(0.5)
        pipeline.published(1)  # the second group begins after it
        await asyncio.sleep(2)
        assert numbers(await pipeline.take()) == [first]
        await pipeline.close()

    run(work())


def test_what_can_only_come_too_late_is_cancelled_and_its_place_is_free() -> None:
    async def work() -> None:
        sampler = Sampler([100.0, 100.0, 1.0])
        pipeline = opened(sampler, ahead=2, budget=1)
        await pipeline.take()
        assert not pipeline.starved
        pipeline.published(1)
        await asyncio.sleep(0.1)
        assert sampler.cancelled == []  # one version behind is within the budget
        await pipeline.take()
        pipeline.published(2)
        await asyncio.sleep(1)
        assert sampler.cancelled == [0, 1]
        assert pipeline.lost.groups_cancelled == 2
        assert pipeline.in_flight + pipeline.waiting == 3
        await pipeline.close()
        assert pipeline.lost.groups_cancelled == 2  # closing gives up nothing for its age

    run(work())


def test_an_error_surfaces_in_the_next_batch_and_stops_the_others() -> None:
    async def work() -> None:
        sampler = Sampler([2.0, 1.0, 9.0], {0: StateError("the engine is gone")})
        pipeline = opened(sampler, ahead=2)
        await asyncio.sleep(5)  # the trainer works
        assert sampler.cancelled == [2]
        with pytest.raises(StateError, match="the engine is gone"):
            await pipeline.take()
        await asyncio.sleep(5)
        assert sampler.begun == [0, 1, 2]
        await pipeline.close()

    run(work())


def no_order(role: Role, gate: AdmissionGate) -> Coroutine[Any, Any, Group]:
    raise StateError("no problem is left")


async def no_rollouts(role: Role, gate: AdmissionGate) -> Group:
    return made_group("0", [])


@pytest.mark.parametrize(("sample", "error"), [(no_order, StateError), (no_rollouts, ValueError)])
def test_an_order_that_fails_ends_the_next_batch(sample: Any, error: type[Exception]) -> None:
    """It fails in the task that starts groups or where a group arrives, not in a group's task."""

    async def work() -> None:
        pipeline = Pipeline(sample, lambda number: {Role.HELPFUL: 1}, ahead=1, budget=1, concurrency=9, version=0)
        pipeline.start()
        with pytest.raises(error, match=r"no problem is left|empty"):
            await pipeline.take()
        await pipeline.close()

    run(work())


SECONDS = st.sampled_from([0.0, 0.5, 1.0, 3.0, 20.0])


@settings(deadline=None, max_examples=60)
@given(
    seconds=st.fixed_dictionaries(dict.fromkeys(Role, st.lists(SECONDS, min_size=1, max_size=20))),
    trained=st.lists(st.sampled_from([0.0, 0.7, 2.0, 8.0]), min_size=1, max_size=12),
    sneaky=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    prefetch=st.integers(1, 3),
    budget=st.integers(0, 3),
    concurrency=st.integers(1, 8),
    prefer=st.sampled_from(["fresh", "old"]),
)
def test_whatever_arrives_when_each_batch_has_its_roles_is_within_the_budget_and_comes(
    seconds: dict[Role, list[float]],
    trained: list[float],
    sneaky: list[int],
    prefetch: int,
    budget: int,
    concurrency: int,
    prefer: Prefer,
) -> None:
    """Any lengths of either role, any shares, any pace of the trainer. That no role starves the other is that every
    `take` ends: in virtual time one that cannot end is an error, not a test that hangs."""
    count = 3

    def shares(number: int) -> dict[Role, int]:
        of_sneaky = sneaky[number % len(sneaky)]
        return {Role.HELPFUL: count - of_sneaky, Role.SNEAKY: of_sneaky}

    async def work() -> None:
        sampler = Sampler([], by_role={role: [*own, 1.0] for role, own in seconds.items()})
        pipeline = sampler.pipeline = Pipeline(
            sampler, shares, ahead=prefetch, budget=budget, concurrency=concurrency, version=0, prefer=prefer
        )
        pipeline.start()
        seen: list[int] = []
        for step, time in enumerate(trained):
            taken = await pipeline.take()
            assert roles_of(taken) == Counter(shares(step))
            for arrival in taken:
                for rollout in arrival.group.rollouts:
                    assert 0 <= step - rollout.version <= budget
                    assert step - arrival.arrived >= 0
            seen += numbers(taken)
            await asyncio.sleep(time)
            await asyncio.sleep(0.01)
            assert pipeline.in_flight + pipeline.waiting == (1 + prefetch) * count
            assert sampler.most <= concurrency
            pipeline.published(step + 1)
        assert len(set(seen)) == len(seen)
        await pipeline.close()
        lost = pipeline.lost
        dropped_groups = (lost.on_arrival + lost.waiting) // 2
        assert lost.tokens == 4 * (lost.on_arrival + lost.waiting)
        assert len(seen) + lost.groups_cancelled + dropped_groups + pipeline.waiting <= len(sampler.begun)

    run(work())
