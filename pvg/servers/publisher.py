"""`Publisher`: sends a trainer's weights to every engine as one numbered version."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from pvg.errors import ConfigurationError, StateError
from pvg.servers.update import LowRankAdapter, SyncTiming, WeightUpdate
from pvg.telemetry.events import Events, SilentEvents

if TYPE_CHECKING:
    from torch import Tensor


class WeightReceiver(Protocol):
    """What the publisher needs of an engine (pvg.rollout.engine.Engine)."""

    @property
    def version(self) -> int: ...

    @property
    def requests_in_flight(self) -> int: ...

    async def load_weights(self, update: WeightUpdate) -> SyncTiming: ...


class Publisher:
    """Sends weights to `engines`. Versions only go up, starting from the newest version of any engine.

    `events` receives the client's `[weights]` lines of every update. The engines log theirs with the same trace id.
    """

    def __init__(self, engines: Sequence[WeightReceiver], *, events: Events | None = None) -> None:
        if not engines:
            raise ConfigurationError("There is no engine to publish weights to.")
        self._engines = tuple(engines)
        self._events = events or SilentEvents()
        self._version = max(engine.version for engine in engines)

    @property
    def version(self) -> int:
        """The newest version that was sent. It may have failed to arrive."""
        return self._version

    async def publish(
        self, tensors: Mapping[str, Tensor], version: int, adapter: LowRankAdapter | None = None
    ) -> list[SyncTiming]:
        """Send `tensors` (by parameter name) to all engines concurrently. Returns one timing per engine, in order.
        `adapter`, for engines that accept adapters, turns the base model into `tensors`.

        The tensors must not change until this returns. Raises StateError for a version that is not above the last one.
        If an engine fails, this awaits the others and raises its error. The version counts as used, because some
        engines may have it; publish again under a higher one.
        """
        if version <= self._version:
            raise StateError(
                f"Version {version} of the weights cannot be published: version {self._version} already was.",
                "Versions only go up.",
            )
        self._version = version
        update = WeightUpdate(version, tensors, trace_id=uuid.uuid4().hex[:16], adapter=adapter)
        place = {"trace": update.trace_id, "version": version, "engines": len(self._engines)}
        load = sum(engine.requests_in_flight for engine in self._engines)
        self._events.event("weights", event="client.send", **place, inflight=load)
        sent = time.perf_counter()
        outcomes = await asyncio.gather(
            *(engine.load_weights(update) for engine in self._engines), return_exceptions=True
        )
        all_ms = (time.perf_counter() - sent) * 1e3
        timings = [outcome for outcome in outcomes if isinstance(outcome, SyncTiming)]
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        self._events.event("weights", event="client.done", **place, failed=len(failures), **_told(timings, all_ms))
        if failures:
            raise failures[0]
        return timings


def _told(timings: Sequence[SyncTiming], all_ms: float) -> dict[str, float]:
    """The slowest engine's times. `all_ms` also contains what is outside its wall time: writing files, the canary."""
    if not timings:
        return {"wall_ms": all_ms, "rpc_ms": 0.0, "queue_ms": all_ms, "all_ms": all_ms}
    slowest = max(timings, key=lambda timing: timing.wall_ms)
    told = {"wall_ms": slowest.wall_ms, "rpc_ms": slowest.rpc_ms, "queue_ms": slowest.queue_ms, "all_ms": all_ms}
    gaps = [timing.canary_gap for timing in timings if timing.canary_gap is not None]
    return told | dict(slowest.parts) | ({"canary_gap": max(gaps)} if gaps else {})
