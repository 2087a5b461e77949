"""`loop`: the orchestrator under many rollouts with large payloads: how long does the event loop keep others waiting?

    pvg bench --profile loop
    pvg bench --profile loop --ablate

One sample: the dispatcher takes rollouts from an engine that serves recorded completions in chunks, several turns of a
conversation each, with the experts that a mixture-of-experts model would have chosen for every token (see
pvg.bench.workloads.loop_engine); they are graded, and the ledger commits them to a run directory. Beside it somebody
looks after the requests in flight, and a monitor ticks at 100 Hz; the lag of a tick is what any other work of the loop
would have waited.

Five switches have a naive side, as research code does it (pvg.bench.workloads.loop_sides): `workload.encoding = "json"`
makes one JSON text of all records on the loop instead of an Arrow shard, `workload.commit = "loop"` writes the shard on
the loop instead of in a thread, `workload.join = "quadratic"` copies a completion anew for every chunk and every turn,
`workload.fan_out = "always"` makes a task for each request in flight to find that there is nothing to do, and
`rollout.grading = "loop"`, which is the product's own switch, decodes and grades on the loop. The fast sides of `join`
and `fan_out` are the benchmark's own too: these two measure a pattern, not product code.

Where the product's own design stalls the loop is derived: `rollout_stall_ms` while rollouts arrive, `commit_stall_ms`
while they are committed; and `decode_ms` and `grade_ms` are the work for each single rollout that has arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pvg.bench.profile import BenchSettings, workload_settings
from pvg.bench.workload import Measure, Workload
from pvg.bench.workloads.data_store import check_free_space
from pvg.bench.workloads.fixtures import check_work, digest_of, fixed_orders, model_facts
from pvg.bench.workloads.loop_engine import RecordedEngine, Stretching, recorded
from pvg.bench.workloads.loop_sides import JOINS, Aged, OnTheLoop, write_json
from pvg.experiment import Experiment
from pvg.game.ledger import Ledger
from pvg.game.players import Players
from pvg.game.roles import prompt_renderer
from pvg.game.states import Phase
from pvg.records import BASE_SOURCE, Group, Problem, Rollout
from pvg.rollout.dispatcher import Dispatcher, GroupOrder
from pvg.rollout.engine import Sampling
from pvg.rollout.grading import grading_executor
from pvg.sections import Count, Positive, Section
from pvg.store.run_directory import RunDirectory
from pvg.tasks import open_task
from pvg.telemetry.loop_lag import LagWindow, LoopLagMonitor
from pvg.telemetry.spans import span

MB = 1e6
TIMED_ALONE = 16  # rollouts
BYTES_PER_TOKEN = {"arrow": 16, "json": 40}  # of what is written, rounded up: an id, a log-prob, a few characters
BYTES_PER_EXPERT = {"arrow": 1, "json": 6}

MEASURES: dict[str, Measure] = {
    "lag_p50_ms": Measure("ms", "lower", "how late the loop was for a tick of the monitor: median"),
    "lag_p99_ms": Measure("ms", "lower", "the same: 99th percentile"),
    "lag_max_ms": Measure("ms", "lower", "the same: the longest stall"),
    "rollouts_per_s": Measure("rollouts/s", "higher", "rollouts sampled, graded and committed per second"),
    "write_s": Measure("s", "lower", "encoding the rollouts' records and committing them"),
    "bytes_written_mb": Measure("MB", "lower", "the records on the disk"),
    "bytes_copied_mb": Measure("MB", "lower", "copied to join the chunks of the completions"),
}


class Settings(Section):
    """The `[workload]` table. A rollout has about `tokens` tokens in `turns`, `expert_layers` x `experts_per_token`
    expert numbers for each of them, and comes in chunks of `chunk`, within `seconds`. Those in flight are looked after
    `looks_hz` times a second."""

    rollouts: Count = 256
    tokens: Count = 16_384
    chunk: Count = 64
    seconds: Positive = 1.0
    encoding: Literal["arrow", "json"] = "arrow"
    commit: Literal["thread", "loop"] = "thread"
    join: Literal["once", "quadratic"] = "once"
    turns: Count = 4
    expert_layers: Annotated[int, Field(ge=0)] = 4
    experts_per_token: Annotated[int, Field(ge=0)] = 2
    fan_out: Literal["skip", "always"] = "skip"
    looks_hz: Annotated[float, Field(gt=0, le=1000)] = 20.0
    lag_hz: Annotated[float, Field(gt=0, le=1000)] = 100.0
    seed: int = 0


def make(settings: BenchSettings) -> Workload:
    """Raises ConfigurationError for rollouts that are no whole groups."""
    own, profile = workload_settings(Settings, settings), settings.profile
    check_work(settings.experiment, None, own.rollouts)
    return LoopWorkload(settings.experiment, own, profile.warmup + profile.repeats, settings.executor)


@dataclass(frozen=True, slots=True)
class Stalls:
    """The lags of one sample: over all of it, and over its two parts; None where no tick was due."""

    whole: LagWindow | None
    rollout: LagWindow | None
    commit: LagWindow | None


class LoopWorkload:
    """`samples`: how many will be taken; all that they write is kept until the workload is closed."""

    def __init__(
        self, experiment: Experiment, settings: Settings, samples: int, executor: Executor | None = None
    ) -> None:
        self._experiment = experiment
        self._executor = executor
        self._settings = settings
        self._samples = samples
        self._stalls: list[Stalls] = []
        self._tasks: list[int] = []  # made to look after requests, of each sample
        self._some: list[tuple[Problem, Rollout]] = []  # of the last sample
        self.measures: Mapping[str, Measure] = MEASURES

    async def open(self) -> None:
        """Record the completions with the experiment's own prover. Raises MissingRequirementError for a disk without
        room."""
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pvg-bench-loop-")))
            settings = self._settings
            experts = settings.expert_layers * settings.experts_per_token * BYTES_PER_EXPERT[settings.encoding]
            bytes_per_token = BYTES_PER_TOKEN[settings.encoding] + experts
            needed = self._samples * settings.rollouts * settings.tokens * bytes_per_token
            check_free_space(folder, needed, "Set workload.tokens lower, or TMPDIR to a folder of another disk.")
            self._grading = grading_executor(self._experiment.rollout)
            if self._grading is not None:
                stack.callback(self._grading.shutdown)
            await self._record()
            self._run = RunDirectory.create(folder, "loop", self._experiment)
            disk = OnTheLoop() if settings.commit == "loop" else None
            self._ledger = Ledger(self._run, self._experiment, "bench", disk)
            stack.callback(self._ledger.close)
            await self._ledger.commit(self._ledger.state.enter(Phase.MINT))
            # As the game does it (pvg.game.players): the collector would go through a million objects of torch again
            # and again, 0.2 s each time.
            gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)
            self._stack = stack.pop_all()

    async def _record(self) -> None:
        experiment, settings = self._experiment, self._settings
        task = open_task(experiment.task)
        players = Players(experiment, task, executor=self._executor)
        try:
            await players.ready()
            tokenizer = players.base.tokenizer
            render = prompt_renderer(experiment.rollout.prompts, tokenizer)
            self._orders = fixed_orders(experiment, task, render, settings.rollouts, settings.seed)
            groups = await _sample(players.dispatcher, self._orders, settings.seed)
            self._facts = model_facts(players.base)
        finally:
            await players.close()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        how = Stretching(
            settings.tokens, settings.seconds, settings.turns, settings.expert_layers, settings.experts_per_token
        )
        payloads = {rollout.id: recorded(rollout, i, how, tokenizer) for i, rollout in enumerate(rollouts)}
        self._tokens = sum(len(payload.token_ids) for payload in payloads.values())
        concurrency = experiment.rollout.concurrency
        self._engine = RecordedEngine(
            payloads, chunk=settings.chunk, join=JOINS[settings.join], max_in_flight=concurrency
        )
        self._task, self._tokenizer = task, tokenizer
        sampling = Sampling(settings.tokens, (tokenizer.eos_id,))
        self._dispatcher = Dispatcher(self._engine, task, tokenizer, sampling, concurrency, self._grading)

    def work(self) -> dict[str, Any]:
        settings = self._settings
        return {
            **self._facts,
            "task": self._experiment.task.kind,
            "rollouts": settings.rollouts,
            "groups": len(self._orders),
            "prompts": digest_of(order.prompt_ids for order in self._orders),
            "tokens_per_rollout": settings.tokens,
            "chunk": settings.chunk,
            "seconds": settings.seconds,
            "turns": settings.turns,
            "expert_bytes_per_token": settings.expert_layers * settings.experts_per_token,
            "seed": settings.seed,
        }

    async def sample(self, index: int) -> dict[str, float]:
        hz, copied = self._settings.lag_hz, self._engine.copied
        started = time.perf_counter()
        async with LoopLagMonitor(hz) as whole:
            with span("rollout"):
                async with LoopLagMonitor(hz) as sampling:
                    groups = await self._looked_after()
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            wrote = time.perf_counter()
            with span("checkpoint"):
                async with LoopLagMonitor(hz) as committing:
                    written = await self._commit(rollouts)
            write_s = time.perf_counter() - wrote
        wall_s = time.perf_counter() - started
        stalls = Stalls(whole.take(), sampling.take(), committing.take())
        self._stalls.append(stalls)
        self._some = [(group.problem, rollout) for group in groups for rollout in group.rollouts][:TIMED_ALONE]
        return {
            "lag_p50_ms": stalls.whole.p50_s * 1e3 if stalls.whole else 0.0,
            "lag_p99_ms": stalls.whole.p99_s * 1e3 if stalls.whole else 0.0,
            "lag_max_ms": _longest_ms(stalls.whole),
            "rollouts_per_s": len(rollouts) / wall_s,
            "write_s": write_s,
            "bytes_written_mb": written / MB,
            "bytes_copied_mb": (self._engine.copied - copied) / MB,
        }

    async def _looked_after(self) -> list[Group]:
        """One batch, while somebody looks after it."""
        settings = self._settings
        aged = Aged(self._engine, settings.looks_hz, always=settings.fan_out == "always")
        looking = asyncio.create_task(aged.look_after())
        try:
            groups = await _sample(self._dispatcher, self._orders, settings.seed)
        finally:
            looking.cancel()
            await asyncio.wait([looking])
        if not looking.cancelled():
            looking.result()
        self._tasks.append(aged.tasks)
        return groups

    async def _commit(self, rollouts: Sequence[Rollout]) -> int:
        """What a run does at a commit point, as a run does it. Returns the bytes of the records."""
        ledger = self._ledger
        state = replace(ledger.state, step=ledger.state.step + 1)
        if self._settings.encoding == "json":
            path = self._run.path / f"rollouts-{state.step:05d}.json"
            write_json(path, rollouts)
            await ledger.commit(state)
            return path.stat().st_size
        ledger.keep(rollouts)
        await ledger.commit(state)
        return int(ledger.state.shards[-1]["bytes"])

    def derived(self) -> dict[str, float]:
        """Medians over the samples: the longest stall while rollouts arrive (several are joined, decoded and graded at
        one go), and that of the commit. Medians over some rollouts, timed alone: decoding its tokens and grading
        its text. And the tasks that were made in vain, and the mean tokens of a rollout."""
        decode_s, grade_s = [], []
        for problem, rollout in self._some:
            started = time.perf_counter()
            text = self._tokenizer.decode(rollout.completion_ids)
            decoded = time.perf_counter()
            self._task.grade(problem, text)
            decode_s.append(decoded - started)
            grade_s.append(time.perf_counter() - decoded)
        return {
            "decode_ms": statistics.median(decode_s) * 1e3,
            "grade_ms": statistics.median(grade_s) * 1e3,
            "rollout_stall_ms": statistics.median(_longest_ms(stalls.rollout) for stalls in self._stalls),
            "commit_stall_ms": statistics.median(_longest_ms(stalls.commit) for stalls in self._stalls),
            "fan_out_tasks": statistics.median(self._tasks),
            "mean_tokens": self._tokens / self._settings.rollouts,
        }

    async def close(self) -> None:
        self._stack.close()


async def _sample(dispatcher: Dispatcher, orders: Sequence[GroupOrder], seed: int) -> list[Group]:
    """The same request ids every time: what was recorded under one is served under it."""
    return await dispatcher.sample(orders, round_=0, source=BASE_SOURCE, step=0, seed=seed, prefix="bench")


def _longest_ms(window: LagWindow | None) -> float:
    return window.max_s * 1e3 if window is not None else 0.0
