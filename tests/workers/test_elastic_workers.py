"""The number of worker processes changes while they work, and no bit does. The processes are real."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest
from test_worker_processes import experiment, sampled
from worker_stand_ins import DyingSupply, RecordedEvents, kept_supply

from pvg.config.load import build_experiment
from pvg.config.operation import LocalCluster, processes_of
from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.workers import pool as pool_module
from pvg.workers import scaling
from pvg.workers.frames import Frame
from pvg.workers.local import LocalMember
from pvg.workers.pool import WorkerPool

pytestmark = pytest.mark.slow

SHARDS = 4


def used(pool: WorkerPool) -> list[int]:
    return [worker.number for worker in pool._workers if worker.used]


def pid_of(pool: WorkerPool, number: int) -> int:
    member = pool._workers[number].member
    assert member is not None
    return member.pid


def shared_out(pool: WorkerPool) -> list[int]:
    """How many shards each process serves."""
    workers = [shard.worker.number for shard in pool._shards]
    return sorted(workers.count(number) for number in set(workers))


async def within(pool_of: tuple[int, int], work: Callable[[WorkerPool, RecordedEvents], Awaitable[None]]) -> None:
    (lowest, highest), events = pool_of, RecordedEvents()
    pool = WorkerPool(experiment(SHARDS, min_workers=lowest, max_workers=highest), kept_supply(), events)
    await pool.start()
    try:
        await asyncio.wait_for(work(pool, events), 120)
    finally:
        await pool.close()


def test_shards_move_between_processes_while_they_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "LOOK_S", 1000.0)  # this test alone decides

    async def changing(pool: WorkerPool, events: RecordedEvents) -> None:
        expected = await sampled(pool, 0)  # one process computes all shards
        asked = asyncio.create_task(sampled(pool, 1))
        await asyncio.sleep(0.02)
        await pool.add("chance", {})
        assert (used(pool), shared_out(pool)) == ([0, 1], [2, 2])
        assert await asked == expected
        await pool.add("chance", {})
        await pool.add("chance", {})
        assert (used(pool), shared_out(pool)) == ([0, 1, 2, 3], [1, 1, 1, 1])
        assert await sampled(pool, 3) == expected
        # A worker leaves while it works, and its number is free for the next one.
        asked = asyncio.create_task(sampled(pool, 4))
        await asyncio.sleep(0.02)
        await pool.remove(1, "chance")
        assert (used(pool), shared_out(pool)) == ([0, 2, 3], [1, 1, 2])
        assert await asked == expected
        await pool.add("chance", {})
        assert used(pool) == [0, 1, 2, 3]
        assert await sampled(pool, 5) == expected
        assert pool.measured()["restarts"] == 0
        counts = [event["workers"] for event in events.seen if event.get("event") in ("added", "removed")]
        assert counts == [2, 3, 4, 3, 4]

    asyncio.run(within((1, SHARDS), changing))


@pytest.mark.drill
def test_processes_that_die_while_places_move_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "LOOK_S", 1000.0)
    asyncio.run(within((SHARDS, SHARDS), killed_while_they_move))


async def killed_while_they_move(pool: WorkerPool, _: RecordedEvents) -> None:
    """The process that is left dies, then the one that gets the shards, then both."""
    expected = await sampled(pool, 0)
    for number, victims in enumerate([(3,), (0, 1, 2), (0, 1, 2, 3)]):
        asked = asyncio.create_task(sampled(pool, 10 + number))
        await asyncio.sleep(0.02)
        pids = [pid_of(pool, victim) for victim in victims]
        leaving = asyncio.create_task(pool.remove(3, "chance"))
        await asyncio.sleep(0)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await leaving
        assert used(pool) == [0, 1, 2]
        assert await asked == expected
        asked = asyncio.create_task(sampled(pool, 20 + number))
        await asyncio.sleep(0.02)
        coming = asyncio.create_task(pool.add("chance", {}))
        while pool._workers[3].member is None:  # noqa: ASYNC110 - nothing tells when the process starts
            await asyncio.sleep(0)
        for victim in victims:
            os.kill(pid_of(pool, victim), signal.SIGKILL)
        await coming
        assert await asked == expected
        assert await sampled(pool, 30 + number) == expected
        assert used(pool) == [0, 1, 2, 3]


def test_workers_come_when_groups_wait_and_go_when_they_have_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "LOOK_S", 0.02)
    monkeypatch.setattr(scaling, "WINDOW_S", 0.3)
    monkeypatch.setattr(scaling, "IDLE_S", 0.6)
    changes: list[tuple[int, str]] = []

    async def busy_then_idle(pool: WorkerPool, events: RecordedEvents) -> None:
        pool.changed = lambda workers, why: changes.append((workers, why))
        number = 0
        while not events.of("added"):
            await sampled(pool, number := number + 1)
        while not events.of("removed"):  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.05)
        assert len(used(pool)) == 1, "the one that had less to do has gone"

    asyncio.run(within((1, 2), busy_then_idle))
    assert [workers for workers, _ in changes] == [2, 1]
    assert "added worker 1: " in changes[0][1]
    assert " waited for " in changes[0][1]
    assert changes[1][1].startswith("removed worker ")


class FullMachine(DyingSupply):
    """Starts one process only."""

    async def start(self, successor: bool = False) -> LocalMember:
        if self.started:
            raise MissingRequirementError("No worker process could be started: no memory.", "Wait.")
        return await super().start()


def test_a_run_goes_on_with_fewer_workers_if_none_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "LOOK_S", 1000.0)
    monkeypatch.setattr(pool_module, "REFUSED_S", 0.0)

    async def run() -> None:
        events = RecordedEvents()
        pool = WorkerPool(experiment(2, min_workers=1), FullMachine(), events)
        await pool.start()
        try:
            await pool.add("chance", {})
            (refused,) = events.of("not added")
            assert "no memory" in refused["why"]
            assert used(pool) == [0]
            await pool.ask(range(2), Frame("score"))
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(
    ("cluster", "complaint"),
    [
        ({"min_workers": 4, "max_workers": 2}, r"min_workers = 4 is more than cluster\.max_workers = 2"),
        ({"workers": 2, "max_workers": 4}, r"max_workers = 4 is more than cluster\.workers = 2"),
        ({"workers": 2, "min_workers": 3}, r"set cluster\.min_workers to 2 or less, or cluster\.workers to 3"),
        ({"max_workers": 2, "trainers": 2}, r"set cluster\.workers to 3 or more"),
    ],
)
def test_limits_that_make_no_sense_are_refused(cluster: dict, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        build_experiment({"cluster": {"kind": "local", **cluster}, "rollout": {"prefetch": "fresh"}})


@pytest.mark.parametrize(
    ("cluster", "shards", "processes"),
    [
        (LocalCluster(), 8, (8, 8)),
        (LocalCluster(max_workers=4), 4, (4, 4)),
        (LocalCluster(min_workers=1, max_workers=4), 4, (1, 4)),
        (LocalCluster(workers=8, min_workers=2), 8, (2, 8)),
        (LocalCluster(workers=8, max_workers=2), 8, (2, 2)),
        (LocalCluster(min_workers=3, max_workers=4), 2, (2, 2)),  # resumed: the run has two shards
    ],
)
def test_how_many_processes_by_hand(cluster: LocalCluster, shards: int, processes: tuple[int, int]) -> None:
    assert processes_of(cluster, shards) == processes
