"""One side of a comparison: a worker in a separate process, as a benchmark workload that can take turns with another.

Each side has its own environment and the same number of threads. While the other side is measured, it waits for its
next order (protocol.py). The worker measures its own times, so they do not include the sending of orders.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from protocol import SAMPLE, STOP

from pvg.bench.workloads import BenchMetric
from pvg.errors import EXIT_ENVIRONMENT, PvgError
from pvg.telemetry.spans import span

LOG_LINES = 5  # shown of a worker's log if it fails
CLOSE_S = 30.0  # for a worker to end after the order to stop


class SideFailedError(PvgError):
    """A worker ended before the order to stop. The message contains the last lines of its log."""

    exit_code = EXIT_ENVIRONMENT


class Side:
    """See the module. `command` is the worker's, `log` where its stderr goes, `shared` the work of both sides."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        measures: Mapping[str, BenchMetric],
        shared: Mapping[str, Any],
    ) -> None:
        self.measures = measures
        self.facts: dict[str, Any] = {}  # the worker's first answer
        self._name, self._command, self._environment = name, command, environment
        self._log, self._shared = log, shared
        self._told: dict[str, list[float]] = {}  # other numbers in its answers

    async def open(self) -> None:
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=dict(self._environment),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        try:
            self.facts = await self._answer()
        except PvgError:
            await self.close()
            raise

    def work(self) -> Mapping[str, Any]:
        return self._shared

    async def sample(self, index: int) -> Mapping[str, float]:
        with span("worker"):
            await self._send(SAMPLE)
            answer = await self._answer()
        for name in answer.keys() - self.measures.keys():
            self._told.setdefault(name, []).append(answer[name])
        return {name: answer[name] for name in self.measures}

    def derived(self) -> Mapping[str, float]:
        """The worker's counts, and the medians over all samples of the other numbers in its answers."""
        counts = {name: float(value) for name, value in self.facts.items() if isinstance(value, int | float)}
        return counts | {name: median(values) for name, values in sorted(self._told.items())}

    async def close(self) -> None:
        if self._process.returncode is None:
            await self._send(STOP)
            try:
                await asyncio.wait_for(self._process.wait(), CLOSE_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    async def _send(self, order: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(order.encode() + b"\n")
            await self._process.stdin.drain()
        except ConnectionError:
            pass  # it has ended: `_answer` raises with its log

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            code = await self._process.wait()
            said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
            raise SideFailedError(f"The worker of {self._name} ended with code {code}: {' / '.join(said)}")
        answer: dict[str, Any] = json.loads(line)
        return answer
