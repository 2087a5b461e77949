"""Requests for many workers: the event loop stays free, and callers may leave before their block is sent."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from test_worker_processes import experiment
from worker_stand_ins import DyingSupply

from pvg.errors import StateError
from pvg.rollout.engine import CutShort, GenerationRequest, Sampling
from pvg.workers import pool as pool_module
from pvg.workers.engine import WorkerEngine
from pvg.workers.frames import Frame, receive, send
from pvg.workers.pool import WorkerPool

WORKERS = 80


class AnsweringSupply(DyingSupply):
    """Workers that confirm every request but those for completions."""

    async def _work(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (frame := await receive(reader)) is not None:
            if "id" in frame.fields and frame.kind != "generate":
                send(writer, Frame("done", {"id": frame.fields["id"]}))
        writer.close()


def request(group: int) -> GenerationRequest:
    return GenerationRequest(f"r{group}", np.array([3, 4], np.int32), Sampling(4, (1,)), group, group=group)


class ForgetfulSupply(AnsweringSupply):
    """The first worker ends when it gets a second cut. `cut`: the cut rows in each block that a worker got."""

    def __init__(self) -> None:
        super().__init__()
        self.cut: list[list[str]] = []
        self.told: list[str] = []
        self.again = asyncio.Event()

    async def _work(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (self.started > 1 or len(self.told) < 2) and (frame := await receive(reader)) is not None:
            if frame.kind == "cut":
                self.told += frame.fields["ids"]
            elif frame.kind == "generate":
                self.cut.append(frame.fields["cut"])
                if len(self.cut) == 2:
                    self.again.set()
            elif "id" in frame.fields:
                send(writer, Frame("done", {"id": frame.fields["id"]}))
        writer.close()


class Submissions:
    """Counts the requests that a pool sends in each turn of the event loop."""

    def __init__(self, pool: WorkerPool) -> None:
        self.per_turn = [0]
        self.first = asyncio.Event()
        self._submit = pool.submit
        pool.submit = self._count  # type: ignore[method-assign]
        self._turns = asyncio.create_task(self._turn())

    async def _turn(self) -> None:
        while True:
            self.per_turn.append(0)
            await asyncio.sleep(0)

    def _count(self, *arguments, **named):
        self.per_turn[-1] += 1
        self.first.set()
        return self._submit(*arguments, **named)

    def stop(self) -> int:
        """The largest number."""
        self._turns.cancel()
        return max(self.per_turn)


def test_requests_for_many_workers_are_spread_over_turns_of_the_event_loop():
    async def run() -> None:
        pool = WorkerPool(experiment(WORKERS), AnsweringSupply(""))
        await pool.start()
        engine = WorkerEngine(pool)
        try:
            sent = Submissions(pool)
            answers = await pool.ask(range(WORKERS), Frame("policy"))
            assert len(answers) == WORKERS
            assert sent.stop() == pool_module.AT_ONCE
            sent = Submissions(pool)
            calls = [asyncio.create_task(engine.generate(request(group))) for group in range(WORKERS)]
            while sum(sent.per_turn) < WORKERS:  # noqa: ASYNC110 - the test counts the turns
                await asyncio.sleep(0)
            assert sent.stop() == 1
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await engine.close()
            await pool.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_requests_that_are_not_sent_yet_can_be_cut_cancelled_and_closed():
    async def run() -> None:
        pool = WorkerPool(experiment(WORKERS), AnsweringSupply(""))
        await pool.start()
        engine = WorkerEngine(pool)
        try:
            sent = Submissions(pool)
            calls = [asyncio.create_task(engine.generate(request(group))) for group in range(WORKERS)]
            await sent.first.wait()
            engine.cut([f"r{WORKERS - 1}"])
            with pytest.raises(CutShort):
                await calls[-1]
            calls[-2].cancel()
            await asyncio.wait({calls[-2]})
            unsent = calls[-3]
            await engine.close()
            with pytest.raises(StateError, match="The engine is closed"):
                await unsent
            assert 1 <= sum(sent.per_turn) < WORKERS - 3
            await asyncio.gather(*calls, return_exceptions=True)
            assert engine.requests_in_flight == 0
            sent.stop()
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_the_successor_of_a_worker_knows_what_was_cut():
    """Otherwise it would sample these rows to their ends, and the caller would wait for them."""

    async def run() -> list[list[str]]:
        supply = ForgetfulSupply()
        pool = WorkerPool(experiment(1), supply)
        await pool.start()
        engine = WorkerEngine(pool)
        try:
            sent = Submissions(pool)
            calls = [asyncio.create_task(engine.generate(request(group))) for group in range(3)]
            await sent.first.wait()
            await asyncio.sleep(0)
            engine.cut(["r1"])
            calls[2].cancel()
            await supply.again.wait()
        finally:
            sent.stop()
            await engine.close()
            await pool.close()
            await asyncio.gather(*calls, return_exceptions=True)
        return supply.cut

    assert asyncio.run(asyncio.wait_for(run(), 30)) == [[], ["r1", "r2"]]
