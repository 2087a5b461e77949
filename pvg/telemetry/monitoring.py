"""Runs everything that watches a run: device sampler, loop-lag monitor, heartbeat, sinks, metrics endpoint.

Invariants: all callbacks except `announce` run in the event loop's thread, and none runs after the block has ended. All
threads and tasks stop with the block. Nothing here changes what a run computes. Only errors of `record` or `announce`,
such as a full disk, are raised: at the next step, or at the end of the block.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pvg.config.operation import Telemetry
from pvg.telemetry.alerts import Alert
from pvg.telemetry.device import DeviceSampler
from pvg.telemetry.sinks import (
    AlertCommand,
    AlertPoint,
    ExamplesPoint,
    MetricPoint,
    MetricSink,
    SinkBoard,
    SinkContext,
    open_sinks,
)
from pvg.telemetry.waits import (
    LAG_LIMITS,
    CoreTime,
    CoreWaits,
    Heartbeat,
    LagWindow,
    LoopLagMonitor,
    crowding,
    warnings,
)

if TYPE_CHECKING:
    from pvg.telemetry.prometheus import MetricsEndpoint


CROWDED_SAMPLES = 3  # in a row before the notice: a few seconds of another program do not matter


class Monitoring:
    """Watches one process of a run.

    `record(kind, **fields)` appends to metrics.jsonl, `notice` takes a sentence for the user. `announce` shows an alert
    that begins to hold, from any thread; `alert` records it, on the loop. `first_step`: the steps of earlier processes
    of the run. `load()`: the metrics of the worker processes since its last call. `workers_here`: on this machine.
    """

    device_every_s = 5.0  # between two samples of GPU, CPU and memory, and two windows of the lag
    lag_hz = 10.0  # measurements of the event loop's lag per second
    command_s = 10.0  # timeout of the alert command
    lag_limits = LAG_LIMITS

    def __init__(
        self,
        section: Telemetry,
        *,
        record: Callable[..., None],
        notice: Callable[[str], None],
        announce: Callable[[Alert], None],
        alert: Callable[[Alert], None],
        run_directory: Path,
        name: str,
        config: Mapping[str, Any],
        first_step: int = 0,
        load: Callable[[], dict[str, float]] | None = None,
        workers_here: bool = True,
    ) -> None:
        self._section = section
        self._record, self._notice = record, notice
        self._announce, self._alert = announce, alert
        self._name = name
        self._opening = SinkContext(run_directory, name, config, first_step > 0, notice)
        self._place = (0, "init")  # round and phase of the newest step
        self._steps = first_step
        self._load = load
        self._workers_here = workers_here
        self.workers: Mapping[str, float] = {}  # the newest metrics of the worker processes
        self._stepped = time.monotonic()  # when the newest step ended
        self._of_steps: Collection[str] = ()  # names of the newest step's metrics
        self._held: set[str] = set()  # the alerts that hold
        self._holding = threading.Lock()  # protects `_held`, which the heartbeat changes too
        self._failure: Exception | None = None
        self._open = False
        self._board: SinkBoard | None = None
        self._commands: SinkBoard | None = None  # a separate board, so that a slow command does not delay the metrics
        self._sampler = DeviceSampler(self.device_every_s, self._sampled, self._noticed)
        self._lag = LoopLagMonitor(self.lag_hz)
        self._waits = CoreWaits()  # per window of the lag
        self._cores: CoreTime | None = None  # of this process in the newest window, and of the workers here
        self._cores_of_workers: CoreTime | None = None
        self._crowded = 0  # consecutive samples with shared cores, until the notice
        self._heartbeat = Heartbeat(self._lag, self.lag_limits, section.stall_s, self._looked)
        self._reporter: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._endpoint: MetricsEndpoint | None = None

    @property
    def endpoint_url(self) -> str | None:
        """The metrics endpoint's URL, from the start of the block on; None without a port."""
        return self._endpoint.url if self._endpoint is not None else None

    async def __aenter__(self) -> Monitoring:
        """Start everything. Raises MissingRequirementError, with everything stopped again, if a sink's package is not
        installed or a port is in use."""
        self._loop = asyncio.get_running_loop()
        sinks = self._opened_sinks()
        self._open = True
        if sinks:
            self._board = SinkBoard(sinks, self._noticed)
        if self._section.alert_command:
            command = AlertCommand(self._section.alert_command, self.command_s, self._noticed)
            self._commands = SinkBoard({"alert command": command}, self._noticed)
        self._sampler.start()
        self._lag.start()
        self._heartbeat.start()
        self._reporter = self._loop.create_task(self._report(), name="loop lag reports")
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        assert self._reporter is not None
        try:
            self._heartbeat.stop()
            self._sampler.stop()
            self._reporter.cancel()
            await asyncio.wait([self._reporter])
            await self._lag.stop()
            self._record_lags()
            await asyncio.sleep(0)  # runs the callbacks that the sampler's thread has scheduled
            if self._board is not None:
                # In a thread, so that the display updates and Ctrl-C works while a sink uploads its last points.
                await asyncio.to_thread(self._board.close)
            if self._commands is not None:
                await asyncio.to_thread(self._commands.close)
        finally:
            self._open = False
            self._heartbeat.stop()
            self._lag.cancel()
            for board in (self._board, self._commands):
                if board is not None:
                    board.close(limit_s=1.0)  # has been closed, unless waiting for it was cancelled
            if self._endpoint is not None:
                self._endpoint.close()  # also if another sink hangs before it
        if self._failure is not None:
            if error is None:
                raise self._failure
            error.add_note(f"Monitoring of the run had failed before: {self._failure}")

    # --- events of the run ---------------------------------------------------------------------------------------

    def step(
        self,
        round_: int,
        phase: str,
        step: int,
        metrics: Mapping[str, float],
        budget: Mapping[str, float],
        busy: Mapping[str, float],
        *,
        whole: bool = True,
    ) -> None:
        """Report a finished step: its metrics, and its exposed and busy seconds by part. The metrics of a step that is
        not `whole` are added to those of the step before it. Raises errors of `record` since the last step."""
        if self._failure is not None:
            raise self._failure
        self._place = (round_, phase)
        self._of_steps = metrics.keys() if whole else self._of_steps | metrics.keys()
        self._stepped = time.monotonic()
        self._steps += 1
        self._write(
            {f"{phase}/{name}": value for name, value in metrics.items()}
            | {f"budget/{part}": seconds for part, seconds in budget.items()}
            | {f"busy/{part}": seconds for part, seconds in busy.items()},
            whole=whole,
        )

    def phase(self, round_: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Report the metrics of a finished phase. Metrics that its steps have too are left out, because the sinks would
        show the phase's mean as one more step under the same name."""
        self._place = (round_, phase)
        found = {f"{phase}/{name}": value for name, value in metrics.items() if name not in self._of_steps}
        self._write(found, whole=False)

    def round(self, round_: int, metrics: Mapping[str, float]) -> None:
        self._place = (round_, self._place[1])
        self._write({f"round/{name}": value for name, value in metrics.items()})

    def send(self, alert: Alert) -> None:
        """Pass an alert to the sinks and the alert command. May be called from any thread; returns at once."""
        round_, phase = self._place
        point = AlertPoint(time.time(), self._steps, round_, phase, alert.name, alert.message, self._name)
        for board in (self._board, self._commands):
            if board is not None:
                board.put(point)

    def examples(self, round_: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Pass example solutions of a round to the sinks that show tables."""
        if self._board is not None and rows:
            self._board.put(ExamplesPoint(self._steps, round_, tuple(rows)))

    def _write(self, metrics: Mapping[str, float], at: float | None = None, *, whole: bool = True) -> None:
        if self._board is not None:
            round_, phase = self._place
            now = time.time() if at is None else at
            self._board.put(MetricPoint(now, self._steps, round_, phase, metrics, whole))

    # --- measurements --------------------------------------------------------------------------------------------

    def _opened_sinks(self) -> dict[str, MetricSink]:
        sinks: dict[str, MetricSink] = {}
        if self._section.metrics_port:
            from pvg.telemetry.prometheus import MetricsEndpoint

            self._endpoint = sinks["prometheus"] = MetricsEndpoint(self._section.metrics_port)
        try:
            return sinks | open_sinks(self._section.sinks, self._opening)
        except BaseException:
            for sink in sinks.values():
                sink.close()
            raise

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self.device_every_s)
            self._record_lags()
            if self._load is not None:
                self._guarded(self._record_workers, self._load())

    def _looked(self, blocked: Alert | None) -> None:
        """Called from the heartbeat's thread."""
        if blocked is not None:
            self._begin(blocked)
        waited = time.monotonic() - self._stepped
        if waited > self._section.stall_s:
            message = f"No step has ended for {waited:.0f} s: the run is stuck, or its steps take that long."
            self._begin(Alert("stall", message))
        else:
            with self._holding:
                self._held.discard("stall")

    def _begin(self, alert: Alert) -> None:
        """Announce and record an alert from any thread, unless it already holds."""
        with self._holding:
            if alert.name in self._held:
                return
            self._held.add(alert.name)
        self._guarded(self._announce, alert)
        self._in_loop(self._guarded, self._alert, alert)

    def _record_lags(self) -> None:
        if (window := self._lag.take()) is not None:
            self._cores = self._waits.take()
            self._guarded(self._record_lag, window, self._cores)

    def _record_lag(self, window: LagWindow, cores: CoreTime | None = None) -> None:
        metrics = window.metrics() | ({} if cores is None else cores.metrics())
        self._record("loop", time=time.time(), metrics=metrics)
        alerts = {alert.name: alert for alert in warnings(window, self.lag_limits, cores)}
        with self._holding:
            new = [alert for name, alert in alerts.items() if name not in self._held]
            self._held = set(alerts) | (self._held & {"stall"})
        for alert in new:
            self._announce(alert)
            self._alert(alert)
        self._write({f"loop/{name}": value for name, value in metrics.items()})

    def _record_workers(self, metrics: dict[str, float]) -> None:
        self.workers = metrics
        self._record("workers", metrics=metrics)
        if self._workers_here:
            self._cores_of_workers = CoreTime.of_metrics(metrics)
        self._write({f"workers/{name}": value for name, value in metrics.items()})

    def _sampled(self, at: float, metrics: dict[str, float]) -> None:
        """Called from the sampler's thread."""
        self._in_loop(self._guarded, self._record_device, at, metrics)

    def _record_device(self, at: float, metrics: dict[str, float]) -> None:
        self._record("device", time=at, metrics=metrics)
        self._write({f"device/{name}": value for name, value in metrics.items()}, at)
        self._look_for_crowding(metrics)

    def _look_for_crowding(self, metrics: Mapping[str, float]) -> None:
        """Gives at most one notice per process; the metric core_wait has the details."""
        cores, workers = self._cores, self._cores_of_workers
        together = None if cores is None or workers is None else cores + workers
        message = crowding(metrics, together)
        if self._crowded < CROWDED_SAMPLES:
            self._crowded = 0 if message is None else self._crowded + 1
            if message is not None and self._crowded == CROWDED_SAMPLES:
                self._notice(message)

    def _noticed(self, message: str) -> None:
        """Called from any thread."""
        self._in_loop(self._guarded, self._notice, message)

    def _in_loop(self, call: Callable[..., None], *args: Any) -> None:
        """Schedule a call on the event loop. Does nothing if the loop is closed."""
        assert self._loop is not None
        if self._open and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    def _guarded(self, call: Callable[..., None], *args: Any) -> None:
        """Call a callback while the block is open, and keep its error for the run."""
        if not self._open or self._failure is not None:
            return
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - raised again by `step` and at the end of the block
            self._failure = error
