"""What the driver computes for each rollout, and how late its event loop is, by the number of workers.

    pvg bench --profile benchmarks/fleet.toml

The driver's side is pvg's own: a dispatcher, which grades, `WorkerEngine` and `WorkerPool`, with their probes. The
workers are stubs (benchmarks.fleet_workers) in PROCESSES processes. They connect over TCP on 127.0.0.1, speak the
protocol of real workers, and compute nothing.

A sample is one step's share of this work: new weights for every worker, then `rollouts` rollouts per worker, which
arrive within about `seconds`. So more workers have proportionally more rollouts, and what should not grow is the
driver's time per rollout. `driver_us` is processor time of the driver's process, all threads included.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from pvg.bench.profile import BenchSettings, workload_settings
from pvg.bench.workloads import BenchMetric, Workload
from pvg.bench.workloads.fixtures import fixed_orders
from pvg.config.base import Count, Positive, Section
from pvg.config.experiment import Experiment
from pvg.config.prompts import TagPrompts
from pvg.errors import ConfigurationError
from pvg.game.roles import prompt_renderer
from pvg.models.characters import modchain_tokenizer
from pvg.models.tokenizer import Tokenizer
from pvg.rollout.dispatcher import Dispatcher
from pvg.rollout.engine import Sampling
from pvg.seeds import seed_for
from pvg.servers.publishing import WeightUpdate
from pvg.tasks import open_task
from pvg.tasks.modchain import clean_trace
from pvg.telemetry.events import Events, SilentEvents
from pvg.telemetry.spans import span
from pvg.telemetry.waits import CalmCollector, LoopLagMonitor
from pvg.workers.engine import WorkerEngine
from pvg.workers.links import SECRET_BYTES, admitted
from pvg.workers.local import Member
from pvg.workers.pool import WorkerPool, allow_open_files
from pvg.workers.shared import SharedTensors

PROCESSES = 4
LAG_HZ = 100.0
CONNECT_S = 60.0
ROOT = Path(__file__).parent.parent
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

MEASURES: Mapping[str, BenchMetric] = {
    "driver_us": BenchMetric("us", "lower", "processor time of the driver per rollout"),
    "lag_p99_ms": BenchMetric("ms", "lower", "lag of the driver's event loop: 99th percentile"),
    "lag_max_ms": BenchMetric("ms", "lower", "the same: largest"),
    "rollouts_per_s": BenchMetric("rollouts/s", "higher", "rollouts per second of the sample"),
    "update_ms": BenchMetric("ms", "lower", "from new weights to the confirmation of the last worker"),
}


class FleetSettings(Section):
    """The `[workload]` table. `rollouts`: of each worker in a sample. `seconds`: in which a worker completes them."""

    workers: Count = Field(100, le=10_000)
    rollouts: Count = 32
    seconds: Positive = 10.0


def make(settings: BenchSettings) -> Workload:
    """Raises ConfigurationError for a task other than modchain, and for rollouts that are not whole groups."""
    own, experiment = workload_settings(FleetSettings, settings), settings.experiment
    if experiment.task.kind != "modchain":
        raise ConfigurationError(
            f"The fleet workload knows only modchain's alphabet, not that of task.kind = {experiment.task.kind!r}.",
            "Use an experiment whose task.kind is 'modchain'.",
        )
    if own.rollouts % experiment.rollout.group_size:
        raise ConfigurationError(
            f"workload.rollouts = {own.rollouts} is not a multiple of rollout.group_size = "
            f"{experiment.rollout.group_size}.",
            "Set workload.rollouts to a multiple of it.",
        )
    return DriverOfMany(experiment, own)


class StubMember(Member):
    """A stub worker, which shares its process with others."""

    def kill(self) -> None:
        """Close the connection."""
        self.writer.transport.abort()


class StubSupply:
    """Starts stub workers. `open` comes first."""

    def __init__(self, seconds: float, token_ids: list[int]) -> None:
        self.events: Events = SilentEvents()
        self._arguments = (str(seconds), ",".join(map(str, token_ids)))
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._expected: dict[int, asyncio.Future[Streams]] = {}
        self._processes: list[Process] = []

    async def open(self, workers: int) -> None:
        self._server = await asyncio.start_server(self._greet, "127.0.0.1", 0, limit=1 << 20, backlog=workers)
        address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        for _ in range(PROCESSES):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.fleet_workers", address, *self._arguments), stdin=PIPE, cwd=ROOT
            )
            self._processes.append(process)
            self._tell(process, self._secret.hex())

    async def ready(self) -> None:
        """Does nothing: `open` has started what it needs."""

    async def start(self) -> Member:
        key = secrets.randbits(64)
        expected = self._expected[key] = asyncio.get_running_loop().create_future()
        process = self._processes[len(self._expected) % PROCESSES]
        self._tell(process, str(key))
        return StubMember(process.pid, *await asyncio.wait_for(expected, CONNECT_S))

    def _tell(self, process: Process, line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(f"{line}\n".encode())

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._expected[await admitted(reader, writer, self._secret)].set_result((reader, writer))

    async def reason(self, member: Member) -> str:
        return f"its connection to process {member.pid} broke"

    async def retire(self, member: Member) -> None:
        member.writer.close()

    def check(self) -> None:
        """Does nothing: the processes are this benchmark's own."""

    async def share(self, shared: SharedTensors) -> None:
        """Does nothing: stubs read no weights."""

    def withdraw(self, shared: SharedTensors) -> None:
        """Does nothing, as `share`."""

    async def close(self) -> None:
        self._server.close()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        await asyncio.gather(*(process.wait() for process in self._processes))

    def end(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


class DriverOfMany:
    """See the module."""

    measures: Mapping[str, BenchMetric] = MEASURES

    def __init__(self, experiment: Experiment, own: FleetSettings) -> None:
        self._experiment, self._own = experiment, own
        self._rollouts = own.workers * own.rollouts

    async def open(self) -> None:
        """Raises MissingRequirementError if the system does not allow so many open files."""
        experiment, own = self._experiment, self._own
        allow_open_files(own.workers)  # before the processes start, which inherit the limit
        async with AsyncExitStack() as stack:
            task, tokenizer = open_task(experiment.task), Tokenizer(modchain_tokenizer())
            render = prompt_renderer(TagPrompts(), tokenizer)
            self._orders = fixed_orders(experiment, task, render, self._rollouts, 0)
            solution = [*tokenizer.encode(clean_trace(self._orders[0].problem)).tolist(), tokenizer.eos_id]
            supply = StubSupply(own.seconds, solution)
            stack.callback(supply.end)
            await supply.open(own.workers)
            pool = WorkerPool(experiment, own.workers, supply)
            stack.push_async_callback(pool.close)
            await pool.start()
            self._engine = WorkerEngine(pool)
            stack.push_async_callback(self._engine.close)
            grading = stack.enter_context(ThreadPoolExecutor(1, "pvg-grade"))
            sampling = Sampling(len(solution), (tokenizer.eos_id,))
            self._dispatcher = Dispatcher(self._engine, task, tokenizer, sampling, self._engine.max_in_flight, grading)
            self._weights = {"weight": torch.zeros(1024)}
            stack.callback(CalmCollector().close)  # as in the game (pvg.game.players)
            self._stack = stack.pop_all()

    def work(self) -> dict[str, Any]:
        return {**self._own.model_dump(mode="json"), "group_size": self._experiment.rollout.group_size}

    async def sample(self, index: int) -> dict[str, float]:
        began, worked = time.perf_counter(), time.process_time()
        async with LoopLagMonitor(LAG_HZ) as monitor:
            with span("sync"):
                await self._engine.load_weights(WeightUpdate(index + 1, self._weights))
            update_s = time.perf_counter() - began
            with span("rollout"):
                groups = await self._dispatcher.sample(
                    self._orders, round_=0, source="bench", step=index, seed=seed_for(0, "bench", index), prefix="f"
                )
        seconds, worked = time.perf_counter() - began, time.process_time() - worked
        assert sum(len(group.rollouts) for group in groups) == self._rollouts
        lags = monitor.take()
        return {
            "driver_us": worked / self._rollouts * 1e6,
            "lag_p99_ms": lags.p99_s * 1e3 if lags else 0.0,
            "lag_max_ms": lags.max_s * 1e3 if lags else 0.0,
            "rollouts_per_s": self._rollouts / seconds,
            "update_ms": update_s * 1e3,
        }

    def derived(self) -> dict[str, float]:
        """Rollouts of a sample in all."""
        return {"rollouts": float(self._rollouts)}

    async def close(self) -> None:
        await self._stack.aclose()
