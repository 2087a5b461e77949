"""`EarlyReference`: log-probs under the frozen reference, computed while servers sample the rest of a batch.

    early = EarlyReference(compute)        # compute(rollouts): their log-probs under the reference
    early.start()                          # outside of spans: its work overlaps with the wait
    async with early.meanwhile():          # around a wait for rollouts
        ...                                # early.arrived(rollouts), for each group that is complete
    known = early.take(rollouts, oldest)   # the log-probs that are ready, by the rollout's id
    await early.close()

While servers sample, this process has nothing to compute. The groups that have arrived then go through the reference in
one forward pass, and the groups that arrive during that pass go through the next one. Outside of `meanwhile` no pass
starts, so no pass delays a step of the trainer. An engine in this process needs the same thread, so it gains nothing.

Invariant: the log-probs equal those of a pass over the whole batch, up to rounding.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from pvg.records import Float32, Rollout

Compute = Callable[[Sequence[Rollout]], Awaitable[list[Float32]]]


class EarlyReference:
    """Call all methods from the thread of one event loop."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._arrived: list[Rollout] = []
        self._known: dict[str, tuple[int, Float32]] = {}  # by the rollout's id: its version, its log-probs
        self._waiting = False
        self._wanted = asyncio.Event()  # there are rollouts to compute, and the trainer waits
        self._pass = asyncio.Lock()  # held during a forward pass
        self._worker: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._worker = asyncio.create_task(self._work(), name="early reference")

    async def close(self) -> None:
        """Wait for the running pass, and stop. Does nothing before `start`."""
        if self._worker is not None:
            worker, self._worker = self._worker, None
            async with self._pass:
                worker.cancel()
            await asyncio.wait([worker])

    def arrived(self, rollouts: Sequence[Rollout]) -> None:
        """Add a complete group, which waits for the rest of its batch."""
        self._arrived += rollouts
        if self._waiting:
            self._wanted.set()

    @asynccontextmanager
    async def meanwhile(self) -> AsyncIterator[None]:
        """While the block runs, compute the groups that have arrived and that arrive. The block ends after the last
        pass. Raises the exception of a pass that failed."""
        self._waiting = True
        if self._arrived:
            self._wanted.set()
        try:
            yield
        finally:
            self._waiting = False
            self._wanted.clear()
            async with self._pass:
                pass
        if self._worker is not None and self._worker.done():
            self._worker.result()

    def take(self, rollouts: Sequence[Rollout], oldest: int) -> dict[str, Float32]:
        """By id, the log-probs of those `rollouts` that were computed early. Forgets these, and all rollouts older than
        version `oldest`, because no step will train on them."""
        ids = {rollout.id for rollout in rollouts}
        found = {id_: logprobs for id_, (_, logprobs) in self._known.items() if id_ in ids}
        self._known = {id_: kept for id_, kept in self._known.items() if id_ not in ids and kept[0] >= oldest}
        self._arrived = [rollout for rollout in self._arrived if rollout.id not in ids and rollout.version >= oldest]
        return found

    async def _work(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if not (self._waiting and self._arrived):
                continue
            rollouts, self._arrived = self._arrived, []
            async with self._pass:
                found = await self._compute(rollouts)
            self._known |= {r.id: (r.version, logprobs) for r, logprobs in zip(rollouts, found, strict=True)}
