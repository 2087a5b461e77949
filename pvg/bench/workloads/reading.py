"""A reader's beliefs after each prefix of traces (pvg.traces): what CIR costs.

Each sample computes P(answer) after every token of `traces` sums modulo 10 with `terms` numbers. With `shared` it
computes what the prefixes of a trace have in common once, in about one forward pass; without it each prefix is a row.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from pvg.bench.workloads import BenchMetric, BenchSettings, Workload, workload_settings
from pvg.config.base import Count, Section
from pvg.records import Int32
from pvg.seeds import generator_for
from pvg.tasks.modchain import chain_problem, clean_trace
from pvg.traces.loaders import parts_of
from pvg.traces.readers import local_reader


class ReadingWorkSettings(Section):
    """The `[workload]` table. `seed` draws the numbers."""

    traces: Count = 4
    terms: Count = 20
    shared: bool = True
    seed: int = 0


def make(settings: BenchSettings) -> Workload:
    return ReadingWork(settings.experiment.models.prover.source, workload_settings(ReadingWorkSettings, settings))


class ReadingWork:
    measures: Mapping[str, BenchMetric] = {
        "prefixes_per_s": BenchMetric("1/s", "higher")  # prefixes after which P(answer) is known
    }

    def __init__(self, source: str, workload: ReadingWorkSettings) -> None:
        self._source, self._workload, self._stack = source, workload, AsyncExitStack()
        self._rows: list[tuple[list[Int32], Any]] = []  # of each trace: token ids of all prefixes, where answers start

    async def open(self) -> None:
        self._reader = await self._stack.enter_async_context(local_reader(self._source))
        rng, terms = generator_for(self._workload.seed, "bench", "reading"), self._workload.terms
        for _ in range(self._workload.traces):
            problem = chain_problem(tuple(rng.integers(10, size=terms).tolist()), 10)
            parts = parts_of(clean_trace(problem))
            assert parts is not None, "a chain states its answer"
            units = self._reader.units(parts.reasoning)
            prefixes = [units[:end] for end in range(len(units) + 1)]
            self._rows.append(self._reader.rows((("user", problem.question),), prefixes, parts))

    def work(self) -> dict[str, Any]:
        tokens = sum(len(row) for rows, _ in self._rows for row in rows)
        return {**self._workload.model_dump(exclude={"shared"}), "model": self._reader.name, "tokens": tokens}

    async def sample(self, index: int) -> dict[str, float]:
        began, read = time.perf_counter(), partial(self._reader.logprobs, shared=self._workload.shared)
        for each in self._rows:
            await asyncio.get_running_loop().run_in_executor(self._reader.executor, read, *each)
        return {"prefixes_per_s": sum(len(rows) for rows, _ in self._rows) / (time.perf_counter() - began)}

    def derived(self) -> dict[str, float]:
        return {"prefixes_per_trace": sum(len(rows) for rows, _ in self._rows) / len(self._rows)}

    async def close(self) -> None:
        await self._stack.aclose()
