"""Cutting requests short on vLLM servers, and completions that begin with what an earlier request was cut with.

A server that is told to abort a request ends its reply with the tokens that it has and the labels of the weights that
sampled each of them, as it does at a completion's end: nothing about versions has to be guessed.

Invariant: what a server has not labelled is not handed back: the completion then goes on from what it had before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from pvg.errors import ConfigurationError, PvgError
from pvg.records import VersionSpan
from pvg.rollout.engine import Begun, GenerationRequest
from pvg.serving.fleet import Server
from pvg.serving.pool import Refused, ServerFault

# A request on its way is not known at its server yet, and aborting it does nothing: so it is named again.
AGAIN_S = 0.1


@dataclass(slots=True, eq=False)
class Flight:
    """A request on its way. `server`: where it is now; `failure`: why it cannot be cut."""

    request: GenerationRequest
    server: Server | None = None
    cut: bool = False
    failure: PvgError | None = None
    landed: bool = False


class Flights:
    """The requests of one engine."""

    def __init__(self) -> None:
        self._aloft: dict[str, Flight] = {}
        self._telling: set[asyncio.Task[None]] = set()

    @contextmanager
    def take_off(self, request: GenerationRequest) -> Iterator[Flight]:
        flight = self._aloft[request.id] = Flight(request)
        try:
            yield flight
        finally:
            flight.landed = True
            del self._aloft[request.id]

    def cut(self, request_ids: Collection[str]) -> None:
        flights = [flight for name in request_ids if (flight := self._aloft.get(name))]
        for flight in flights:
            flight.cut = True
        if flights:
            task = asyncio.create_task(self._tell(flights))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell(self, flights: Sequence[Flight]) -> None:
        """Their servers, until none of them is on its way any more."""
        while flights := [flight for flight in flights if not flight.landed and flight.failure is None]:
            aboard: dict[Server, list[Flight]] = {}
            for flight in flights:
                if flight.server is not None:
                    aboard.setdefault(flight.server, []).append(flight)
            await asyncio.gather(*(_abort(server, there) for server, there in aboard.items()))
            await asyncio.sleep(AGAIN_S)

    async def close(self) -> None:
        for task in self._telling:
            task.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)


async def _abort(server: Server, flights: Sequence[Flight]) -> None:
    try:
        await server.control.abort([flight.request.id for flight in flights])
    except (ServerFault, PvgError) as fault:
        if isinstance(fault, Refused) and fault.status < 500:
            failure = ConfigurationError(
                f"{server.url} does not let requests be cut short: {fault.message}.", "Set rollout.partial to false."
            )
            for flight in flights:
                flight.failure = failure
        # Else the server is in trouble. Whoever watches it will end its requests; until then it is asked again.


def joined(request: GenerationRequest, new: Begun | None) -> Begun | None:
    """What `request` begins with and what was sampled `new`, as one; None where there is neither."""
    before = request.begun
    if before is None or new is None:
        return new or before
    first = len(before.token_ids)
    spans = [VersionSpan(span.start + first, span.version) for span in new.spans]
    if spans[0].version == before.spans[-1].version:
        spans = spans[1:]
    return Begun(
        np.concatenate([before.token_ids, new.token_ids]),
        np.concatenate([before.logprobs, new.logprobs]),
        (*before.spans, *spans),
        request.timing(new.timing.queued_s, new.timing.service_s),
    )


def remainder(request: GenerationRequest) -> GenerationRequest:
    """`request` as a server sees it: a longer prompt, fewer tokens, and another seed. A server's generator starts anew
    with each request, and the numbers that sampled the first tokens must not sample the next ones too: what is
    continued is equal in distribution to what was never cut, not token for token."""
    first = request.tokens_begun
    if not first:
        return request
    sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - first)
    seed = int(np.random.SeedSequence((request.seed, first)).generate_state(1, np.uint64)[0])
    return replace(request, prompt_ids=request.known_ids, sampling=sampling, seed=seed, begun=None)
