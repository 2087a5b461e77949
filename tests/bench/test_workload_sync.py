"""The sync workload: requests are in flight at each update under load, and what updates cost is counted right."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from bench_runs import load_profile

from pvg.bench.workloads import sync
from pvg.bench.workloads.sync import SyncWorkload, TimedUpdate
from pvg.errors import ConfigurationError
from pvg.rollout.engine import Completion, Engine, EngineStats, GenerationRequest
from pvg.servers.publishing import Publisher, SyncTiming, WeightUpdate

PROFILE = "profiles/sync.toml"
TINY = (
    "workload.streams=6",
    "workload.updates=3",
    "workload.waves=1",
    "training.groups=1",
    "rollout.max_tokens=8",
    "task.problems=64",
    "task.test_problems=8",
    "models.threads=1",
)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make(*overrides: str) -> SyncWorkload:
    workload = sync.make(load_profile(PROFILE, [*TINY, "warmup=0", *overrides]))
    assert isinstance(workload, SyncWorkload)
    return workload


class CountingEngine:
    """An engine that notes how many requests it has been given and not answered when new weights come."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.unanswered = 0
        self.at_updates: list[int] = []
        self.lengths: set[int] = set()
        self.seeds: list[int] = []

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def requests_in_flight(self) -> int:
        return self._engine.requests_in_flight

    @property
    def max_in_flight(self) -> int:
        return self._engine.max_in_flight

    async def generate(self, request: GenerationRequest) -> Completion:
        self.unanswered += 1
        self.seeds.append(request.seed)
        completion = await self._engine.generate(request)
        self.unanswered -= 1
        self.lengths.add(len(completion.token_ids))
        return completion

    async def load_weights(self, update: WeightUpdate) -> SyncTiming:
        self.at_updates.append(self.unanswered)
        return await self._engine.load_weights(update)

    async def close(self) -> None:
        await self._engine.close()


def test_every_loaded_update_meets_all_streams_in_flight_and_the_idle_ones_none() -> None:
    async def play() -> tuple[CountingEngine, SyncWorkload, dict[str, float]]:
        workload = make()
        await workload.open()
        try:
            players = workload._players
            engine = players.engine = CountingEngine(players.engine)
            players.publisher = Publisher(engine)
            measured = await workload.sample(0)
        finally:
            await workload.close()
        return engine, workload, measured

    engine, workload, measured = asyncio.run(play())
    assert engine.at_updates == [0, 0, 0, 6, 6, 6]  # idle, back to back
    assert engine.version == 6
    derived, work = workload.derived(), workload.work()
    assert (derived["in_flight_min"], derived["updates"]) == (6, 3)
    assert work["updates"] == {"idle": 3, "loaded": 3}
    assert "max_rows" not in work  # how it is done is no part of what is done
    (streams,) = workload.loaded
    updates = streams.updates
    assert [update.in_flight for update in updates] == [6, 6, 6]
    assert [update.timing.version for update in updates] == [4, 5, 6]
    assert streams.in_flight == engine.unanswered == 0  # nothing is left behind
    assert 6 in streams.versions  # the last update served tokens
    assert engine.lengths == {8}  # nothing stopped early
    assert engine.seeds[:6] == engine.seeds[-6:]  # before and after, the streams ask for the same
    assert len(set(engine.seeds[:6])) == 6
    for load in ("idle", "loaded"):
        for name in ("wall", "rpc", "queue"):
            p50, p95, p99 = (measured[f"{load}_{name}_p{percentile}_ms"] for percentile in (50, 95, 99))
            assert 0 <= p50 <= p95 <= p99


def test_percentiles_of_hand_made_updates() -> None:
    updates = [TimedUpdate(0.0, 0, SyncTiming(i, wall_ms=float(i), rpc_ms=float(i) / 2)) for i in range(1, 102)]
    found = sync.times("idle_", updates)
    assert [found[f"idle_wall_p{p}_ms"] for p in (50, 95, 99)] == [51.0, 96.0, 100.0]
    assert [found[f"idle_queue_p{p}_ms"] for p in (50, 95, 99)] == [25.5, 48.0, 50.0]


def test_what_updates_cost_is_set_against_before_and_after() -> None:
    """Of each sample by itself, then the median: a machine that slows down costs nothing here."""

    rates = ((100.0, 75.0, 100.0), (80.0, 50.0, 40.0), (10.0, 5.0, 10.0))
    found = sync.lost_share([dict(zip(sync.RATES, each, strict=True)) for each in rates])
    assert found == pytest.approx(0.25)


def test_an_engine_that_cannot_take_it_says_so() -> None:
    with pytest.raises(ConfigurationError, match=r"rollout\.concurrency is 4"):
        make("rollout.concurrency=4", "rollout.engine.max_rows=4")
