"""A workload for the tests of profiling: real torch in a thread, real Python on the loop, a tenth of a second each."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from pvg.bench.workloads import BenchMetric
from pvg.telemetry.spans import run_in, span


def spin_here(seconds: float) -> int:
    """The costliest function there is, in Python."""
    until, turns = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        turns += 1
    return turns


def multiply(size: int) -> torch.Tensor:
    matrix = torch.ones(size, size)
    for _ in range(3):
        matrix = matrix @ matrix / size
    return matrix


class ProfiledWork:
    measures: Mapping[str, BenchMetric] = {"turns": BenchMetric("1", "higher")}

    def __init__(self, *_: Any) -> None:
        self.sampled = 0
        self.closed = False

    async def open(self) -> None:
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="work")

    def work(self) -> Mapping[str, Any]:
        return {}

    async def sample(self, index: int) -> Mapping[str, float]:
        self.sampled += 1
        with span("spin"):
            turns = spin_here(0.1)
        with span("multiply"):
            await run_in(self.executor, multiply, 128)
        return {"turns": float(turns)}

    def derived(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        self.closed = True
        self.executor.shutdown()
