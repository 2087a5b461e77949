"""The publisher: one numbered update to every engine, one line in the log."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from pvg.errors import StateError
from pvg.servers.publishing import Publisher, SyncTiming, WeightUpdate

WEIGHTS = {"w": torch.ones(2)}


class Kept:
    def __init__(self) -> None:
        self.kept: list[tuple[str, dict[str, Any]]] = []

    def event(self, tag: str, **fields: Any) -> None:
        self.kept.append((tag, fields))


class RecordingEngine:
    max_in_flight = 1
    requests_in_flight = 3

    def __init__(self, version: int = 0, rpc_ms: float = 2.0, error: Exception | None = None) -> None:
        self.version = version
        self.updates: list[WeightUpdate] = []
        self._rpc_ms = rpc_ms
        self._error = error

    async def generate(self, request: object) -> None:
        raise NotImplementedError

    async def load_weights(self, update: WeightUpdate) -> SyncTiming:
        await asyncio.sleep(0.002 if self._error is None else 0)
        if self._error is not None:
            raise self._error
        self.updates.append(update)
        self.version = update.version
        return SyncTiming(update.version, wall_ms=self._rpc_ms + 1, rpc_ms=self._rpc_ms)

    async def close(self) -> None: ...


def test_versions_only_go_up_from_the_engines() -> None:
    engine = RecordingEngine(version=5)
    publisher = Publisher(engine)
    for version in (0, 4, 5):
        with pytest.raises(StateError):
            asyncio.run(publisher.publish(WEIGHTS, version))
    asyncio.run(publisher.publish(WEIGHTS, 9))
    with pytest.raises(StateError):
        asyncio.run(publisher.publish(WEIGHTS, 8))
    assert [update.version for update in engine.updates] == [9]


def test_one_line_per_update_closes_its_own_sum_and_carries_the_trace_id() -> None:
    events, engine = Kept(), RecordingEngine(rpc_ms=0.75)
    publisher = Publisher(engine, events=events)
    asyncio.run(publisher.publish(WEIGHTS, 1))
    asyncio.run(publisher.publish(WEIGHTS, 2))
    for (_, sent), (_, done), update in zip(events.kept[::2], events.kept[1::2], engine.updates, strict=True):
        assert (sent["event"], done["event"]) == ("client.send", "client.done")
        assert sent["trace"] == done["trace"] == update.trace_id
        assert sent["inflight"] == 3
        assert (done["version"], done["failed"], done["rpc_ms"]) == (update.version, 0, 0.75)
        assert done["wall_ms"] == pytest.approx(done["rpc_ms"] + done["queue_ms"])
        assert done["all_ms"] >= 2.0  # what the engine took, whatever it tells
    assert engine.updates[0].trace_id != engine.updates[1].trace_id


def test_a_version_that_failed_is_used_up() -> None:
    events = Kept()
    publisher = Publisher(RecordingEngine(error=OSError("connection lost")), events=events)
    with pytest.raises(OSError, match="connection lost"):
        asyncio.run(publisher.publish(WEIGHTS, 1))
    assert events.kept[-1][1]["failed"] == 1
    with pytest.raises(StateError):
        asyncio.run(publisher.publish(WEIGHTS, 1))
