"""`WorkerEngine`: an `Engine` whose rows are sampled by the workers of a pool.

Requests that arrive together form a *block*, and each shard gets its groups of the block, whole. Its worker decodes
them in the order of their arrival, and never together with those of another shard. So the bits of a completion depend
on the block and on the number of shards alone, as long as one block is sampled after the other. (With
`rollout.prefetch`, blocks meet in a shard.)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

from pvg.errors import StateError
from pvg.rollout.engine import (
    Completion,
    CutShort,
    Engine,
    EngineStats,
    GenerationRequest,
    check_request,
    gather_requests,
)
from pvg.servers.publishing import SyncTiming, WeightUpdate
from pvg.workers.frames import Frame
from pvg.workers.pool import WorkerPool
from pvg.workers.requests import block_of, completions_of

# The workers queue what they cannot decode at once.
MOST_IN_FLIGHT = 10**9


def shard_of(group: int, shards: int) -> int:
    """The shard of a group. Neighbouring groups often differ in role, so plain `group % shards` could give one shard
    all of a role, whose completions may be longer."""
    return (group + group // shards) % shards


@dataclass(eq=False)
class _Block:
    """Requests that one worker samples together."""

    place: int
    requests: list[GenerationRequest]
    futures: list[asyncio.Future[Completion]]

    def take(self, frame: Frame) -> bool:
        """Hand over finished completions, but no second time after a restart. Whether there were new ones."""
        new = False
        for index, found in completions_of(frame, self.requests).items():
            future = self.futures[index]
            if future.done():
                continue
            new = True
            if isinstance(found, CutShort):
                future.set_exception(found)
            else:
                future.set_result(found)
        return new


class WorkerEngine(Engine):
    """The pool stays the caller's. Belongs to its event loop."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._version = 0
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[Completion]]] = []
        self._arrivals = 0
        self._in_flight = 0
        self._sender: asyncio.Task[None] | None = None
        self._blocks: dict[asyncio.Future[Frame], _Block] = {}
        self._totals = EngineStats()
        self._closed = False

    @property
    def version(self) -> int:
        return self._version

    @property
    def requests_in_flight(self) -> int:
        return self._in_flight

    @property
    def max_in_flight(self) -> int:
        return MOST_IN_FLIGHT

    @property
    def stats(self) -> EngineStats:
        """Totals of all workers; `seconds` are those of one sampling worker on average."""
        return self._totals

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion. Cancelling the caller drops its row. Raises what the worker's engine raises."""
        if self._closed:
            raise StateError("The engine is closed.", "Open a new one to continue sampling.")
        check_request(request)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._arrivals += 1
        self._in_flight += 1
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(future)
            raise
        finally:
            self._in_flight -= 1

    def cut(self, request_ids: Collection[str]) -> None:
        wanted = set(request_ids)
        for request, future in self._waiting:
            if request.id in wanted and not future.done():
                future.set_exception(CutShort(request.resumed_from))
        for block in self._blocks.values():
            if ids := [request.id for request in block.requests if request.id in wanted]:
                self._pool.tell(block.place, Frame("cut", {"ids": ids}))

    async def load_weights(self, update: WeightUpdate) -> SyncTiming:
        called = time.perf_counter()
        if update.version <= self._version:
            raise StateError(
                f"The workers have version {self._version} of the weights and were sent version {update.version}.",
                "Versions only go up.",
            )
        answers = await self._pool.load_policy(update.tensors, update.version, update.trace_id)
        self._version = update.version
        rpc_ms = max(answer.fields["rpc_ms"] for answer in answers)
        return SyncTiming(update.version, wall_ms=(time.perf_counter() - called) * 1e3, rpc_ms=rpc_ms)

    async def close(self) -> None:
        self._closed = True
        error = StateError("The engine is closed.", "Open a new one to continue sampling.")
        blocks = [future for block in self._blocks.values() for future in block.futures]
        for future in [*blocks, *(future for _, future in self._waiting)]:
            if not future.done():
                future.set_exception(error)
        if self._sender is not None:
            self._sender.cancel()

    # --- blocks -------------------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        """Send the waiting requests as soon as no more arrive."""
        while self._waiting:
            await gather_requests(lambda: self._arrivals)
            waiting, self._waiting = self._waiting, []
            places, blocks = self._pool.sampling, dict[int, _Block]()
            for request, future in waiting:
                if future.done():
                    continue
                place = places[shard_of(request.group, len(places))]
                block = blocks.setdefault(place, _Block(place, [], []))
                block.requests.append(request)
                block.futures.append(future)
            for block in blocks.values():
                self._begin(block)

    def _begin(self, block: _Block) -> None:
        try:
            answer = self._pool.submit(block.place, block_of(block.requests), partial(self._take, block))
        except Exception as error:  # noqa: BLE001 - it belongs to the callers
            self._end(block, error)
            return
        self._blocks[answer] = block
        answer.add_done_callback(self._ended)

    def _ended(self, answer: asyncio.Future[Frame]) -> None:
        block = self._blocks.pop(answer)
        if answer.cancelled():
            return
        if (error := answer.exception()) is not None:
            self._end(block, error)

    def _take(self, block: _Block, frame: Frame) -> None:
        if block.take(frame):
            stats = EngineStats(*frame.fields["stats"])
            self._totals = self._totals.plus(replace(stats, seconds=stats.seconds / len(self._pool.sampling)))

    def _end(self, block: _Block, error: BaseException) -> None:
        for future in block.futures:
            if not future.done():
                future.set_exception(error)

    def _cancel(self, future: asyncio.Future[Completion]) -> None:
        for block in self._blocks.values():
            if future in block.futures:
                id_ = block.requests[block.futures.index(future)].id
                self._pool.tell(block.place, Frame("cancel", {"ids": [id_]}))
                return
