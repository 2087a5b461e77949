"""The dispatcher: groups in order, graded, reproducible, bounded, and clean when something fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_policies import TOKENIZER, with_engine

from pvg.errors import ConfigurationError, StateError
from pvg.records import Grade, Group, Problem, Role, Timing, VersionSpan
from pvg.rollout.dispatcher import Dispatcher, GroupOrder, SampleCall, request_seed
from pvg.rollout.engine import Completion, GenerationRequest, Sampling
from pvg.rollout.gathering import STARTED_AT_A_TIME
from pvg.rollout.torch_engine import TorchEngine

EOS = 1


class ParityTask:
    """Correct when the text has an even number of characters; well-formed when it has any."""

    def grade(self, problem: Problem, completion: str) -> Grade:
        if completion == problem.metadata.get("refuse"):
            raise ValueError("a grader's defect")
        return Grade(correct=len(completion) % 2 == 0, well_formed=bool(completion), answer=problem.answer)


class ScriptedEngine:
    """Answers with the tokens "7=" and a stop token; fails where the test says so; counts what is in flight."""

    version = 4

    def __init__(self, max_in_flight: int = 1000, fail_at: int | None = None) -> None:
        self.max_in_flight = max_in_flight
        self.fail_at = fail_at
        self.seen: list[GenerationRequest] = []
        self.now = self.most = self.cancelled = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        number = len(self.seen)
        self.seen.append(request)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            for _ in range(1 + number % 3):
                await asyncio.sleep(0)
            if number == self.fail_at:
                raise StateError("this one fails")
            if self.fail_at is not None:
                await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.now -= 1
        ids = np.append(TOKENIZER.encode("7="), np.int32(EOS))
        spans = (VersionSpan(0, self.version),)
        return Completion(request.id, ids, np.full(3, -0.5, np.float32), spans, "stop", Timing(1.0, 2.0))


def orders(count: int = 5, size: int = 4) -> list[GroupOrder]:
    roles = [Role.HELPFUL, Role.SNEAKY]
    return [
        GroupOrder(
            Problem(f"p{i}", f"{i}+1?", f"{i + 1}"), roles[i % 2], TOKENIZER.encode(f"H{i}+1?"), 10 * (count - i), size
        )
        for i in range(count)
    ]


async def sample(dispatcher: Dispatcher, wanted: list[GroupOrder], **changes: Any) -> list[Group]:
    call = SampleCall(round=2, source="round-001", step=9, seed=77, prefix="r2/mint")
    return await dispatcher.sample(wanted, replace(call, **changes))


def dispatcher_of(engine: Any, concurrency: int = 7) -> Dispatcher:
    return Dispatcher(engine, ParityTask(), TOKENIZER, Sampling(6, (EOS,)), concurrency)


def test_groups_come_in_the_order_of_their_orders_with_everything_known_of_each_rollout() -> None:
    wanted = orders()
    groups = asyncio.run(sample(dispatcher_of(ScriptedEngine()), wanted))
    assert [(group.problem, group.role) for group in groups] == [(order.problem, order.role) for order in wanted]
    assert [rollout.id for rollout in groups[1].rollouts] == [f"r2/mint/00040/0{i}" for i in range(4)]
    rollout = groups[1].rollouts[2]
    assert (rollout.problem_id, rollout.question, rollout.reference, rollout.role) == ("p1", "1+1?", "2", Role.SNEAKY)
    assert (rollout.round, rollout.source, rollout.step, rollout.group) == (2, "round-001", 9, 40)
    assert rollout.prompt_ids is wanted[1].prompt_ids
    assert rollout.text == "7="  # without the stop token, which its ids keep
    assert rollout.completion_ids.tolist() == [*TOKENIZER.encode("7="), EOS]
    assert rollout.grade == Grade(correct=True, well_formed=True, answer="2")
    assert (rollout.version, rollout.finish_reason, rollout.timing) == (4, "stop", Timing(1.0, 2.0))


def test_requests_are_submitted_in_order_under_the_bound_with_seeds_of_their_own() -> None:
    engine = ScriptedEngine()
    asyncio.run(sample(dispatcher_of(engine, concurrency=7), orders()))
    assert [request.id for request in engine.seen] == [
        f"r2/mint/{g:05d}/0{i}" for g in (50, 40, 30, 20, 10) for i in range(4)
    ]
    assert engine.most == 7
    assert [request.seed for request in engine.seen[:2]] == [request_seed(77, 50, 0), request_seed(77, 50, 1)]
    assert len({request.seed for request in engine.seen}) == 20
    assert len({request_seed(s, g, i) for s in range(8) for g in range(8) for i in range(8)}) == 512


def test_a_failed_request_cancels_the_others_before_it_surfaces() -> None:
    engine = ScriptedEngine(fail_at=3)

    async def run() -> None:
        with pytest.raises(StateError, match="this one fails"):
            await sample(dispatcher_of(engine, concurrency=7), orders())
        assert engine.now == 0
        assert engine.cancelled >= 6
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_concurrency_must_fit_the_engine() -> None:
    dispatcher_of(ScriptedEngine(max_in_flight=7), concurrency=7)
    with pytest.raises(ConfigurationError, match="concurrency is 8, but the engine takes 7"):
        dispatcher_of(ScriptedEngine(max_in_flight=7), concurrency=8)
    with pytest.raises(ConfigurationError, match="concurrency is 0"):
        dispatcher_of(ScriptedEngine(), concurrency=0)


def test_with_the_torch_engine_a_run_repeats_bit_by_bit_in_full_batches() -> None:
    def play() -> tuple[list[Group], float]:
        async def use(engine: TorchEngine) -> tuple[list[Group], float]:
            groups = await sample(dispatcher_of(engine, concurrency=16), orders(count=10, size=6))
            return groups, engine.stats.mean_batch

        found: tuple[list[Group], float] = with_engine(use, max_rows=16, max_in_flight=16)
        return found

    (first, mean_batch), (second, _) = play(), play()
    assert 12 < mean_batch < 16  # a freed place is taken again at once, until none is left to take it
    for one, other in zip(first, second, strict=True):
        for left, right in zip(one.rollouts, other.rollouts, strict=True):
            assert left.text == right.text == TOKENIZER.decode(left.completion_ids)
            assert left.completion_ids.tobytes() == right.completion_ids.tobytes()
            assert left.logprobs.tobytes() == right.logprobs.tobytes()
    assert len({rollout.text for group in first for rollout in group.rollouts}) > 30


def test_many_rollouts_begin_over_several_turns_of_the_loop_and_in_order() -> None:
    engine, turns = ScriptedEngine(), []

    async def play() -> None:
        sampling = asyncio.create_task(sample(dispatcher_of(engine, concurrency=1000), orders(count=300, size=4)))
        while not sampling.done():
            await asyncio.sleep(0)
            turns.append(len(engine.seen))
        await sampling

    asyncio.run(play())
    assert max(after - before for before, after in zip([0, *turns], turns, strict=False)) <= 2 * STARTED_AT_A_TIME
    assert [request.id for request in engine.seen] == [
        f"r2/mint/{10 * (300 - g):05d}/0{i}" for g in range(300) for i in range(4)
    ]
