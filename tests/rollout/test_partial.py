"""Partial rollouts: nothing that was ordered is lost or comes twice, and nothing is trained on that is too old."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_deadlines import AnyTask
from tiny_policies import TOKENIZER
from virtual_time import run_in_virtual_time

from pvg.errors import StateError
from pvg.records import Group, Problem, Role, VersionSpan
from pvg.rollout.dispatcher import Dispatcher, GroupOrder, PartialSampling, SampleCall
from pvg.rollout.engine import Completion, CutShort, Engine, GenerationRequest, PartialCompletion, Sampling
from pvg.rollout.gathering import Deadline
from pvg.servers.publishing import SyncTiming, WeightUpdate


class TimedEngine(Engine):
    """One token a second, regardless of the load. `lengths`: of the rollouts, in the order of their groups, `size` per
    group, repeated at the end."""

    version: int = 0
    max_in_flight: int = 1000

    def __init__(self, lengths: Sequence[int], size: int) -> None:
        self._lengths, self._size = lengths, size
        self._running: dict[str, asyncio.Future[bool]] = {}  # result: whether it ended by itself

    async def generate(self, request: GenerationRequest) -> Completion:
        loop, (_, group, index) = asyncio.get_running_loop(), request.id.rsplit("/", 2)
        length = self._lengths[(int(group) * self._size + int(index)) % len(self._lengths)]
        started = loop.time()
        end = self._running[request.id] = loop.create_future()
        timer = loop.call_later(length - request.tokens_resumed, lambda: end.done() or end.set_result(True))
        try:
            whole = await end
        finally:
            timer.cancel()
            del self._running[request.id]
        seconds = loop.time() - started
        tokens = length if whole else min(length - 1, request.tokens_resumed + int(seconds))
        ids, logprobs = np.full(tokens, int(request.prompt_ids[-1]), np.int32), np.full(tokens, -1.0, np.float32)
        spans, timing = request.spans(tokens, self.version), request.timing(0.0, seconds)
        if not whole:
            raise CutShort(PartialCompletion(ids, logprobs, spans, timing) if tokens else None)
        return Completion(request.id, ids, logprobs, spans, "length", timing)

    def cut(self, request_ids: Collection[str]) -> None:
        for end in (self._running[name] for name in request_ids if name in self._running):
            if not end.done():
                end.set_result(False)

    async def load_weights(self, update: WeightUpdate) -> SyncTiming:
        self.version = update.version
        return SyncTiming(update.version, wall_ms=0.0, rpc_ms=0.0)


class Game:
    """`groups` groups of `size`, whose rollouts have `lengths` tokens, one a second, in the order of their numbers."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        groups: int,
        size: int,
        seconds: float,
        least: int = 1,
        versions: int = 4,
        whole: bool = True,
        concurrency: int = 1000,
    ) -> None:
        self.engine = TimedEngine(lengths, size)
        self.groups, self.size = groups, size
        self.dispatcher = Dispatcher(self.engine, AnyTask(), TOKENIZER, Sampling(999, (1,)), concurrency)  # type: ignore[arg-type]
        deadline = Deadline(seconds, least, "batch")
        self.partial = PartialSampling(
            self.dispatcher, deadline, versions=versions, groups=groups, size=size, whole=whole
        )
        self.batch = 0

    def plan(self, batch: int) -> tuple[list[GroupOrder], SampleCall]:
        first, prompt = batch * self.groups, TOKENIZER.encode("H1+1?")
        orders = [
            GroupOrder(Problem(f"p{batch}-{g}", "1+1?", "2"), Role.HELPFUL, prompt, first + g, self.size)
            for g in range(self.groups)
        ]
        return orders, SampleCall(0, "base", batch, batch, f"b{batch}")

    async def next(self) -> list[Group]:
        """A batch, and then the next version."""
        number, self.batch = self.batch, self.batch + 1
        groups = await self.partial.sample(self.plan, number)
        await self.engine.load_weights(WeightUpdate(self.engine.version + 1, {}))
        assert len(asyncio.all_tasks()) == 1
        return groups


def batches(game: Game, count: int) -> list[list[Group]]:
    async def work() -> list[list[Group]]:
        return [await game.next() for _ in range(count)]

    found: list[list[Group]] = run_in_virtual_time(work())
    return found


def names(groups: Sequence[Group]) -> list[list[str]]:
    return [[rollout.id for rollout in group.rollouts] for group in groups]


def test_a_group_goes_on_under_the_next_version_and_takes_only_the_time_that_is_left() -> None:
    game = Game([1, 2, 1, 8, 3, 1, 2, 2, 1, 1], groups=2, size=2, seconds=3.5)

    async def work() -> None:
        loop = asyncio.get_running_loop()
        (first,) = await game.next()
        assert loop.time() == 3.5
        assert [rollout.id for rollout in first.rollouts] == ["b0/00000/00", "b0/00000/01"]
        assert game.partial.metrics == {"groups_carried": 1.0, "tokens_continued": 0.0}
        assert game.partial.carried == 2
        (second,) = await game.next()  # one new group beside it; that one is complete
        assert loop.time() == 7.0
        assert [rollout.id for rollout in second.rollouts] == ["b1/00002/00", "b1/00002/01"]
        assert game.partial.metrics == {"groups_carried": 1.0, "tokens_continued": 3.0}
        third = await game.next()
        assert names(third) == [["b0/00001/00", "b0/00001/01"], ["b1/00003/00", "b1/00003/01"]]
        assert [rollout.step for group in third for rollout in group.rollouts] == [0, 0, 2, 2]
        assert loop.time() == 7.0 + 2.0  # 8 tokens: 3, 3 and 2; then nothing is left to wait for
        early, late = third[0].rollouts
        assert early.spans == (VersionSpan(0, 0),)
        assert late.spans == (VersionSpan(0, 0), VersionSpan(3, 1), VersionSpan(6, 2))
        assert (len(late.completion_ids), late.version, late.step) == (8, 0, 0)
        assert (third[0].cancelled, third[0].lost_tokens, third[0].spread_s) == (0, 0, 0.0)
        assert game.partial.carried == 0

    run_in_virtual_time(work())


def test_a_batch_with_too_few_waits_until_it_has_them() -> None:
    # After 1.5 s no group is complete; the second is after 4 s, the third after 6 s.
    lengths = [1, 9, 1, 4, 1, 6]
    (found,) = batches(Game(lengths, groups=3, size=2, seconds=1.5, least=3), 1)
    assert names(found) == [["b0/00001/00", "b0/00001/01"], ["b0/00002/00", "b0/00002/01"]]


def test_where_no_mean_is_taken_each_rollout_comes_by_itself() -> None:
    game = Game([1, 5, 2, 2, 1, 1, 1, 1], groups=2, size=2, seconds=3.5, whole=False)
    first, second = batches(game, 2)
    assert names(first) == [["b0/00000/00"], ["b0/00001/00"], ["b0/00001/01"]]
    # Beside the one rollout that is carried, as many groups of two as make the batch at least as large as it was.
    assert names(second)[0] == ["b0/00000/01"]
    assert names(second)[1:] == [["b1/00002/00"], ["b1/00002/01"], ["b1/00003/00"], ["b1/00003/01"]]
    assert second[0].rollouts[0].spans == (VersionSpan(0, 0), VersionSpan(3, 1))


def test_a_group_that_grows_too_old_is_used_with_what_is_finished_or_given_up() -> None:
    # Of three groups, one is complete, one has two finished, one has one. Two batches of 3 s each, then it is over.
    lengths = [1, 1, 1, 1, 2, 99, 3, 99, 99, *[1] * 99]
    game = Game(lengths, groups=3, size=3, seconds=3.5, versions=1)
    first, second = batches(game, 2)
    assert names(first) == [["b0/00000/00", "b0/00000/01", "b0/00000/02"]]
    assert names(second) == [["b0/00001/00", "b0/00001/01"], [], ["b1/00003/00", "b1/00003/01", "b1/00003/02"]]
    assert [(group.cancelled, group.lost_tokens) for group in second] == [(1, 6), (3, 3 + 6 + 6), (0, 0)]
    assert game.partial.carried == 0


def test_an_engine_that_cannot_cut_is_refused_before_anything_is_asked_of_it() -> None:
    class Uncut(TimedEngine):
        cut = Engine.cut

    game = Game([1], groups=1, size=2, seconds=1)
    game.dispatcher.engine = Uncut([1], 2)
    with pytest.raises(StateError, match="Uncut cannot return unfinished completions") as caught:
        PartialSampling(game.dispatcher, Deadline(1, 1, "batch"), versions=1, groups=1, size=2, whole=True)
    assert caught.value.remedy == "Set rollout.deadline to 'none' or 'cut'."


@pytest.mark.parametrize("early", [True, False], ids=["before it has enough", "at the deadline"])
@pytest.mark.parametrize("groups", [2, 300])
def test_what_the_engine_raises_when_it_shall_cut_fails_the_batch(
    early: bool, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first group is complete after 1 s: before the deadline, or after it. The others take long.
    game = Game([1, 1, *[50] * (2 * groups - 2)], groups=groups, size=2, seconds=0.5 if early else 2.5)

    def failing(_request_ids: Collection[str]) -> None:
        raise StateError("the engine has no ears")

    async def work() -> None:
        monkeypatch.setattr(game.engine, "cut", failing)
        with pytest.raises(StateError, match="the engine has no ears"):
            await game.next()
        assert asyncio.get_running_loop().time() == (1.0 if early else 2.5)
        assert len(asyncio.all_tasks()) == 1
        assert game.engine._running == {}

    run_in_virtual_time(work())


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=23),
    groups=st.integers(1, 4),
    size=st.integers(1, 4),
    seconds=st.integers(0, 20),
    least=st.integers(1, 6),
    versions=st.integers(1, 4),
    whole=st.booleans(),
    concurrency=st.sampled_from([1, 3, 1000]),
)
def test_every_rollout_comes_once_or_is_counted_or_is_still_carried(seconds: int, least: int, **how: Any) -> None:
    whole, size, groups = how["whole"], how["size"], how["groups"]
    game = Game(seconds=seconds + 0.5, least=min(least, groups * size), **how)
    delivered: Counter[str] = Counter()
    cancelled = 0

    async def work() -> None:
        nonlocal cancelled
        for _ in range(6):
            version = game.engine.version
            found = await game.next()
            assert sum(len(group.rollouts) for group in found) >= min(least, groups * size)
            for group in found:
                cancelled += group.cancelled
                assert len(group.rollouts) + group.cancelled == (size if whole else 1)
                assert len(group.rollouts) != 1 or size == 1 or not whole
                for rollout in group.rollouts:
                    delivered[rollout.id] += 1
                    check(rollout, version)
            ordered = game.partial.state()["ordered"] * size
            assert ordered == sum(delivered.values()) + cancelled + game.partial.carried
            assert game.partial.carried < groups * size + size

    def check(rollout: Any, version: int) -> None:
        number, index = rollout.group, int(rollout.id.rsplit("/")[-1])
        assert (
            len(rollout.completion_ids)
            == len(rollout.logprobs)
            == how["lengths"][(number * size + index) % len(how["lengths"])]
        )
        assert 0 <= version - rollout.version <= how["versions"]
        starts = [span.start for span in rollout.spans]
        versions = [span.version for span in rollout.spans]
        assert starts == sorted(set(starts))
        assert starts[0] == 0
        assert starts[-1] < len(rollout.completion_ids)
        assert versions == sorted(set(versions))

    run_in_virtual_time(work())
    assert set(delivered.values()) <= {1}
