"""The event loop of a run (uvloop if installed, otherwise asyncio's), and the measurement of its lag.

    run, notice = runner(experiment.telemetry.event_loop)       # the notice says if another loop than asked is used
    with run:
        run.run(main())

    async with LoopLagMonitor(hz=10.0) as monitor:
        ...
        window = monitor.take()              # the lags since the last take

The lag is the delay of a tick. Tick k is due at start + k / hz, independent of earlier ticks. A stalled loop cannot
tick, so a stall of ten seconds would otherwise be a single bad sample among good ones (coordinated omission).
Therefore, when the loop runs again, every tick that was due meanwhile counts with its own lag, the time since it was
due. At 10 Hz a stall of one second gives ten samples, about 1.0, 0.9, ... 0.1 s. So a percentile is the lag for work
that arrives at a random moment of the window.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from array import array
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from pvg.config.sections import Telemetry
from pvg.telemetry.alerts import Alert, AlertKind
from pvg.telemetry.core_waits import CoreTime

Kind = Literal["uvloop", "asyncio"]
Result = TypeVar("Result")


def runner(kind: Kind) -> tuple[asyncio.Runner, str | None]:
    """A runner with an event loop of `kind`, and a notice if another had to be used (uvloop does not run on
    Windows)."""
    if kind == "asyncio":
        return asyncio.Runner(), None
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner(), "uvloop is not installed: the run uses asyncio's event loop, which is slower."
    return asyncio.Runner(loop_factory=uvloop.new_event_loop), None


def run_to_end(work: Callable[[], Coroutine[Any, Any, Result]], kind: Kind = "asyncio") -> Result:
    """Run the coroutine of `work()` in a new event loop of `kind` and return its result.

    Where this thread runs an event loop already, as in a notebook, another thread runs the new one meanwhile.
    """

    def run() -> Result:
        with runner(kind)[0] as loop:
            return loop.run(work())

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(1, "pvg-loop") as thread:
        return thread.submit(run).result()


# --- lag --------------------------------------------------------------------------------------------------------------

SHORTEST_LOOK_S = 0.001  # shortest period of the heartbeat's checks, because each one wakes the loop


@dataclass(frozen=True, slots=True)
class LagWindow:
    """The lags of one window, in seconds. `samples`: the ticks that were due in it, at least 1."""

    samples: int
    min_s: float
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float

    @classmethod
    def of(cls, lags: Sequence[float]) -> LagWindow:
        """Percentiles are nearest-rank: the smallest lag such that at least this share of the samples is not above it.

        Raises ValueError without lags.
        """
        if not lags:
            raise ValueError("a window without samples has no percentiles")
        ordered = sorted(lags)
        p50, p90, p99 = (ordered[max(1, math.ceil(len(ordered) * percent / 100)) - 1] for percent in (50, 90, 99))
        return cls(len(ordered), ordered[0], math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])

    def metrics(self) -> dict[str, float]:
        """By name, as in the "loop" records of metrics.jsonl."""
        return {
            "lag_min_s": self.min_s,
            "lag_mean_s": self.mean_s,
            "lag_p50_s": self.p50_s,
            "lag_p90_s": self.p90_s,
            "lag_p99_s": self.p99_s,
            "lag_max_s": self.max_s,
            "samples": float(self.samples),
        }


class LoopLagMonitor:
    """Measures the event loop in which it is started, from a task. `clock`: monotonic seconds."""

    def __init__(self, hz: float, *, clock: Callable[[], float] = time.perf_counter) -> None:
        if not (math.isfinite(hz) and hz > 0):
            raise ValueError(f"hz must be a positive number, not {hz}")
        self._period = 1.0 / hz
        self._clock = clock
        self._lags = array("d")
        self._due = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LoopLagMonitor:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def start(self) -> None:
        """Begin to tick. Raises RuntimeError if it is ticking already, or outside an event loop."""
        if self._task is not None:
            raise RuntimeError("LoopLagMonitor has already been started.")
        self._due = self._clock() + self._period
        self._task = asyncio.get_running_loop().create_task(self._tick(), name="loop lag")

    async def stop(self) -> None:
        """Stop ticking; overdue ticks count with their lag so far. The samples can still be taken."""
        if (task := self.cancel()) is not None:
            await asyncio.wait([task])

    def cancel(self) -> asyncio.Task[None] | None:
        """As `stop`, without waiting: returns the task that is ending, or None if there is none."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            if self._due <= (now := self._clock()):
                self._count(now)
        return task

    def take(self) -> LagWindow | None:
        """The samples since the last take; None if no tick was due."""
        lags, self._lags = self._lags, array("d")
        return LagWindow.of(lags) if lags else None

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._due - self._clock()))
            self._count(self._clock())

    def _count(self, now: float) -> None:
        """Count the awaited tick and all others that were due by `now`."""
        while True:
            self._lags.append(
                max(0.0, now - self._due)
            )  # a timer may fire slightly early: uvloop rounds to milliseconds
            self._due += self._period
            if self._due > now:
                return


def warnings(window: LagWindow, section: Telemetry, cores: CoreTime | None = None) -> list[Alert]:
    """One alert for each threshold of `section` that the window exceeds. `cores`: of the same window; None: unknown."""
    measured: dict[AlertKind, tuple[float, float]] = {
        "loop_lag_p90": (window.p90_s, section.loop_lag_p90_s),
        "loop_lag_p99": (window.p99_s, section.loop_lag_p99_s),
        "loop_lag_max": (window.max_s, section.loop_lag_max_s),
    }
    if cores is not None and cores.shared:
        reason = (
            f"The cores are shared: pvg's threads ran for {cores.ran_s:.3g} s and waited {cores.waited_s:.3g} s for a "
            "core. Stop other programs on this machine, or reserve cores for pvg."
        )
    else:
        reason = "Something computes on the event loop that should run in a thread."
    return [
        Alert(
            kind,
            f"The event loop was late: its lag ({kind.removeprefix('loop_lag_')}) is {lag_s:.3g} s, above "
            f"telemetry.{kind}_s = {limit_s:g} s. {reason}",
        )
        for kind, (lag_s, limit_s) in measured.items()
        if lag_s > limit_s
    ]


class Heartbeat:
    """Checks the event loop and the run from a thread, so that it can report a loop that is still blocked.

    It schedules a callback on the loop. If the callback does not run within `telemetry.loop_lag_max_s`, the loop
    counts as blocked. The thread calls `on_look(blocked)` at every check; `blocked` is None, or an alert that names the
    code that blocks the loop.
    """

    def __init__(self, section: Telemetry, on_look: Callable[[Alert | None], None]) -> None:
        self._limit_s = section.loop_lag_max_s
        self._every_s = max(SHORTEST_LOOK_S, min(1.0, section.loop_lag_max_s / 4, section.stall_s / 4))
        self._on_look = on_look
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._answered = True

    def start(self) -> None:
        """Start the thread. Call this on the event loop to watch."""
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        assert self._loop is not None
        asked = time.monotonic()
        while not self._stopping.wait(self._every_s):
            now = time.monotonic()
            if self._answered:
                self._answered, asked = False, now
                try:
                    self._loop.call_soon_threadsafe(self._answer)
                except RuntimeError:  # the loop is closed
                    return
            waited = now - asked
            self._on_look(self._blocked(waited) if waited > self._limit_s else None)

    def _answer(self) -> None:
        self._answered = True

    def _blocked(self, waited: float) -> Alert:
        return Alert(
            "loop_lag_max",
            f"The event loop has been blocked for {waited:.0f} s, above telemetry.loop_lag_max_s = {self._limit_s:g} "
            f"s. It is in {self._place()}.",
        )

    def _place(self) -> str:
        """The innermost Python function of the loop's thread, as `decode (lean.py:123)`."""
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None:
            return "a thread that has ended"
        return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
