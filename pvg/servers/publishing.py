"""Versions of weights: how they are named, what an update contains, and `Publisher`, which sends one to every engine.

A label names the weights of a server as a string, which vLLM reports with the tokens sampled from them. It is
`SESSION/VERSION`. A session is one publishing process; its versions only go up. Of two sessions the one that started
later wins, so a trainer that was presumed dead cannot overwrite the weights of its replacement.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pvg.errors import StateError
from pvg.telemetry.events import Events, SilentEvents

if TYPE_CHECKING:
    from torch import Tensor

    from pvg.models.language_model import LowRankAdapter

SEPARATOR = "/"
BROKEN = "broken:"  # prefix for the label of weights that arrived only in part


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
    """Sends weights to `engine`. Versions only go up, starting from the engine's.

    `events` receives the client's `[weights]` lines of every update. The engine logs its own with the same trace id.
    `of`: the model in these lines, if it is not the prover. Then they do not give the load of generation.
    """

    def __init__(self, engine: WeightReceiver, *, events: Events | None = None, of: str = "") -> None:
        self._engine = engine
        self._events = events or SilentEvents()
        self._of = of
        self._version = engine.version

    @property
    def version(self) -> int:
        """The newest version that was sent. It may have failed to arrive."""
        return self._version

    async def publish(
        self, tensors: Mapping[str, Tensor], version: int, adapter: LowRankAdapter | None = None
    ) -> SyncTiming:
        """Send `tensors` (by parameter name). `adapter`, for engines that accept adapters, turns the base model into
        `tensors`.

        The tensors must not change until this returns. Raises StateError for a version that is not above the last one,
        and the engine's error. The version then counts as used, because a server may have it.
        """
        if version <= self._version:
            raise StateError(
                f"Version {version} of the weights cannot be published: version {self._version} already was.",
                "Versions only go up.",
            )
        self._version = version
        update = WeightUpdate(version, tensors, trace_id=uuid.uuid4().hex[:16], adapter=adapter)
        place: dict[str, Any] = {"trace": update.trace_id, "version": version}
        load = {} if self._of else {"inflight": self._engine.requests_in_flight}
        place |= {"of": self._of} if self._of else {}
        self._events.event("weights", event="client.send", **place, **load)
        sent, timing = time.perf_counter(), None
        try:
            timing = await self._engine.load_weights(update)
        finally:
            times = _timing_fields(timing, (time.perf_counter() - sent) * 1e3)
            self._events.event("weights", event="client.done", **place, failed=int(timing is None), **times)
        return timing


def _timing_fields(timing: SyncTiming | None, all_ms: float) -> dict[str, float]:
    """`all_ms` also contains what is outside the wall time of an update: writing files, the canary."""
    if timing is None:
        return {"wall_ms": all_ms, "rpc_ms": 0.0, "queue_ms": all_ms, "all_ms": all_ms}
    fields = {"wall_ms": timing.wall_ms, "rpc_ms": timing.rpc_ms, "queue_ms": timing.queue_ms, "all_ms": all_ms}
    gap = {} if timing.canary_gap is None else {"canary_gap": timing.canary_gap}
    return fields | dict(timing.parts) | gap
