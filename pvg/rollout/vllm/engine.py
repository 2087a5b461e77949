"""`VllmEngine`: an `Engine` over one or several vLLM servers.

    engine = VllmEngine(controls, pool, transport, session, section, canary=canary, events=events, ...)
    await engine.ready()                    # are the servers up, and do they fit the experiment?
    await engine.load_weights(update)       # to all of them, with proof of arrival
    completion = await engine.generate(request)

Invariants:
- Every call of `generate` ends with one completion or the error that prevented it. A request is retried only after a
  server fault, and nothing of a failed attempt is delivered. So it is delivered at most once.
- Every token carries the version that sampled it, as the server reports it. A completion from weights that this engine
  did not publish, or from older ones than the server had, is discarded and requested again.
- A server's prefix cache entry serves only the version that computed it, because each version has its own salt.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pvg.config.sections import Serving
from pvg.errors import (
    ConfigurationError,
    MissingRequirementError,
    RolloutFailedError,
    StateError,
    WeightsNotArrivedError,
)
from pvg.records import Float32, Int32, Timing, VersionSpan
from pvg.rollout.engine import (
    Completion,
    CutShort,
    Engine,
    EngineStats,
    GenerationRequest,
    PartialCompletion,
    check_request,
)
from pvg.rollout.vllm.wire import (
    GENERATE,
    InFlightRequest,
    InFlightRequests,
    ServedCompletion,
    StreamedCompletion,
    generation,
    joined,
    prompt_scoring,
    read_generated,
    read_prompt_logprobs,
    remainder,
)
from pvg.servers.canary import Canary, ChecksumTest, ExpectedLogprobs
from pvg.servers.control import ControlClient, DeliveryTiming, ServerInfo, check_shape
from pvg.servers.fleet import Fleet, Server, StaleWeights
from pvg.servers.labels import BROKEN, PublishingSession, WeightLabel, salt
from pvg.servers.pool import HttpPool, RefusedRequest, ReplyTimeout, ServerFault, pause_before_retry
from pvg.servers.transports.transport import Transport
from pvg.servers.update import SyncTiming, WeightUpdate
from pvg.telemetry.events import Events
from pvg.telemetry.spans import run_in

if TYPE_CHECKING:
    from pvg.servers.transports.adapters import AdapterTransport

LONG_REPLY = 1 << 18  # bytes that take some milliseconds to parse: 2,000 tokens with their log-probs
LOAD_EVERY_S = 1.0  # between two log lines about the requests in flight
UNPUBLISHED = -1  # version before the first publication: the servers' weights are unknown


@dataclass(frozen=True, slots=True)
class ServerRequirements:
    """What servers must offer: the model's shape (empty: any), the length of prompt plus completion in tokens,
    log-probs of the distribution after temperature and cuts, the rank of adapters (0: none), and each token's routed
    experts."""

    shape: str
    max_length: int
    processed_logprobs: bool
    lora_rank: int
    routed_experts: bool = False


@dataclass(slots=True)
class _Stretch:
    """The time from the first request in flight until none is in flight. The log calls it a batch."""

    number: int
    started: float  # seconds of time.perf_counter
    before: EngineStats
    told: float  # when the load was last logged
    announced: bool = False
    completions: int = 0
    longest_s: float = 0.0


@dataclass(slots=True)
class PublishedWeights:
    """The newest weights, to which stale servers are brought."""

    label: WeightLabel
    trace: str
    expected: ExpectedLogprobs | None


class VllmEngine(Engine):
    """Owns `pool`, `control_pool` (which may be the same) and `transport`. `deadline_s`: limit for one request
    including its retries; None: no limit. All methods belong to one event loop."""

    def __init__(
        self,
        section: Serving,
        *,
        pool: HttpPool,
        control_pool: HttpPool,
        controls: Sequence[ControlClient],
        transport: Transport,
        session: PublishingSession,
        needs: ServerRequirements,
        canary: Canary | None,
        checksums: ChecksumTest | None,
        events: Events,
        deadline_s: float | None = None,
    ) -> None:
        self._section = section
        self._pool = pool
        self._control_pool = control_pool
        self._transport = transport
        self._session = session
        self._needs = needs
        self._canary = canary
        self._checksums = checksums
        self._events = events
        self._deadline_s = deadline_s
        self._fleet = Fleet(controls, section, events, check=self._check_server, catch_up=self._catch_up)
        self._version = UNPUBLISHED
        self._newest: PublishedWeights | None = None
        self._caught_up: dict[Server, tuple[DeliveryTiming, float | None]] = {}  # last delivery and canary gap
        self._update: asyncio.Task[SyncTiming] | None = None  # the newest
        self._labels_in_use: Counter[str] = Counter()
        self._flights = InFlightRequests()
        self._stats = EngineStats()
        self._in_flight = 0
        self._in_flight_since = 0.0
        self._stretch: _Stretch | None = None
        self._stretches = 0
        self._closed = False
        self._reading = ThreadPoolExecutor(1, "pvg-read")  # its thread starts at the first long reply

    @property
    def version(self) -> int:
        return self._version

    @property
    def remote(self) -> bool:
        return True

    @property
    def requests_in_flight(self) -> int:
        return self._in_flight

    @property
    def max_in_flight(self) -> int:
        return self._pool.limits.capacity

    @property
    def stats(self) -> EngineStats:
        """`rows` / `batches` is the time-weighted mean number of requests in flight while there was any."""
        self._count_time()
        return self._stats

    async def ready(self) -> None:
        """Check the servers. Raises ServerUnavailableError if none answers, ConfigurationError or
        MissingRequirementError if one cannot serve this experiment."""
        await self._fleet.open()

    # --- generation --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion on one of the servers. Cancelling the caller ends the request on its server too.

        Raises ConfigurationError for a request that no server can serve, RolloutFailedError after the deadline or the
        last retry, ServerUnavailableError when no server is up for `serving.unavailable_s`.
        """
        if self._closed:
            raise StateError("The engine is closed.", "Open a new one to continue sampling.")
        if self._version == UNPUBLISHED:
            raise StateError("The servers have no weights of this run yet.", "Publish a version before sampling.")
        check_request(request)
        asked = self._enter()
        try:
            async with asyncio.timeout(self._deadline_s):
                with self._flights.take_off(request) as flight:
                    completion = await self._with_retries(flight)
            self._completed(asked)
            return completion
        except TimeoutError:
            raise RolloutFailedError(
                f"Rollout {request.id} was not finished within rollout.deadline_s = {self._deadline_s:g}.",
                "Raise rollout.deadline_s, lower rollout.max_tokens, or add servers.",
            ) from None
        finally:
            self._leave()

    def cut(self, request_ids: Collection[str]) -> None:
        """End these requests on their servers, which return the tokens so far."""
        self._flights.cut(request_ids)

    async def _with_retries(self, flight: InFlightRequest) -> Completion:
        called, last, request = time.perf_counter(), None, flight.request
        for attempt in range(1, self._section.retries + 2):
            flight.server = server = await self._fleet.acquire(avoid=last)
            if flight.cut:
                raise CutShort(request.begun)
            try:
                return await self._ask(server, flight, called)
            except ServerFault as fault:
                if isinstance(fault, RefusedRequest) and fault.status < 500 and not self._adapter_is_missing(fault):
                    raise ConfigurationError(
                        f"{server.url} refuses request {request.id}: {fault.message}.",
                        "The server has a different model or a shorter context than the experiment.",
                    ) from None
                failed, last = fault, server
            flight.server = None
            self._fleet.report(server, failed)
            place = {"request": request.id, "server": server.url, "attempt": attempt}
            self._events.event("gen", event="retry", **place, why=str(failed))
            if attempt <= self._section.retries:
                await pause_before_retry(attempt, jitter=request.seed % 1024 / 1024)
        raise RolloutFailedError(
            f"Rollout {request.id} failed {self._section.retries + 1} times. The last error: {failed}.",
            "Look at that server's log. serving.retries sets the number of retries.",
        )

    async def _ask(self, server: Server, flight: InFlightRequest, called: float) -> Completion:
        """One attempt. Raises CutShort if the request was cut in time."""
        request, sent = flight.request, time.perf_counter()
        label, version = server.label, self._version
        self._labels_in_use[label] += 1
        try:
            generated = await server.attempt(self._exchange(server, flight, label))
        finally:
            self._labels_in_use[label] -= 1
        if flight.failure is not None:
            raise flight.failure
        spans = self._spans(server, generated, label, version)
        if self._needs.routed_experts and generated.routed_experts is None:
            raise ConfigurationError(
                f"{server.url} does not report the experts of its tokens, which rollout.routed_experts requires.",
                "Start it with `pvg serve` and this experiment's settings. Its model must be a mixture of experts.",
            )
        self._stats = replace(
            self._stats,
            tokens=self._stats.tokens + len(generated.token_ids),
            prompt_tokens=self._stats.prompt_tokens + generated.prompt_tokens,
            prompt_tokens_computed=self._stats.prompt_tokens_computed
            + generated.prompt_tokens
            - generated.cached_tokens,
        )
        timing = Timing(queued_s=sent - called, service_s=time.perf_counter() - sent)
        sampled = (
            PartialCompletion(generated.token_ids, generated.logprobs, spans, timing)
            if len(generated.token_ids)
            else None
        )
        whole = joined(request, sampled)
        if generated.finish_reason == "abort" or whole is None:
            raise CutShort(whole)
        return Completion(
            request_id=request.id,
            token_ids=whole.token_ids,
            logprobs=whole.logprobs,
            spans=whole.spans,
            finish_reason=generated.finish_reason,
            timing=whole.timing,
            routed_experts=generated.routed_experts if self._needs.routed_experts else None,
        )

    async def _exchange(self, server: Server, flight: InFlightRequest, label: str) -> ServedCompletion:
        request = remainder(flight.request)
        url, streamed = server.url + GENERATE, request.on_tokens is not None
        # During an update it is unknown which weights will compute this prompt, so other requests must not reuse it.
        shared = self._section.share_prefix and server.settled
        own = label if shared else f"{label}/{request.id}"
        body = generation(
            request, salt=salt(own), model=self._model(label), seeded=self._section.seeded, stream=streamed
        )
        if request.on_tokens is None:
            reply = await self._pool.request("POST", url, body, timeout_s=None)  # the deadline covers all attempts
            cut = flight.cut
            return await self._read(len(reply.body), lambda: read_generated(reply.json(), url, cut=cut))
        stretch = StreamedCompletion(url)
        async with self._pool.events(url, body, timeout_s=None) as events:
            async for event in events:
                request.on_tokens(stretch.feed(event))
        return await self._read(len(stretch.experts or ""), partial(stretch.finish, cut=flight.cut))

    async def _read(self, size: int, read: Callable[[], ServedCompletion]) -> ServedCompletion:
        """Parse short replies directly and long ones in a thread, because they would block the event loop."""
        return read() if size < LONG_REPLY else await run_in(self._reading, read)

    def _spans(self, server: Server, generated: ServedCompletion, label: str, version: int) -> tuple[VersionSpan, ...]:
        """The version of each token. Raises StaleWeights if a token's weights are not the ones the server should
        have."""
        if self._transport.adapters:
            for _, text in generated.labels:
                if _was_sent(text):
                    raise StaleWeights(server.url, f"sampled from weights {text!r}, which another trainer sent")
            parsed = WeightLabel.parse(label)
            return (VersionSpan(0, parsed.version if parsed else version),)
        spans = []
        least = WeightLabel.parse(label)
        for start, text in generated.labels:
            found = WeightLabel.parse(text)
            if found is None or found.session != self._session or (least and found.version < least.version):
                raise StaleWeights(server.url, f"its tokens come from weights {text!r}, not from {label!r}")
            spans.append(VersionSpan(start, found.version))
        return tuple(spans)

    def _model(self, label: str) -> str | None:
        """The server's model name for the weights of `label`; None: its only model."""
        if not self._transport.adapters:
            return None
        transport: AdapterTransport = self._transport  # type: ignore[assignment]
        parsed = WeightLabel.parse(label)
        return transport.model_of(parsed) if parsed else None

    def _adapter_is_missing(self, fault: RefusedRequest) -> bool:
        return self._transport.adapters and fault.status == 404

    # --- weights -----------------------------------------------------------------------------------------------------

    async def load_weights(self, update: WeightUpdate) -> SyncTiming:
        """Send new weights to all live servers and prove that they arrived. Other servers get them when they return.
        The update completes even if the caller is cancelled, unless the engine is closed.

        Raises StateError for a version that is not above the current one, WeightsNotArrivedError if a server has other
        weights than it was sent or all refuse them, ServerUnavailableError if no server is up for
        `serving.unavailable_s`.
        """
        if self._closed:
            raise StateError("The engine is closed.", "Open a new one to continue sampling.")
        if update.version <= self._version:
            raise StateError(
                f"The engine has version {self._version} of the weights and was sent version {update.version}.",
                "Versions only go up.",
            )
        updating = self._update = asyncio.create_task(self._load(update))
        try:
            return await asyncio.shield(updating)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if updating.cancelled() and caller is not None and not caller.cancelling():
                raise StateError("The engine was closed during an update of the weights.") from None
            raise

    async def _load(self, update: WeightUpdate) -> SyncTiming:
        label = WeightLabel(self._session, update.version)
        self._fleet.interrupt_catching_up()
        async with self._fleet.updating:
            started = time.perf_counter()
            await self._transport.stage(update, label)
            staged = time.perf_counter()
            expected = None if self._canary is None else await self._canary.expect(update.tensors, update.version)
            self._newest = PublishedWeights(label, update.trace_id, expected)
            self._version = update.version
            delivered = await self._deliver(self._fleet.alive)
            gaps = await self._prove(list(delivered))
            if self._checksums is not None and self._checksums.due:
                await self._compare(list(gaps), self._checksums, update)
            delivered = {server: delivery for server, delivery in delivered.items() if server.state != "away"}
            for server in delivered:
                self._fleet.arrived(server, str(label))
            await self._retire()
        if not delivered:  # all are away: the first that returns catches up before it counts as up
            back = await self._fleet.acquire()
            delivered[back], gaps[back] = self._caught_up[back]
        slowest = max(delivered.values(), key=lambda delivery: delivery.wall_ms)
        return SyncTiming(
            version=update.version,
            wall_ms=slowest.wall_ms,
            rpc_ms=slowest.rpc_ms,
            parts={"stage_ms": (staged - started) * 1e3, "arrival_ms": slowest.arrival_ms, **slowest.parts},
            canary_gap=max((gap for gap in gaps.values() if gap is not None), default=None),
        )

    async def _deliver(self, servers: Sequence[Server]) -> dict[Server, DeliveryTiming]:
        """Deliver to all `servers`, and mark failing ones as lost. Raises WeightsNotArrivedError if some refuse and
        none accepts."""
        newest = self._present()
        outcomes = await self._fleet.deliver(servers, self._transport, newest.label, newest.trace)
        delivered = {}
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, DeliveryTiming):
                delivered[server] = outcome
                self._tell(outcome, newest)
            else:
                place = {"trace": newest.trace, "version": newest.label.version, "server": server.url}
                self._events.event("weights", event="server.failed", **place, why=str(outcome))
                self._fleet.lose(server, outcome)
        refusals = [outcome for outcome in outcomes if isinstance(outcome, RefusedRequest)]
        if refusals and not delivered:
            raise WeightsNotArrivedError(
                f"No server took version {newest.label.version} of the weights: "
                f"{'; '.join(str(refusal).rstrip('. ') for refusal in refusals)}.",
                _after_refusal({refusal.code for refusal in refusals}, newest.label.version),
            )
        return delivered

    async def _catch_up(self, server: Server) -> None:
        """Send the newest weights to one server. Called by the fleet, which holds `updating`."""
        if self._newest is None:
            if server.state == "away":
                server.state = "stale"  # it answers, and gets its weights in the next update
            return
        newest = self._newest
        (outcome,) = await self._fleet.deliver([server], self._transport, newest.label, newest.trace)
        if not isinstance(outcome, DeliveryTiming):
            raise outcome
        self._tell(outcome, newest)
        gaps = await self._prove([server])
        if server not in gaps:
            return
        self._caught_up[server] = outcome, gaps[server]
        self._fleet.arrived(server, str(newest.label))

    async def _prove(self, servers: Sequence[Server]) -> dict[Server, float | None]:
        """Check the canary on `servers`. Returns gaps in nats (None: no canary). Servers that do not answer are marked
        as lost and left out. Raises WeightsNotArrivedError for a server with other weights."""
        newest = self._present()
        if self._canary is None or newest.expected is None:
            return dict.fromkeys(servers)
        gaps: dict[Server, float | None] = {}
        found = await asyncio.gather(*(self._canary_logprobs(s, newest) for s in servers), return_exceptions=True)
        for server, logprobs in zip(servers, found, strict=True):
            if isinstance(logprobs, ServerFault):
                self._fleet.lose(server, logprobs)
                continue
            if isinstance(logprobs, BaseException):
                raise logprobs
            gaps[server] = gap = self._canary.check(server.url, newest.expected, logprobs)
            place = {"trace": newest.trace, "version": newest.label.version, "server": server.url}
            self._events.event("weights", event="canary", **place, gap=gap, moved=newest.expected.moved)
        return gaps

    async def _compare(self, servers: Sequence[Server], checksums: ChecksumTest, update: WeightUpdate) -> None:
        """Compare checksums on `servers`. Those that do not answer are marked as lost. Raises
        WeightsNotArrivedError."""
        for server in servers:
            try:
                await checksums.check(server.control, server.info, update.tensors, update.version)
            except ServerFault as fault:
                self._fleet.lose(server, fault)

    async def _canary_logprobs(self, server: Server, newest: PublishedWeights) -> list[Float32]:
        assert self._canary is not None
        return list(await asyncio.gather(*(self._scored(server, ids, newest) for ids in self._canary.sequences)))

    async def _scored(self, server: Server, ids: Int32, newest: PublishedWeights) -> Float32:
        """Score one sequence, with retries. Raises the last fault, or WeightsNotArrivedError if the server refuses. A
        silent server is not asked again, because the weight update waits for this."""
        url, label = server.url + GENERATE, str(newest.label)
        body = prompt_scoring(ids, salt=salt(label), model=self._model(label))
        for attempt in range(1, self._section.retries + 2):
            try:
                reply = await self._pool.request("POST", url, body, timeout_s=self._section.unavailable_s)
                return read_prompt_logprobs(reply.json(), ids, url)[0]
            except ServerFault as fault:
                if isinstance(fault, RefusedRequest) and fault.status < 500:
                    raise WeightsNotArrivedError(
                        f"{server.url} was sent version {newest.label.version} of the weights and cannot prove that it "
                        f"has them: {fault}.",
                        "Look at that server's log, then continue with --resume.",
                    ) from None
                if attempt > self._section.retries or isinstance(fault, ReplyTimeout):
                    raise
            await pause_before_retry(attempt, jitter=0.5)
        raise AssertionError("unreachable")

    async def _retire(self) -> None:
        in_use = [parsed for text, n in self._labels_in_use.items() if n > 0 and (parsed := WeightLabel.parse(text))]
        self._labels_in_use += Counter()  # drops the zeros
        await self._transport.retire([server.control for server in self._fleet.up], in_use)

    def _present(self) -> PublishedWeights:
        assert self._newest is not None
        return self._newest

    def _tell(self, delivery: DeliveryTiming, newest: PublishedWeights) -> None:
        self._events.event(
            "weights",
            event="server.delivered",
            trace=newest.trace,
            version=newest.label.version,
            server=delivery.url,
            wall_ms=delivery.wall_ms,
            rpc_ms=delivery.rpc_ms,
            queue_ms=delivery.queue_ms,
            arrival_ms=delivery.arrival_ms,
            **delivery.parts,
        )

    # --- closing, checks, counting ------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop the fleet, cancel a running update, and close connections and the transport. A second call does
        nothing."""
        if self._closed:
            return
        self._closed = True
        async with AsyncExitStack() as rest:  # runs every step even if one fails
            rest.callback(self._reading.shutdown, wait=False)
            rest.push_async_callback(self._control_pool.close)
            rest.push_async_callback(self._flights.close)
            rest.push_async_callback(self._pool.close)
            rest.push_async_callback(self._transport.close)
            await self._fleet.close()
            if self._update is not None:
                self._update.cancel()
                await asyncio.gather(self._update, return_exceptions=True)  # its caller received the error

    def _check_server(self, info: ServerInfo) -> None:
        """Raises ConfigurationError or MissingRequirementError for a server that cannot serve this experiment."""
        needs = self._needs
        if info.runner != "generate":
            raise ConfigurationError(
                f"{info.url} serves a {info.runner} model, but the prover needs one that generates.",
                "List pooling servers in serving.verifier_servers.",
            )
        check_shape(info, needs.shape, "models.prover")
        if info.max_model_len < needs.max_length:
            raise ConfigurationError(
                f"{info.url} accepts {info.max_model_len} tokens, but a prompt and its completion may take "
                f"{needs.max_length}.",
                "Start it with a larger serving.max_model_len, or lower rollout.max_tokens.",
            )
        if needs.processed_logprobs and info.logprobs_mode != "processed_logprobs":
            raise MissingRequirementError(
                f"{info.url} reports log-probs of a different distribution than it samples from "
                f"(logprobs mode {info.logprobs_mode!r}).",
                "Start it with `pvg serve`, or with --logprobs-mode processed_logprobs.",
            )
        if needs.lora_rank and _was_sent(info.label):
            raise ConfigurationError(
                f"{info.url} has weights that a trainer sent it ({info.label}), but adapters need the weights it was "
                "started with.",
                "Restart it. Two runs need separate servers.",
            )
        if needs.lora_rank > info.max_lora_rank:
            raise ConfigurationError(
                f"{info.url} accepts adapters up to rank {info.max_lora_rank}, but training.lora_rank is "
                f"{needs.lora_rank}.",
                "Start it with `pvg serve` and this experiment's settings.",
            )

    def _enter(self) -> float:
        """Count a new request. Returns its start time."""
        self._count_time()
        self._in_flight += 1
        now = self._in_flight_since
        if self._stretch is None:
            self._stretch = _Stretch(self._stretches, now, self._stats, told=now)
            self._stretches += 1
            # Callers start their requests in one turn of the loop. The line is written after that turn, so it counts
            # all.
            asyncio.get_running_loop().call_soon(self._announce, self._stretch)
        else:
            self._tell_load(self._stretch, now)
        return now

    def _completed(self, asked: float) -> None:
        assert self._stretch is not None
        self._stretch.completions += 1
        self._stretch.longest_s = max(self._stretch.longest_s, time.perf_counter() - asked)

    def _leave(self) -> None:
        self._count_time()
        self._in_flight -= 1
        stretch = self._stretch
        assert stretch is not None
        if self._in_flight:
            self._tell_load(stretch, self._in_flight_since)
        else:
            self._stretch = None
            self._conclude(stretch)

    def _announce(self, stretch: _Stretch) -> None:
        if not stretch.announced:
            stretch.announced = True
            place = {"batch": stretch.number, "inflight": self._in_flight}
            self._events.event("gen", event="batch.start", **place, target_batch=self.max_in_flight)

    def _tell_load(self, stretch: _Stretch, now: float) -> None:
        if stretch.announced and now - stretch.told >= LOAD_EVERY_S:
            stretch.told = now
            self._events.event("gen", event="load", batch=stretch.number, inflight=self._in_flight)

    def _conclude(self, stretch: _Stretch) -> None:
        self._announce(stretch)  # the stretch may have ended within one turn
        passed = self._stats.seconds - stretch.before.seconds
        self._events.event(
            "gen",
            event="batch.done",
            batch=stretch.number,
            inflight=0,
            completions=stretch.completions,
            tokens=self._stats.tokens - stretch.before.tokens,
            rows=round((self._stats.rows - stretch.before.rows) / passed, 1) if passed else 0.0,
            dur_ms=(self._in_flight_since - stretch.started) * 1e3,
            longest_ms=stretch.longest_s * 1e3,
        )

    def _count_time(self) -> None:
        """Add the time with requests in flight to `stats`, as batches (seconds) and rows (requests times seconds)."""
        now = time.perf_counter()
        if self._in_flight:
            passed = now - self._in_flight_since
            self._stats = replace(
                self._stats,
                batches=self._stats.batches + passed,
                rows=self._stats.rows + passed * self._in_flight,
                seconds=self._stats.seconds + passed,
            )
        self._in_flight_since = now


def _after_refusal(codes: Collection[str], version: int) -> str:
    if "older_session" in codes:
        return "Another run publishes to it. Give each run separate servers, then continue with --resume."
    if "load_failed" in codes and version == 0:  # the initial weights, so probably another model
        return "Does it serve this experiment's models.prover? Restart it: `pvg serve` with this experiment's settings."
    return "Look at the server's log, then continue with --resume."


def _was_sent(label: str) -> bool:
    """Whether a trainer sent any of the weights of `label`. Otherwise the server was started with them."""
    return WeightLabel.parse(label.removeprefix(BROKEN)) is not None
