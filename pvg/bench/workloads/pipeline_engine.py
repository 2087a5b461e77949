"""`ChildEngine`: an `Engine` whose requests are served by a process of its own (pvg.bench.workloads.pipeline_child).

What it says is real (completions that were sampled with the base prover), what it takes is not: see the child.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from pvg.bench.workloads.pipeline_child import LONGEST_LINE
from pvg.errors import StateError
from pvg.records import Rollout, Timing, VersionSpan
from pvg.rollout.engine import Completion, Engine, EngineStats, GenerationRequest
from pvg.weights import SyncTiming, WeightUpdate


class ChildEngine(Engine):
    """`start` comes first. `batches`: how many it has completions for; what is asked of later ones begins again."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._version = 0
        self._stats = EngineStats()
        self._batches = 1
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._loaded: asyncio.Future[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self._version

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def remote(self) -> bool:
        return True

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    async def start(self, rollouts: Iterable[Rollout], batches: int) -> None:
        """Start the process and give it what it will say. Ids of `rollouts` end in batch/group/index."""
        self._batches = batches
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pvg.bench.workloads.pipeline_child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_LINE,
        )
        assert self._process.stdout is not None
        self._reading = asyncio.create_task(self._read(self._process.stdout))
        known = {self._key(r.id): (r.completion_ids.tolist(), r.logprobs.tolist(), r.finish_reason) for r in rollouts}
        self._say({"completions": known})
        assert self._process.stdin is not None
        await self._process.stdin.drain()

    def pace(self, median_s: float, sigma: float, longest: int, draw: int = 0) -> None:
        """How long requests take from here on: `median_s` in the median, each as `draw` and its place say."""
        self._say({"pace": median_s, "sigma": sigma, "longest": longest, "draw": draw})

    async def generate(self, request: GenerationRequest) -> Completion:
        """Raises StateError when the process has ended."""
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        sent = time.perf_counter()
        self._say({"ask": self._key(request.id), "id": request.id})
        try:
            answer = await future
        except asyncio.CancelledError:
            self._say({"cancel": request.id})
            raise
        finally:
            del self._waiting[request.id]
        tokens = np.array(answer["tokens"], dtype=np.int32)
        self._stats = replace(self._stats, tokens=self._stats.tokens + len(tokens), rows=self._stats.rows + 1)
        return Completion(
            request_id=request.id,
            token_ids=tokens,
            logprobs=np.array(answer["logprobs"], dtype=np.float32),
            spans=tuple(VersionSpan(start, version) for start, version in answer["spans"]),
            finish_reason=answer["finish"],
            timing=Timing(max(0.0, time.perf_counter() - sent - answer["service_s"]), answer["service_s"]),
        )

    async def load_weights(self, update: WeightUpdate) -> SyncTiming:
        """The version alone travels: what an update of the weights takes is the `sync` profile's subject."""
        began = time.perf_counter()
        self._loaded = asyncio.get_running_loop().create_future()
        self._say({"version": update.version})
        await self._loaded
        self._version = update.version
        wall_ms = (time.perf_counter() - began) * 1e3
        return SyncTiming(update.version, wall_ms=wall_ms, rpc_ms=wall_ms)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if self._reading is not None:
            await self._reading

    async def _read(self, said: asyncio.StreamReader) -> None:
        while line := await said.readline():
            answer = orjson.loads(line)
            if "version" in answer:
                if self._loaded is not None and not self._loaded.done():
                    self._loaded.set_result(None)
            elif (future := self._waiting.get(answer["id"])) is not None and not future.done():
                future.set_result(answer)
        gone = StateError("The engine's process has ended.", "Look at what it said on standard error.")
        left: list[asyncio.Future[Any]] = [*self._waiting.values()]
        if self._loaded is not None:
            left.append(self._loaded)
        for waiting in left:
            if not waiting.done():
                waiting.set_exception(gone)
                waiting.exception()  # seen: there may be nobody left to tell

    def _key(self, request_id: str) -> str:
        _, batch, group, index = request_id.rsplit("/", 3)
        return f"{int(batch) % self._batches:05d}/{group}/{index}"

    def _say(self, message: dict[str, Any]) -> None:
        if self._process is None or self._process.stdin is None or self._process.stdin.is_closing():
            raise StateError("The engine's process has ended.", "Look at what it said on standard error.")
        self._process.stdin.write(orjson.dumps(message) + b"\n")
