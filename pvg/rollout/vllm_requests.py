"""Requests in flight on servers: counting them, cutting them short, and continuing those that were cut.

To cut a request, the engine asks its server to abort it. The server then ends its reply with the tokens so far and the
labels of the weights that sampled them. Tokens without a label are discarded, and the completion continues from what it
had before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from pvg.errors import ConfigurationError, PvgError
from pvg.records import VersionSpan
from pvg.rollout.engine import EngineStats, GenerationRequest, PartialCompletion
from pvg.rollout.vllm_wire import ServedCompletion
from pvg.servers.fleet import Server
from pvg.servers.pool import RefusedRequest, ServerFault
from pvg.telemetry.events import Events

LOAD_EVERY_S = 1.0  # between two log lines about the requests in flight


@dataclass(slots=True)
class RequestBatch:
    """The requests from the first in flight until none is in flight. The log calls this a batch."""

    number: int
    started: float  # seconds of time.perf_counter
    before: EngineStats
    load_logged: float  # when the load was last logged
    announced: bool = False
    completions: int = 0
    longest_s: float = 0.0


class RequestCounter:
    """Counts requests and tokens, and logs batches and load (`[gen]`). `capacity`: requests that can be in flight."""

    def __init__(self, events: Events, capacity: int) -> None:
        self.capacity = capacity
        self.in_flight = 0
        self._events = events
        self._stats = EngineStats()
        self._since = 0.0  # when `_stats` was last brought up to date
        self._batch: RequestBatch | None = None
        self._batches = 0

    @property
    def stats(self) -> EngineStats:
        """`rows` / `batches` is the time-weighted mean number of requests in flight while there was any."""
        self._count_time()
        return self._stats

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request while it is in flight, and as completed unless the context ends with an error."""
        self._count_time()
        self.in_flight += 1
        began = self._since
        if self._batch is None:
            self._batch = RequestBatch(self._batches, began, self._stats, load_logged=began)
            self._batches += 1
            # Callers start their requests in one turn of the loop. The line is written after that turn, so it counts
            # all.
            asyncio.get_running_loop().call_soon(self._announce, self._batch)
        else:
            self._log_load(self._batch, began)
        batch = self._batch
        try:
            yield
            batch.completions += 1
            batch.longest_s = max(batch.longest_s, time.perf_counter() - began)
        finally:
            self._count_time()
            self.in_flight -= 1
            if self.in_flight:
                self._log_load(batch, self._since)
            else:
                self._batch = None
                self._conclude(batch)

    def add_tokens(self, generated: ServedCompletion) -> None:
        self._stats = replace(
            self._stats,
            tokens=self._stats.tokens + len(generated.token_ids),
            prompt_tokens=self._stats.prompt_tokens + generated.prompt_tokens,
            prompt_tokens_computed=self._stats.prompt_tokens_computed
            + generated.prompt_tokens
            - generated.cached_tokens,
        )

    def _count_time(self) -> None:
        """Add the time with requests in flight to the statistics, as batches (seconds) and rows (requests times
        seconds)."""
        now = time.perf_counter()
        if self.in_flight:
            passed = now - self._since
            self._stats = replace(
                self._stats,
                batches=self._stats.batches + passed,
                rows=self._stats.rows + passed * self.in_flight,
                seconds=self._stats.seconds + passed,
            )
        self._since = now

    def _announce(self, batch: RequestBatch) -> None:
        if not batch.announced:
            batch.announced = True
            place = {"batch": batch.number, "inflight": self.in_flight}
            self._events.event("gen", event="batch.start", **place, target_batch=self.capacity)

    def _log_load(self, batch: RequestBatch, now: float) -> None:
        if batch.announced and now - batch.load_logged >= LOAD_EVERY_S:
            batch.load_logged = now
            self._events.event("gen", event="load", batch=batch.number, inflight=self.in_flight)

    def _conclude(self, batch: RequestBatch) -> None:
        self._announce(batch)  # the batch may have ended within one turn
        passed = self._stats.seconds - batch.before.seconds
        self._events.event(
            "gen",
            event="batch.done",
            batch=batch.number,
            inflight=0,
            completions=batch.completions,
            tokens=self._stats.tokens - batch.before.tokens,
            rows=round((self._stats.rows - batch.before.rows) / passed, 1) if passed else 0.0,
            dur_ms=(self._since - batch.started) * 1e3,
            longest_ms=batch.longest_s * 1e3,
        )


# --- cutting ---------------------------------------------------------------------------------------------------------

# The server ignores an abort for a request that has not reached it yet, so the abort is repeated.
AGAIN_S = 0.1


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A request in flight. `server`: where it currently runs. `failure`: why it cannot be cut."""

    request: GenerationRequest
    server: Server | None = None
    cut: bool = False
    failure: PvgError | None = None
    ended: bool = False


class InFlightRequests:
    """The requests that can be cut short, by id."""

    def __init__(self) -> None:
        self._requests: dict[str, InFlightRequest] = {}
        self._aborting: set[asyncio.Task[None]] = set()

    @contextmanager
    def track(self, request: GenerationRequest) -> Iterator[InFlightRequest]:
        """The request can be cut while this context is open."""
        tracked = self._requests[request.id] = InFlightRequest(request)
        try:
            yield tracked
        finally:
            tracked.ended = True
            del self._requests[request.id]

    def cut(self, request_ids: Collection[str]) -> None:
        """Cut these requests. Ignores unknown ids."""
        found = [tracked for name in request_ids if (tracked := self._requests.get(name))]
        for tracked in found:
            tracked.cut = True
        if found:
            task = asyncio.create_task(_abort_until_ended(found))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def close(self) -> None:
        for task in self._aborting:
            task.cancel()
        await asyncio.gather(*self._aborting, return_exceptions=True)


async def _abort_until_ended(cut: Sequence[InFlightRequest]) -> None:
    """Tell the servers to abort these requests, until all of them have ended. A server that is slow to answer does not
    delay the others."""
    telling: dict[Server, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as aborts:
        while cut := [tracked for tracked in cut if not tracked.ended and tracked.failure is None]:
            by_server: dict[Server, list[InFlightRequest]] = {}
            for tracked in cut:
                if tracked.server is not None:
                    by_server.setdefault(tracked.server, []).append(tracked)
            for server, running in by_server.items():
                if server not in telling or telling[server].done():
                    telling[server] = aborts.create_task(_abort(server, running))
            await asyncio.sleep(AGAIN_S)


async def _abort(server: Server, running: Sequence[InFlightRequest]) -> None:
    try:
        await server.control.abort([tracked.request.id for tracked in running])
    except (ServerFault, PvgError) as fault:
        if isinstance(fault, RefusedRequest) and fault.final:
            failure = ConfigurationError(
                f"{server.url} cannot cut requests short: {fault.message}.", "Set rollout.deadline to 'cut'."
            )
            for tracked in running:
                tracked.failure = failure
        # For other faults, the fleet's health checks end the requests of a failed server. Until then the abort repeats.


# --- continuing ------------------------------------------------------------------------------------------------------


def joined(request: GenerationRequest, new: PartialCompletion | None) -> PartialCompletion | None:
    """The tokens of `request.resumed_from` and the `new` ones as one completion; None without any."""
    before = request.resumed_from
    if before is None or new is None:
        return new or before
    first = len(before.token_ids)
    spans = [VersionSpan(span.start + first, span.version) for span in new.spans]
    if spans[0].version == before.spans[-1].version:
        spans = spans[1:]
    return PartialCompletion(
        np.concatenate([before.token_ids, new.token_ids]),
        np.concatenate([before.logprobs, new.logprobs]),
        (*before.spans, *spans),
        request.timing(new.timing.queued_s, new.timing.service_s),
    )


def remainder(request: GenerationRequest) -> GenerationRequest:
    """`request` as a server sees it: a longer prompt, fewer tokens and a new seed. A server seeds its random generator
    for each request, and the old seed would repeat the random numbers of the first tokens. A continued completion
    therefore equals an uncut one in distribution, not token by token."""
    first = request.tokens_resumed
    if not first:
        return request
    sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - first)
    seed = int(np.random.SeedSequence((request.seed, first)).generate_state(1, np.uint64)[0])
    return replace(request, prompt_ids=request.known_ids, sampling=sampling, seed=seed, resumed_from=None)
