"""What watches a run while it is played: the device sampler, the loop-lag monitor, the sinks, the metrics endpoint.

    async with Monitoring(experiment.telemetry, record=ledger.record, log=ledger.log.line, ...) as monitoring:
        monitoring.step(round_, phase, step, metrics, budget.exposed, budget.busy)

Invariants: everything that is handed in is called from the event loop's thread, and never after the block is left,
however it is left; what was started is stopped with it; nothing here changes what a run computes. The one error that
surfaces from it is one that `record` or `log` raise, such as a full disk: at the next step, or at the end of the block.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pvg.sections import Telemetry
from pvg.telemetry.alerts import Alert
from pvg.telemetry.device import DeviceSampler
from pvg.telemetry.events import format_event
from pvg.telemetry.loop_lag import LagWindow, LoopLagMonitor, warnings
from pvg.telemetry.sinks import MetricPoint, MetricSink, Opening, SinkBoard, open_sinks

if TYPE_CHECKING:
    from pvg.telemetry.prometheus import MetricsEndpoint


class Monitoring:
    """Watches one process of a run.

    `record(kind, **fields)` appends to metrics.jsonl, `log` takes a line of events.log, `notice` a sentence for the
    user, `alert` a warning as it begins to hold. `first_step` is how many steps earlier processes of the run have
    played: the step axis of the sinks goes on from there.
    """

    def __init__(
        self,
        section: Telemetry,
        *,
        record: Callable[..., None],
        log: Callable[[str], None],
        notice: Callable[[str], None],
        alert: Callable[[Alert], None],
        run_directory: Path,
        name: str,
        config: Mapping[str, Any],
        first_step: int = 0,
    ) -> None:
        self._section = section
        self._record, self._log, self._notice, self._alert = record, log, notice, alert
        self._opening = Opening(run_directory, name, config, first_step > 0, notice)
        self._place = (0, "init")  # round and phase of the newest step
        self._steps = first_step
        self._stepped = time.monotonic()  # when the newest step ended
        self._of_steps: Collection[str] = ()  # names of the newest step's metrics
        self._held: set[str] = set()  # the alerts that hold
        self._failure: Exception | None = None
        self._open = False
        self._board: SinkBoard | None = None
        self._sampler = DeviceSampler(section.device_every_s, self._sampled, self._noticed)
        self._lag = LoopLagMonitor(section.loop_lag_hz)
        self._reporter: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._endpoint: MetricsEndpoint | None = None

    @property
    def endpoint_url(self) -> str | None:
        """Where Prometheus finds the metrics, from the start of the block on; None without a port."""
        return self._endpoint.url if self._endpoint is not None else None

    async def __aenter__(self) -> Monitoring:
        """Start everything. Raises MissingRequirementError, with nothing left running, for a sink whose package is not
        installed or a port that is taken."""
        self._loop = asyncio.get_running_loop()
        sinks = self._opened_sinks()
        self._open = True
        if sinks:
            self._board = SinkBoard(sinks, self._noticed)
        self._sampler.start()
        self._lag.start()
        self._reporter = self._loop.create_task(self._report(), name="loop lag reports")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._reporter is not None
        try:
            self._sampler.stop()
            self._reporter.cancel()
            await asyncio.wait([self._reporter])
            await self._lag.stop()
            self._tell_lag()
            await asyncio.sleep(0)  # what the sampler's thread has handed over
            if self._board is not None:
                # In a thread, so that the display goes on, and Ctrl-C works, while a sink uploads its last points.
                await asyncio.to_thread(self._board.close)
        finally:
            self._open = False
            self._lag.cancel()
            if self._board is not None:
                self._board.close(limit_s=1.0)  # closed already, unless the wait for it was cancelled
            if self._endpoint is not None:
                self._endpoint.close()  # also where another sink hangs before it
        if self._failure is not None:
            if error is None:
                raise self._failure
            error.add_note(f"Watching the run had failed before: {self._failure}")

    # --- what the run tells --------------------------------------------------------------------------------------

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
        """A finished step: its metrics, and its seconds by part, exposed and busy. `step` is its number in its phase.
        The metrics of a step that is not `whole` stand beside those of the step before it.

        Raises what `record` or `log` raised since the last step.
        """
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
        """The metrics of a finished phase. Those that its steps have are left to the steps: under the same name the
        sinks would show the mean of a phase as one more step."""
        self._place = (round_, phase)
        found = {f"{phase}/{name}": value for name, value in metrics.items() if name not in self._of_steps}
        self._write(found, whole=False)

    def round(self, round_: int, metrics: Mapping[str, float]) -> None:
        """The row of a finished round."""
        self._place = (round_, self._place[1])
        self._write({f"round/{name}": value for name, value in metrics.items()})

    def _write(self, metrics: Mapping[str, float], at: float | None = None, *, whole: bool = True) -> None:
        if self._board is not None:
            round_, phase = self._place
            now = time.time() if at is None else at
            self._board.write(MetricPoint(now, self._steps, round_, phase, metrics, whole))

    # --- what is watched -----------------------------------------------------------------------------------------

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
            await asyncio.sleep(self._section.device_every_s)
            self._tell_lag()
            self._told(self._look_for_stall)

    def _look_for_stall(self) -> None:
        waited = time.monotonic() - self._stepped
        if waited <= self._section.stall_s:
            self._held.discard("stall")
        elif "stall" not in self._held:
            self._held.add("stall")
            message = f"No step has ended for {waited:.0f} s: the run stands still, or its steps are that long."
            self._alert(Alert("stall", message))

    def _tell_lag(self) -> None:
        if (window := self._lag.take()) is not None:
            self._told(self._record_lag, window)

    def _record_lag(self, window: LagWindow) -> None:
        metrics = window.metrics()
        self._record("loop", time=time.time(), metrics=metrics)
        milliseconds = {f"{name}_ms": metrics[f"lag_{name}_s"] * 1e3 for name in ("p50", "p90", "p99", "max")}
        period_ms = 1e3 / self._section.loop_lag_hz
        self._log(format_event("loop", event="lag", **milliseconds, samples=window.samples, period_ms=period_ms))
        alerts = {alert.name: alert for alert in warnings(window, self._section)}
        for name, alert in alerts.items():
            if name not in self._held:
                self._alert(alert)
        self._held = set(alerts) | (self._held & {"stall"})
        self._write({f"loop/{name}": value for name, value in metrics.items()})

    def _sampled(self, at: float, metrics: dict[str, float]) -> None:
        """Called from the sampler's thread."""
        self._in_loop(self._told, self._record_device, at, metrics)

    def _record_device(self, at: float, metrics: dict[str, float]) -> None:
        self._record("device", time=at, metrics=metrics)
        self._write({f"device/{name}": value for name, value in metrics.items()}, at)

    def _noticed(self, message: str) -> None:
        """Called from any thread."""
        self._in_loop(self._told, self._notice, message)

    def _in_loop(self, call: Callable[..., None], *args: Any) -> None:
        """Call it from the event loop. Once that is closed, there is nobody left to tell."""
        assert self._loop is not None
        if self._open and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    def _told(self, call: Callable[..., None], *args: Any) -> None:
        """Make a call of somebody who was handed in, while they may be called; keep what they raise for the run."""
        if not self._open or self._failure is not None:
            return
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - raised again by `step` and at the end of the block
            self._failure = error
