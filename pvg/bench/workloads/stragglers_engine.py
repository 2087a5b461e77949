"""`HeavyTailedEngine`: completions whose lengths have a heavy tail, as long answers and tools that hang make them.

It computes nothing and waits for as long as a server would sample, in a shorter time: what is measured is who waits for
whom. The same rollout of the same batch takes equally long in every variant.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np
from numpy.typing import NDArray

from pvg.bench.workloads.stand_in import StandInEngine
from pvg.rollout.engine import Completion, GenerationRequest


def drawn_lengths(count: int, median: float, sigma: float, longest: int, seed: int) -> NDArray[np.int64]:
    """Tokens [N] of `count` completions: log-normal, `sigma` the deviation of the logarithm, 1 to `longest`."""
    logs_N = np.random.default_rng(seed).normal(np.log(median), sigma, count)
    lengths_N: NDArray[np.int64] = np.clip(np.rint(np.exp(logs_N)), 1, longest).astype(np.int64)
    return lengths_N


class HeavyTailedEngine(StandInEngine):
    """Each request gets `tokens_per_s`, however many there are. `lengths_N` are the tokens of the current batch's
    rollouts, in the order of its groups; `group_size` tells which is which."""

    def __init__(self, tokens_per_s: float, group_size: int, max_in_flight: int) -> None:
        super().__init__(max_in_flight)
        self.lengths_N: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._tokens_per_s = tokens_per_s
        self._group_size = group_size

    async def generate(self, request: GenerationRequest) -> Completion:
        _, group, index = request.id.rsplit("/", 2)
        length = int(self.lengths_N[int(group) * self._group_size + int(index)])
        started = time.perf_counter()
        try:
            await asyncio.sleep(length / self._tokens_per_s)
        except asyncio.CancelledError:
            if request.on_tokens is not None:
                request.on_tokens(min(length, int((time.perf_counter() - started) * self._tokens_per_s)))
            raise
        token_ids = np.full(length, int(request.prompt_ids[-1]), dtype=np.int32)
        logprobs = np.full(length, -1.0, dtype=np.float32)
        return self.completed(request, token_ids, logprobs, "length", started)
