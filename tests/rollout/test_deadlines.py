"""Deadlines: which rollouts stay in a group, what happens to the others, and that no request waits forever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policies import TOKENIZER, orders
from virtual_time import run_in_virtual_time

from pvg.records import Grade, Group, Problem, Timing, VersionSpan
from pvg.rollout.dispatcher import Dispatcher, SampleCall
from pvg.rollout.engine import Completion, GenerationRequest, Sampling
from pvg.rollout.gathering import Deadline

pytestmark = pytest.mark.slow

TOKENS_PER_S = 10


class AnyTask:
    def grade(self, problem: Problem, completion: str) -> Grade:
        return Grade(correct=True, well_formed=True)


class TimedEngine:
    """Takes the seconds that `takes` has for a rollout, by (group, index); tells its tokens; counts what it is in.
    Raises what `fails` has for one instead."""

    def __init__(
        self, takes: dict[tuple[int, int], float], fails: dict[tuple[int, int], BaseException] | None = None
    ) -> None:
        self.takes, self.fails = takes, fails or {}
        self.max_in_flight = 10_000
        self.asked: list[tuple[int, int]] = []
        self.cancelled: list[tuple[int, int]] = []
        self.now = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        _, group, index = request.id.split("/")
        key = int(group), int(index)
        self.asked.append(key)
        self.now += 1
        try:
            for second in range(int(self.takes[key])):
                await asyncio.sleep(1)
                if request.on_tokens is not None:
                    request.on_tokens((second + 1) * TOKENS_PER_S)
            await asyncio.sleep(self.takes[key] % 1)
        except asyncio.CancelledError:
            self.cancelled.append(key)
            await asyncio.sleep(0)  # an engine has to clean up
            raise
        finally:
            self.now -= 1
        if key in self.fails:
            raise self.fails[key]
        ids = TOKENIZER.encode("7=")
        return Completion(request.id, ids, np.zeros(2, np.float32), (VersionSpan(0, 1),), "length", Timing())


def play(
    engine: TimedEngine, sizes: Sequence[int], deadline: Deadline | None, concurrency: int = 1000
) -> list[list[tuple[int, int]]]:
    """(group, index) of each group's rollouts."""
    return [
        [key_of(rollout.id) for rollout in group.rollouts] for group in groups(engine, sizes, deadline, concurrency)
    ]


def groups(
    engine: TimedEngine, sizes: Sequence[int], deadline: Deadline | None, concurrency: int = 1000
) -> list[Group]:
    async def work() -> list[Group]:
        found = await sampling(engine, sizes, deadline, concurrency)
        assert engine.now == 0
        assert len(asyncio.all_tasks()) == 1
        return found

    found: list[Group] = run_in_virtual_time(work())
    return found


async def sampling(
    engine: TimedEngine, sizes: Sequence[int], deadline: Deadline | None, concurrency: int = 1000
) -> list[Group]:
    dispatcher = Dispatcher(engine, AnyTask(), TOKENIZER, Sampling(6, (1,)), concurrency)  # type: ignore[arg-type]
    return await dispatcher.sample(
        orders(sizes), SampleCall(round=0, source="base", step=0, seed=1, prefix="p", deadline=deadline)
    )


def key_of(rollout_id: str) -> tuple[int, int]:
    _, group, index = rollout_id.split("/")
    return int(group), int(index)


def takes(*seconds: Sequence[float]) -> dict[tuple[int, int], float]:
    return {(g, i): s for g, row in enumerate(seconds) for i, s in enumerate(row)}


def test_a_group_is_used_with_what_has_arrived_and_the_rest_is_cancelled_and_counted() -> None:
    engine = TimedEngine(takes([1, 9.5, 3, 2], [1, 1, 1, 1]))
    first, second = groups(engine, [4, 4], Deadline(4.5, least=2))
    assert [rollout.id for rollout in first.rollouts] == ["p/00000/00", "p/00000/02", "p/00000/03"]
    assert (first.cancelled, first.lost_tokens) == (1, 4 * TOKENS_PER_S)
    assert (len(second.rollouts), second.cancelled, second.lost_tokens) == (4, 0, 0)
    assert engine.cancelled == [(0, 1)]


def test_a_deadline_that_nobody_misses_changes_nothing() -> None:
    rows = takes([3, 1, 2], [2, 5, 1])
    plain, watched = TimedEngine(rows), TimedEngine(rows)
    assert play(plain, [3, 3], None) == play(watched, [3, 3], Deadline(100, least=1))
    assert plain.asked == watched.asked
    assert watched.cancelled == []


SECONDS = st.integers(1, 400).map(lambda tenths: tenths / 8)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.lists(SECONDS, min_size=1, max_size=5, unique=True), min_size=1, max_size=4),
    seconds=SECONDS.map(lambda s: s + 1 / 16),
    least=st.integers(1, 5),
    over=st.sampled_from(["group", "batch"]),
)
def test_who_is_left_is_who_came_in_time_or_first(
    rows: list[list[float]], seconds: float, least: int, over: Any
) -> None:
    """Against the rule, worked out from the list of arrivals. (Ties between groups are broken by the engine.)"""
    arrivals = {(g, i): s + g / 1000 for g, row in enumerate(rows) for i, s in enumerate(row)}
    sets = [list(arrivals)] if over == "batch" else [[(g, i) for i in range(len(row))] for g, row in enumerate(rows)]
    expected: set[Any] = set()
    for keys in sets:
        ranked = sorted(keys, key=arrivals.__getitem__)
        in_time = [key for key in ranked if arrivals[key] <= seconds]
        expected |= set(in_time if len(in_time) >= least else ranked[:least])
    engine = TimedEngine(arrivals)
    found = play(engine, [len(row) for row in rows], Deadline(seconds, least, over))
    assert {key for group in found for key in group} == expected
    assert set(engine.cancelled) == arrivals.keys() - expected
