"""Versions of weights: how they are named, what an update contains, and `Publisher`, which sends one to every engine.

A label names the weights of a server as a string, which vLLM reports with the tokens sampled from them. It is
`SESSION/VERSION`. A session is one publishing process; its versions only go up. Of two sessions the one that started
later wins, so a trainer that was presumed dead cannot overwrite the weights of its replacement.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pvg.errors import ConfigurationError, StateError
from pvg.telemetry.events import Events, SilentEvents

if TYPE_CHECKING:
    from torch import Tensor

    from pvg.models.language_model import LowRankAdapter

SEPARATOR = "/"
BROKEN = "broken:"  # prefix for the label of weights that arrived only in part (protocol 1)


@dataclass(frozen=True, slots=True)
class PublishingSession:
    """A process that publishes weights: its start in nanoseconds since 1970, and a random tail."""

    began_ns: int
    tail: str

    @classmethod
    def begin(cls) -> PublishingSession:
        return cls(time.time_ns(), secrets.token_hex(4))

    def __str__(self) -> str:
        return f"{self.began_ns:x}-{self.tail}"


@dataclass(frozen=True, slots=True)
class WeightLabel:
    """Version `version`, from 0, of the weights that `session` published."""

    session: PublishingSession
    version: int

    def __str__(self) -> str:
        return f"{self.session}{SEPARATOR}{self.version}"

    @classmethod
    def parse(cls, text: str) -> WeightLabel | None:
        """The label in `text`; None for any text that is not pvg's, such as vLLM's "default"."""
        name, separator, version = text.partition(SEPARATOR)
        began, dash, tail = name.partition("-")
        try:
            found = cls(PublishingSession(int(began, 16), tail), int(version))
        except ValueError:
            return None
        return found if separator and dash and found.version >= 0 and str(found) == text else None


def salt(label: str) -> str:
    """The salt of the label for prefix caches. vLLM accepts no slash in a salt."""
    return label.replace(SEPARATOR, ".")


# --- updates ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A new version of the policy's weights by parameter name. `version` is above the engine's current one.

    `tensors` always holds the whole model with adapters merged in. `adapter`: what turns the base model into it, if
    any.
    """

    version: int
    tensors: Mapping[str, Tensor]
    trace_id: str = ""
    adapter: LowRankAdapter | None = None


@dataclass(frozen=True, slots=True)
class SyncTiming:
    """Milliseconds of one update: `wall_ms` in total, `rpc_ms` of work. The rest is waiting (`queue_ms`).

    `parts` divides the work, if the engine reports it. `canary_gap`: the largest difference in nats between the
    trainer's and a server's log-probs under the new weights; None without a canary.
    """

    version: int
    wall_ms: float
    rpc_ms: float
    parts: Mapping[str, float] = field(default_factory=dict)
    canary_gap: float | None = None

    @property
    def queue_ms(self) -> float:
        return self.wall_ms - self.rpc_ms


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
    `of`: the model in these lines, if it is not the prover. Then they do not give the load of generation.
    """

    def __init__(self, engines: Sequence[WeightReceiver], *, events: Events | None = None, of: str = "") -> None:
        if not engines:
            raise ConfigurationError("There is no engine to publish weights to.")
        self._engines = tuple(engines)
        self._events = events or SilentEvents()
        self._of = of
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
        of = {"of": self._of} if self._of else {}
        place = {"trace": update.trace_id, "version": version, "engines": len(self._engines), **of}
        load = {} if of else {"inflight": sum(engine.requests_in_flight for engine in self._engines)}
        self._events.event("weights", event="client.send", **place, **load)
        sent = time.perf_counter()
        outcomes = await asyncio.gather(
            *(engine.load_weights(update) for engine in self._engines), return_exceptions=True
        )
        all_ms = (time.perf_counter() - sent) * 1e3
        timings = [outcome for outcome in outcomes if isinstance(outcome, SyncTiming)]
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        self._events.event(
            "weights", event="client.done", **place, failed=len(failures), **_timing_fields(timings, all_ms)
        )
        if failures:
            raise failures[0]
        return timings


def _timing_fields(timings: Sequence[SyncTiming], all_ms: float) -> dict[str, float]:
    """The slowest engine's times. `all_ms` also contains what is outside its wall time: writing files, the canary."""
    if not timings:
        return {"wall_ms": all_ms, "rpc_ms": 0.0, "queue_ms": all_ms, "all_ms": all_ms}
    slowest = max(timings, key=lambda timing: timing.wall_ms)
    fields = {"wall_ms": slowest.wall_ms, "rpc_ms": slowest.rpc_ms, "queue_ms": slowest.queue_ms, "all_ms": all_ms}
    gaps = [timing.canary_gap for timing in timings if timing.canary_gap is not None]
    return fields | dict(slowest.parts) | ({"canary_gap": max(gaps)} if gaps else {})
