"""`ServedModel`: one model on several vLLM servers, whose weights a trainer publishes.

    served = ServedModel(needs, urls, connections, events, session=session, transport=transport)
    await served.fleet.open()                       # probe the servers, and watch them from now on
    await served.publish(update, expect)            # to all servers that answer, with a proof of arrival
    reply = await served.request(send, ...)         # on one server; after a fault on another one

Invariants:
- A request is sent only to a server that has proven the newest weights.
- A server that missed an update, was restarted or was added gets the newest weights and proves them before its first
  request.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pvg.errors import ConfigurationError, MissingRequirementError, StateError, WeightsNotArrivedError
from pvg.servers.control import Connections, DeliveryTiming, ServerInfo
from pvg.servers.fleet import Fleet, Server
from pvg.servers.pool import RefusedRequest, ServerFault, asked_again, pause_before_retry
from pvg.servers.publishing import BROKEN, PublishingSession, SyncTiming, WeightLabel, WeightUpdate
from pvg.servers.transports import Transport
from pvg.telemetry.events import Events

if TYPE_CHECKING:
    from pvg.servers.command import Purpose

T = TypeVar("T")

UNPUBLISHED = -1  # version before the first publication: the servers' weights are unknown

# Asks a server for values that depend on its weights. Returns figures for the log; `gap` is the largest difference from
# the trainer's values. Raises a ServerFault without an answer, WeightsNotArrivedError for values of other weights.
Prove = Callable[[Server], Awaitable[Mapping[str, float]]]
# Computes the values that servers must have under an update with this label, and returns the function that asks them.
# Raises TrainingDivergedError for values that are not finite.
Expect = Callable[[WeightUpdate, WeightLabel], Awaitable[Prove]]


@dataclass(frozen=True, slots=True)
class ServerRequirements:
    """What servers must offer: their purpose and runner, the model's shape (empty: any), the length of prompt plus
    completion in tokens, log-probs of the distribution after temperature and cuts, the rank of adapters (0: none)."""

    purpose: Purpose
    runner: Literal["generate", "pooling"]
    shape: str = ""
    max_length: int = 0
    processed_logprobs: bool = False
    lora_rank: int = 0
    on_cluster: bool = False  # pvg starts them on a Ray cluster

    @property
    def setting(self) -> str:
        return "serving.servers" if self.purpose == "prover" else f"serving.{self.purpose}_servers"

    @property
    def model(self) -> str:
        return "models.prover" if self.purpose == "prover" else "models.verifier"

    @property
    def remedy(self) -> str:
        """How to start such a server."""
        if self.on_cluster:
            return "events.log says why they ended ([workers]); then continue with --resume."
        return f"Start one with `pvg serve EXPERIMENT --for {self.purpose}`, and add its URL to {self.setting}."

    def check(self, info: ServerInfo) -> None:
        """Raises ConfigurationError or MissingRequirementError for a server that does not offer this. A model of
        another shape is refused, because weights that do not fit leave the engine with half of them loaded."""
        if info.runner != self.runner:
            raise ConfigurationError(
                f"{info.url} is a server of the kind {info.runner!r}, but {self.setting} needs {self.runner!r}.",
                self.remedy,
            )
        if self.shape and info.shape and info.shape != self.shape:
            raise ConfigurationError(
                f"{info.url} serves {info.model!r} ({info.shape}), but {self.model} has {self.shape}.",
                "Start it with `pvg serve` and this experiment's settings, or name another server.",
            )
        if info.max_model_len < self.max_length:
            raise ConfigurationError(
                f"{info.url} accepts {info.max_model_len} tokens, but a prompt and its completion may take "
                f"{self.max_length}.",
                "Start it with a larger --max-model-len (serving.extra_args), or lower rollout.max_tokens.",
            )
        if self.processed_logprobs and info.logprobs_mode != "processed_logprobs":
            raise MissingRequirementError(
                f"{info.url} reports log-probs of a different distribution than it samples from "
                f"(logprobs mode {info.logprobs_mode!r}).",
                "Start it with `pvg serve`, or with --logprobs-mode processed_logprobs.",
            )
        if self.lora_rank and was_sent(info.label):
            raise ConfigurationError(
                f"{info.url} has weights that a trainer sent it ({info.label}), but adapters need the weights it was "
                "started with.",
                "Restart it. Two runs need separate servers.",
            )
        if self.lora_rank > info.max_lora_rank:
            raise ConfigurationError(
                f"{info.url} accepts adapters up to rank {info.max_lora_rank}, but training.adapters.rank is "
                f"{self.lora_rank}.",
                "Start it with `pvg serve` and this experiment's settings.",
            )


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """The newest weights, to which servers are brought. Without a `label`: the weights with which servers are started.
    `prove`: None without a canary."""

    label: WeightLabel | None
    trace: str
    prove: Prove | None


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a server with the newest weights."""

    delivery: DeliveryTiming
    gap: float | None  # None: no proof was asked for


class RequestFailed(Exception):
    """A request failed `attempts` times, the last time with `fault`."""

    def __init__(self, attempts: int, fault: ServerFault) -> None:
        super().__init__(f"{attempts} attempts failed. The last error: {fault}")
        self.attempts = attempts
        self.fault = fault


class ServedModel:
    """Owns `transport`, which may be set later, but before the first publication. Does not own `connections`. All
    methods belong to one event loop."""

    def __init__(
        self,
        needs: ServerRequirements,
        urls: Sequence[str],
        connections: Connections,
        events: Events,
        *,
        session: PublishingSession,
        transport: Transport | None = None,
    ) -> None:
        self.needs = needs
        self.connections = connections
        self.transport = transport
        self.session = session
        self.version = UNPUBLISHED
        self.fleet = Fleet(
            [connections.client(url) for url in urls],
            connections.serving,
            events,
            check=self._check,
            catch_up=self._catch_up,
            remedy=needs.remedy,
        )
        self._events = events
        self._of = {} if needs.purpose == "prover" else {"of": needs.purpose}  # in log lines
        self._retries = connections.serving.retries
        self._newest: PublishedWeights | None = None
        self._caught_up: dict[Server, Arrival] = {}  # how each server last caught up
        self._labels_in_use: Counter[str] = Counter()

    @property
    def adapters(self) -> bool:
        """Whether versions are adapters upon the weights with which servers are started."""
        return self.transport is not None and self.transport.adapters

    # --- membership --------------------------------------------------------------------------------------------------

    def add(self, url: str) -> Server:
        """Use another server from now on. It gets the newest weights and proves them before its first request. The
        limits of the connections do not grow. Raises StateError for a server that is in use."""
        return self.fleet.add(self.connections.client(url))

    async def remove(self, url: str, *, drain_s: float | None = None) -> None:
        """Stop using a server: see Fleet.remove."""
        await self.fleet.remove(url, drain_s=drain_s)
        self._caught_up = {server: arrival for server, arrival in self._caught_up.items() if server.url != url}

    async def close(self) -> None:
        """Stop watching the servers, end requests in flight, and close the transport."""
        async with AsyncExitStack() as rest:  # closes the transport even if the fleet fails
            if self.transport is not None:
                rest.push_async_callback(self.transport.close)
            await self.fleet.close()

    # --- requests ----------------------------------------------------------------------------------------------------

    async def request(
        self,
        send: Callable[[Server, str], Coroutine[Any, Any, T]],
        *,
        what: str,
        jitter: float,
        tag: str,
        **place: object,
    ) -> T:
        """The result of `send(server, label)`, one request to a server whose weights have that label. After a
        ServerFault it is repeated on another server, if there is one. `what` names the request in messages, `tag` and
        `place` in log lines; `jitter` in [0, 1) spreads the repetitions.

        Raises ConfigurationError if a server refuses the request, RequestFailed after the last repetition,
        ServerUnavailableError if no server is up for `serving.unavailable_s`.
        """
        last: Server | None = None
        attempts = self._retries + 1
        for attempt in range(1, attempts + 1):
            server = await self.fleet.acquire(avoid=last)
            label = server.label
            self._labels_in_use[label] += 1
            try:
                return await server.attempt(send(server, label))
            except ServerFault as fault:
                lacks_adapter = self.adapters and isinstance(fault, RefusedRequest) and fault.status == 404
                if isinstance(fault, RefusedRequest) and fault.final and not lacks_adapter:
                    raise ConfigurationError(
                        f"{server.url} refuses {what}: {fault.message}.",
                        "Check that it serves the experiment's model, with a context that is long enough.",
                    ) from None
                failed, last = fault, server
            finally:
                self._labels_in_use[label] -= 1
            self.fleet.report(server, failed)
            self._events.event(tag, event="retry", **place, server=server.url, attempt=attempt, why=str(failed))
            if attempt < attempts:
                await pause_before_retry(attempt, jitter)
        raise RequestFailed(attempts, failed)

    def model_name(self, label: str) -> str | None:
        """The model name in requests for the weights of `label`; None for the server's only model."""
        parsed = WeightLabel.parse(label)
        return self.transport.model_of(parsed) if parsed is not None and self.transport is not None else None

    # --- weights -----------------------------------------------------------------------------------------------------

    async def publish(self, update: WeightUpdate, expect: Expect | None) -> SyncTiming:
        """Send new weights to all servers that answer, and let each prove their arrival (`expect` None: no proof). The
        others get them when they return. If no server has them at the end, waits for the first that returns.

        Raises StateError for a version that is not above the current one, WeightsNotArrivedError if a server has other
        weights than it was sent or all refuse them, ServerUnavailableError if no server is up for
        `serving.unavailable_s`, and what the transport raises.
        """
        if update.version <= self.version:
            raise StateError(
                f"Version {update.version} of the weights cannot follow version {self.version}.", "Versions only go up."
            )
        transport, label = self._transport(), WeightLabel(self.session, update.version)
        self.fleet.interrupt_catching_up()
        async with self.fleet.updating:
            started = time.perf_counter()
            await transport.stage(update, label)
            stage_ms = (time.perf_counter() - started) * 1e3
            prove = None if expect is None else await expect(update, label)
            newest = self._newest = PublishedWeights(label, update.trace_id, prove)
            self.version = update.version
            delivered = await self._deliver(self.fleet.alive, newest)
            gaps = await self._proven(list(delivered), newest)
            arrivals = {s: Arrival(delivered[s], gap) for s, gap in gaps.items() if s.state != "away"}
            for server in arrivals:
                self.fleet.arrived(server, str(label))
            await self._retire(transport)
        if not arrivals:  # all are away: the first that returns catches up before it counts as up
            back = await self.fleet.acquire()
            arrivals[back] = self._caught_up[back]
        slowest = max((arrival.delivery for arrival in arrivals.values()), key=lambda delivery: delivery.wall_ms)
        return SyncTiming(
            version=update.version,
            wall_ms=slowest.wall_ms,
            rpc_ms=slowest.rpc_ms,
            parts={"stage_ms": stage_ms, "arrival_ms": slowest.arrival_ms, **slowest.parts},
            canary_gap=max((a.gap for a in arrivals.values() if a.gap is not None), default=None),
        )

    async def keep_start(self, prove: Prove | None) -> None:
        """Instead of publishing: use the weights with which servers are started, once a server has proven them. Raises
        WeightsNotArrivedError for a server with other weights, ServerUnavailableError if no server is up for
        `serving.unavailable_s`."""
        newest = self._newest = PublishedWeights(None, "", prove)
        async with self.fleet.updating:
            for server in await self._proven(self.fleet.alive, newest):
                self.fleet.arrived(server, _label_of(server, newest))
        await self.fleet.acquire()

    def _check(self, info: ServerInfo) -> None:
        self.needs.check(info)  # `needs` may have changed since the fleet was made

    async def _catch_up(self, server: Server) -> None:
        """Bring one server to the newest weights. Called by the fleet, which holds `updating`."""
        newest = self._newest
        if newest is None:
            if server.state == "away":
                server.state = "stale"  # it answers, and gets its weights with the next publication
            return
        delivery = None
        if newest.label is not None:
            (outcome,) = await self.fleet.deliver([server], self._transport(), newest.label, newest.trace)
            if not isinstance(outcome, DeliveryTiming):
                raise outcome
            delivery = outcome
            self._tell(delivery, newest)
        gaps = await self._proven([server], newest)
        if server not in gaps:
            return
        if delivery is not None:
            self._caught_up[server] = Arrival(delivery, gaps[server])
        self.fleet.arrived(server, _label_of(server, newest))

    async def _deliver(self, servers: Sequence[Server], newest: PublishedWeights) -> dict[Server, DeliveryTiming]:
        """Deliver to all `servers`, and mark failing ones as lost. Raises WeightsNotArrivedError if some refuse and
        none accepts."""
        assert newest.label is not None
        outcomes = await self.fleet.deliver(servers, self._transport(), newest.label, newest.trace)
        delivered = {}
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, DeliveryTiming):
                delivered[server] = outcome
                self._tell(outcome, newest)
            else:
                self._log("server.failed", newest, server=server.url, why=str(outcome))
                self.fleet.lose(server, outcome)
        refusals = [outcome for outcome in outcomes if isinstance(outcome, RefusedRequest)]
        if refusals and not delivered:
            raise WeightsNotArrivedError(
                f"No server took version {newest.label.version} of the {self.needs.purpose}: "
                f"{'; '.join(str(refusal).rstrip('. ') for refusal in refusals)}.",
                self._after_refusal({refusal.code for refusal in refusals}, newest.label.version),
            )
        return delivered

    async def _proven(self, servers: Sequence[Server], newest: PublishedWeights) -> dict[Server, float | None]:
        """The gap of each of `servers` (None: no canary). Servers that do not answer are marked as lost and left out.
        Raises WeightsNotArrivedError for a server with other weights."""
        if newest.prove is None:
            return dict.fromkeys(servers)
        gaps: dict[Server, float | None] = {}
        found = await asyncio.gather(
            *(self._prove_with_retries(s, newest.prove) for s in servers), return_exceptions=True
        )
        for server, figures in zip(servers, found, strict=True):
            if isinstance(figures, ServerFault):
                self.fleet.lose(server, figures)
                continue
            if isinstance(figures, BaseException):
                raise figures
            gaps[server] = figures.get("gap")
            if figures:
                self._log("canary", newest, server=server.url, **figures)
        return gaps

    async def _prove_with_retries(self, server: Server, prove: Prove) -> Mapping[str, float]:
        """A silent server is not asked again, because the weight update waits for this."""
        try:
            return await asked_again(lambda: prove(server), self._retries)
        except RefusedRequest as fault:
            if not fault.final:
                raise
            raise WeightsNotArrivedError(
                f"pvg cannot check whether {server.url} has the weights of the {self.needs.purpose}: {fault}.",
                "Look at that server's log, then continue with --resume.",
            ) from None

    async def _retire(self, transport: Transport) -> None:
        in_use = [parsed for text, n in self._labels_in_use.items() if n > 0 and (parsed := WeightLabel.parse(text))]
        self._labels_in_use += Counter()  # drops the zeros
        await transport.retire([server.control for server in self.fleet.up], in_use)

    def _transport(self) -> Transport:
        assert self.transport is not None, "a transport is set before the first publication"
        return self.transport

    def _tell(self, delivery: DeliveryTiming, newest: PublishedWeights) -> None:
        self._log(
            "server.delivered",
            newest,
            server=delivery.url,
            wall_ms=delivery.wall_ms,
            rpc_ms=delivery.rpc_ms,
            queue_ms=delivery.queue_ms,
            arrival_ms=delivery.arrival_ms,
            **delivery.parts,
        )

    def _log(self, event: str, newest: PublishedWeights, **fields: object) -> None:
        version = {} if newest.label is None else {"trace": newest.trace, "version": newest.label.version}
        self._events.event("weights", event=event, **version, **fields, **self._of)

    def _after_refusal(self, codes: Collection[str], version: int) -> str:
        if "older_session" in codes:
            return (
                "Another run publishes to it, or this machine's clock was set back. Give each run separate servers; "
                "after a change of the clock, restart the server. Then continue with --resume."
            )
        if "load_failed" in codes and version == 0:  # the initial weights, so probably another model
            model = self.needs.model
            return f"Does it serve this experiment's {model}? Restart it: `pvg serve` with this experiment's settings."
        return "Look at the server's log, then continue with --resume."


def _label_of(server: Server, weights: PublishedWeights) -> str:
    """The label of a server that has `weights`; its own one for the weights it was started with."""
    if weights.label is not None:
        return str(weights.label)
    assert server.info is not None
    return server.info.label


def was_sent(label: str) -> bool:
    """Whether a trainer sent any of the weights of `label`. Otherwise the server was started with them."""
    return WeightLabel.parse(label.removeprefix(BROKEN)) is not None
