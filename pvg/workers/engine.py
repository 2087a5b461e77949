"""`WorkerEngine`: an `Engine` whose rows are sampled by the workers of a pool.

Requests that arrive together form a *block*, and each shard gets its groups of the block, whole. Its worker decodes
them in the order of their arrival, and never together with those of another shard. So the bits of a completion depend
on the block and on the number of shards alone. (With `rollout.prefetch`, blocks meet in a shard.)

A block ends with its last completion, even if its worker is lost before it can confirm the block. Otherwise the next
worker would sample it again, together with the block that comes next, and a batch of more rows rounds differently.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
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

CLOSED = ("The engine is closed.", "Open a new one to continue sampling.")


def shard_of(group: int, shards: int) -> int:
    """The shard of a group. Neighbouring groups often differ in role, so plain `group % shards` could give one shard
    all of a role, whose completions may be longer."""
    return (group + group // shards) % shards


@dataclass(eq=False)
class _Row:
    """A request and its caller's future. `block`: the one in which it was sent."""

    request: GenerationRequest
    future: asyncio.Future[Completion]
    block: _Block | None = None

    def end(self, found: Completion | BaseException) -> bool:
        """Whether it had not ended before."""
        if self.future.done():
            return False
        if isinstance(found, BaseException):
            self.future.set_exception(found)
        else:
            self.future.set_result(found)
        return True


@dataclass(eq=False)
class _Block:
    """Rows that one worker samples together. `answer`: the worker's confirmation, if it was asked for them. `cut`: ids
    of rows that its successor need not sample either."""

    shard: int
    rows: list[_Row] = field(default_factory=list)
    answer: asyncio.Future[Frame] | None = None
    cut: list[str] = field(default_factory=list)

    def end_if_done(self) -> None:
        """Ask for the answer no more once no row is left, so that no other worker gets the block."""
        if self.answer is not None and all(row.future.done() for row in self.rows):
            self.answer.cancel()

    def fail(self, error: BaseException) -> None:
        for row in self.rows:
            row.end(error)


class WorkerEngine(Engine):
    """The pool stays the caller's. Belongs to its event loop. `stats`: totals of all workers; `seconds` are those of
    one sampling worker on average."""

    version = requests_in_flight = 0
    max_in_flight = 10**9  # the workers queue what they cannot decode at once
    stats = EngineStats()

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._waiting = _Block(0)  # requests that have no shard yet
        self._sender: asyncio.Task[None] | None = None
        self._blocks: dict[_Block, asyncio.Task[None] | None] = {}  # those of a worker; None: not sent yet
        self._closed = False

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion. Cancelling the caller drops its row. Raises what the worker's engine raises."""
        if self._closed:
            raise StateError(*CLOSED)
        check_request(request)
        row = _Row(request, asyncio.get_running_loop().create_future())
        self._waiting.rows.append(row)
        self.requests_in_flight += 1
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        try:
            return await row.future
        except asyncio.CancelledError:
            if row.block is not None and row.block.answer is not None:
                self._tell_cut(row.block, [request.id])
                row.block.end_if_done()
            raise
        finally:
            self.requests_in_flight -= 1

    def cut(self, request_ids: Collection[str]) -> None:
        wanted = set(request_ids)
        for block in [self._waiting, *self._blocks]:
            rows = [row for row in block.rows if row.request.id in wanted and not row.future.done()]
            if rows and block.answer is not None:
                self._tell_cut(block, [row.request.id for row in rows])
            elif block.answer is None:
                for row in rows:
                    row.end(CutShort(row.request.resumed_from))

    def _tell_cut(self, block: _Block, ids: list[str]) -> None:
        block.cut += ids  # in the request for the block, which a successor of the worker gets
        self._pool.tell(block.shard, Frame("cut", {"ids": ids}))

    async def load_weights(self, update: WeightUpdate) -> SyncTiming:
        called = time.perf_counter()
        answers = await asyncio.shield(self._pool.load_policy(update))  # goes on if the caller is cancelled
        self.version = update.version
        rpc_ms = max(answer.fields["rpc_ms"] for answer in answers)
        return SyncTiming(update.version, wall_ms=(time.perf_counter() - called) * 1e3, rpc_ms=rpc_ms)

    async def close(self) -> None:
        self._closed = True
        for block in [*self._blocks, self._waiting]:
            block.fail(StateError(*CLOSED))
        if self._sender is not None:
            self._sender.cancel()

    # --- blocks -------------------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        """Send the waiting requests as soon as no more arrive: one block per turn of the event loop, which many workers
        would block otherwise."""
        while self._waiting.rows:
            await gather_requests(lambda: len(self._waiting.rows))
            waiting, self._waiting = self._waiting, _Block(0)
            shards, blocks = self._pool.sampling, dict[int, _Block]()
            for row in waiting.rows:
                shard = shards[shard_of(row.request.group, len(shards))]
                row.block = blocks.setdefault(shard, _Block(shard))
                row.block.rows.append(row)
            self._blocks.update(dict.fromkeys(blocks.values()))
            for block in blocks.values():
                self._blocks[block] = asyncio.create_task(self._sample(block))
                await asyncio.sleep(0)

    async def _sample(self, block: _Block) -> None:
        """Let a worker sample a block. `_take` gets the completions; errors belong to the callers."""
        block.rows = [row for row in block.rows if not row.future.done()]  # callers may have left
        asked = (row.request for row in block.rows)  # `on_tokens` stays here
        requests = [each if each.on_tokens is None else replace(each, on_tokens=None) for each in asked]
        try:
            if requests:
                frame = Frame("generate", {"requests": requests, "cut": block.cut})
                block.answer = self._pool.submit(block.shard, frame, partial(self._take, block))
                await block.answer
        except Exception as error:  # noqa: BLE001 - the callers raise it
            block.fail(error)
        finally:
            del self._blocks[block]

    def _take(self, block: _Block, frame: Frame) -> None:
        """Hand over finished completions, but no second time after a restart."""
        found = zip(frame.fields["rows"], frame.fields["found"], strict=True)
        new = [block.rows[row].end(one if isinstance(one, Completion) else CutShort(one)) for row, one in found]
        block.end_if_done()
        if any(new):
            stats = frame.fields["stats"]
            self.stats = self.stats.plus(replace(stats, seconds=stats.seconds / len(self._pool.sampling)))
