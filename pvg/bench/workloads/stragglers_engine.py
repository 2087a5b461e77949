"""`HeavyTailedEngine`: completions whose lengths have a heavy tail, as long answers and tools that hang make them.

It computes nothing and waits for as long as a server would sample, in a shorter time: what is measured is who waits for
whom. The same rollout of the same group takes equally long in every variant; one that is continued takes the time that
its remaining tokens take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from pvg.bench.workloads.stand_in import StandInEngine
from pvg.rollout.engine import Begun, Completion, CutShort, GenerationRequest


def drawn_lengths(count: int, median: float, sigma: float, longest: int, seed: int) -> NDArray[np.int64]:
    """Tokens [N] of `count` completions: log-normal, `sigma` the deviation of the logarithm, 1 to `longest`."""
    logs_N = np.random.default_rng(seed).normal(np.log(median), sigma, count)
    lengths_N: NDArray[np.int64] = np.clip(np.rint(np.exp(logs_N)), 1, longest).astype(np.int64)
    return lengths_N


class HeavyTailedEngine(StandInEngine):
    """Each request gets `tokens_per_s`, however many there are. `lengths_N` are the tokens of the rollouts in the order
    of their groups' numbers, `group_size` for each, and then from the beginning again; between requests, they may be
    replaced by a longer sequence with the same beginning."""

    def __init__(self, lengths_N: NDArray[np.int64], tokens_per_s: float, group_size: int, max_in_flight: int) -> None:
        super().__init__(max_in_flight)
        self.lengths_N = lengths_N
        self._tokens_per_s = tokens_per_s
        self._group_size = group_size
        self._running: dict[str, asyncio.Future[bool]] = {}  # whether it has ended by itself

    async def generate(self, request: GenerationRequest) -> Completion:
        loop, length = asyncio.get_running_loop(), self._length(request)
        started = loop.time()
        end = self._running[request.id] = loop.create_future()
        timer = loop.call_later((length - request.tokens_begun) / self._tokens_per_s, _resolve, end, True)
        try:
            whole = await end
        except asyncio.CancelledError:
            if request.on_tokens is not None:
                request.on_tokens(self._tokens(request, loop.time() - started))
            raise
        finally:
            timer.cancel()
            del self._running[request.id]
        seconds = loop.time() - started
        tokens = length if whole else self._tokens(request, seconds)
        ids, logprobs = np.full(tokens, int(request.prompt_ids[-1]), np.int32), np.full(tokens, -1.0, np.float32)
        if whole:
            return self.completed(request, ids, logprobs, "length", seconds)
        self.count(request, tokens, seconds)
        spans, timing = request.spans(tokens, self.version), request.timing(0.0, seconds)
        raise CutShort(Begun(ids, logprobs, spans, timing) if tokens else None)

    def cut(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            if end := self._running.get(request_id):
                _resolve(end, False)

    def _length(self, request: GenerationRequest) -> int:
        _, group, index = request.id.rsplit("/", 2)
        return int(self.lengths_N[(int(group) * self._group_size + int(index)) % len(self.lengths_N)])

    def _tokens(self, request: GenerationRequest, seconds: float) -> int:
        """Of its completion after so long; the last one would be its end."""
        return min(self._length(request) - 1, request.tokens_begun + int(seconds * self._tokens_per_s))


def _resolve(end: asyncio.Future[bool], whole: bool) -> None:
    if not end.done():
        end.set_result(whole)
