"""The cost of measuring: the telemetry of one step of the game, relative to the step.

    pvg bench --profile benchmarks/telemetry.toml             # the share, and the whole step with spans
    pvg bench --profile benchmarks/telemetry.toml --ablate    # whole steps without spans, and with them

A sample plays one real step with the game's session, spans and records, as `pvg train` does. Then it repeats the
telemetry of exactly that step without the work: the same spans (those beside the driver in a separate task), closing
the budget, and writing the records and event lines to files. `overhead` is the second time divided by the first. Two
whole steps differ by more than the cost of telemetry, so comparing them (the ladder) cannot show such a small share.

`open` measures what runs beside the steps (device sampler, lag monitor): `monitoring_cpu` is its share of one core.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path

from pvg.bench.profile import BenchSettings, workload_settings
from pvg.bench.workloads import BenchMetric, Workload, e2e
from pvg.config.experiment import Experiment
from pvg.game.ledger import Ledger
from pvg.telemetry.events import EventLog
from pvg.telemetry.monitoring import Monitoring
from pvg.telemetry.spans import SHORTEST_SPAN_S, Span, Tracer, span

REPLAYS = 20  # repetitions of a step's telemetry per sample; the median counts


class TelemetrySettings(e2e.EndToEndSettings):
    """The `[workload]` table. `tracing`: whether the step runs under a tracer. `monitored_s`: seconds for which the
    monitoring is measured, 0 for not at all."""

    tracing: bool = True
    monitored_s: float = 3.0


def make(settings: BenchSettings) -> Workload:
    e2e_settings = workload_settings(TelemetrySettings, settings)
    return TelemetryCost(settings.experiment, e2e_settings, settings.executor)


class TelemetryCost(e2e.EndToEnd):
    measures: Mapping[str, BenchMetric] = {
        "step_s": BenchMetric("s", "lower", "wall time of one optimizer step, its telemetry included"),
        "telemetry_s": BenchMetric("s", "lower", "the telemetry of that step alone"),
        "overhead": BenchMetric("1", "lower", "telemetry_s / step_s"),
    }

    def __init__(self, experiment: Experiment, workload: TelemetrySettings, executor: Executor | None = None) -> None:
        super().__init__(experiment, workload, executor)
        self._telemetry = workload
        self._spans: list[Span] = []
        self._monitoring_cpu = 0.0

    async def open(self) -> None:
        await super().open()
        if self._telemetry.monitored_s > 0:
            self._monitoring_cpu = await self._watch_monitoring(self._telemetry.monitored_s)

    async def sample(self, index: int) -> dict[str, float]:
        session = self._session
        session.tracer = tracer = KeepingTracer()
        watcher = e2e.StepWatcher()
        session.observer = watcher
        with span("reset"):
            phase = await self._fresh_phase()
        with span("step"):  # its parts go to the session's tracer
            if self._telemetry.tracing:
                with tracer.drive():
                    await phase.play()
            else:  # in a separate context, otherwise the spans would go to the tracer of the benchmark
                await asyncio.create_task(phase.play(), context=contextvars.Context())
        step_s = (time.perf_counter() - session.began) / self._workload.steps
        self._steps = watcher.steps
        self._spans = tracer.kept
        with span("replay"):
            telemetry_s = await self._replay() / self._workload.steps
        return {"step_s": step_s, "telemetry_s": telemetry_s, "overhead": telemetry_s / step_s}

    def derived(self) -> dict[str, float]:
        return {
            **super().derived(),
            "spans_per_step": len(self._spans) / self._workload.steps,
            "monitoring_cpu": self._monitoring_cpu,
        }

    async def _replay(self) -> float:
        """Seconds for the telemetry of the sample's steps: the median of the repetitions."""
        log = self._session.ledger.log
        own = [s for s in self._spans if s.track == "driver"]
        others = [s for s in self._spans if s.track != "driver"]
        seconds = []
        for _ in range(REPLAYS):
            tracer = Tracer()
            with tracer.drive():
                started = time.perf_counter()
                with span("rollout"):
                    await asyncio.create_task(_open_all(others))
                await _open_all(own)
                self._tell(tracer, log, self._session.ledger)
                seconds.append(time.perf_counter() - started)
        return sorted(seconds)[REPLAYS // 2]

    def _tell(self, tracer: Tracer, log: EventLog, ledger: Ledger) -> None:
        """What a session does at the end of a step, and the lines that engine, publisher and session log in a step."""
        budget = tracer.close_step()
        metrics = self._steps[-1] if self._steps else {}
        place = {"round": 0, "phase": "train_prover", "step": 1}
        ledger.record("step", **place, of=1, metrics=dict(metrics), budget=budget.exposed, busy=budget.busy)
        tracer.take_spans()
        ledger.record_spans([s for s in self._spans if s.end_s - s.start_s >= SHORTEST_SPAN_S], **place)
        for tag in ("gen", "gen", "rollout", "weights", "weights", "weights", "weights", "weights", "step"):
            log.event(tag, event="replayed", trace="0123456789abcdef", version=1, wall_ms=1.0, rpc_ms=1.0, queue_ms=1.0)

    async def _watch_monitoring(self, seconds: float) -> float:
        """The share of one core that sampler and lag monitor use while nothing else runs."""
        idle_s = await _cpu_while_sleeping(seconds)
        folder: Path = self._session.ledger.directory.path
        async with Monitoring(
            self._experiment.telemetry,
            record=self._session.ledger.record,
            log=self._session.ledger.log.line,
            notice=lambda message: None,
            announce=lambda alert: None,
            alert=lambda alert: None,
            run_directory=folder,
            name="telemetry",
            config={},
        ):
            watched_s = await _cpu_while_sleeping(seconds)
        return max(0.0, watched_s - idle_s) / seconds


class KeepingTracer(Tracer):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Span] = []

    def take_spans(self) -> list[Span]:
        spans = super().take_spans()
        self.kept += spans
        return spans


async def _open_all(spans: Sequence[Span]) -> None:
    for each in spans:
        with span(each.name):
            pass


async def _cpu_while_sleeping(seconds: float) -> float:
    started = time.process_time()
    await asyncio.sleep(seconds)
    return time.process_time() - started
