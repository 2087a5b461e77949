"""Sinks for metrics besides metrics.jsonl: TensorBoard, Weights & Biases, trackio, and an alert command.

Invariants: the event loop never waits for a sink, because one thread writes to all of them through a bounded queue. A
sink that fails with metrics, alerts or examples gives one notice and gets no more points of that kind. Its other
points, the other sinks and the run continue. metrics.jsonl is written elsewhere and is always complete.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from pvg.errors import MissingRequirementError, counted, one_line, raised_by_pvg, variables_quoted
from pvg.installation import install_extra

CAPACITY = 1000  # queued points: minutes of a run whose sink hangs, in less than a megabyte
CLOSE_LIMIT_S = 15.0  # a sink that waits for a dead network must not keep a finished run from ending
FLUSH_EVERY_S = 5.0  # so that TensorBoard shows a run in progress


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """Some metrics at one moment, by full name (pvg.telemetry.catalogue). `time`: seconds since 1970. `step` counts the
    steps of the whole run. A missing value is NaN. A point that is not `whole` adds to the last one of its kind; any
    other replaces it."""

    time: float
    step: int
    round: int
    phase: str
    metrics: Mapping[str, float]
    whole: bool = True


@dataclass(frozen=True, slots=True)
class AlertPoint:
    """An alert that begins to hold. `time`: seconds since 1970. `kind`: the alert's name. `run`: the run's name."""

    time: float
    step: int
    round: int
    phase: str
    kind: str
    message: str
    run: str


@dataclass(frozen=True, slots=True)
class ExamplesPoint:
    """Example solutions at the end of a round: rows with the same keys (`pvg.game.round_evaluation.example_rows`)."""

    step: int
    round: int
    rows: tuple[Mapping[str, object], ...]


Point = MetricPoint | AlertPoint | ExamplesPoint


class MetricSink(Protocol):
    """Receives points in order, from one thread. `close` is called once, also after `write` has failed. A sink inherits
    the empty methods for what it does not take."""

    def write(self, point: MetricPoint) -> None:
        return

    def alert(self, point: AlertPoint) -> None:
        return

    def examples(self, point: ExamplesPoint) -> None:
        return

    def close(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class SinkContext:
    """Arguments for opening a sink: the run's folder, name and configuration, whether an earlier process has played a
    part of the run, and a callback for notices to the user."""

    directory: Path
    name: str
    config: Mapping[str, Any]
    resumed: bool
    on_notice: Callable[[str], None]


class TensorBoardSink(MetricSink):
    """Event files in the run's folder `tensorboard/`: `tensorboard --logdir runs`. Its own writer has a thread that
    prints the traceback of a full disk into the display and may block later writes."""

    def __init__(self, opening: SinkContext) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder = opening.directory / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        # TensorBoard expects this name and sorts by it, so the files are in the order of the run's processes.
        name = f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(folder / name, "xb")  # noqa: SIM115 (closed by close)
        self._records = RecordWriter(self._file)
        self._flushed = 0.0
        self._records.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())

    def write(self, point: MetricPoint) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in _existing(point).items()]
        event = self._event(wall_time=point.time, step=point.step, summary=self._summary(value=values))
        self._records.write(event.SerializeToString())
        if time.monotonic() - self._flushed >= FLUSH_EVERY_S:
            self._records.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._records.close()


class WandbSink(MetricSink):
    """A Weights & Biases run with its files in the run directory; the processes of one run form a group. Offline unless
    WANDB_MODE says otherwise: nothing leaves the machine without the user's consent."""

    def __init__(self, opening: SinkContext) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "pvg"),
            group=opening.name,
            name=opening.name,
            dir=str(opening.directory),
            config=dict(opening.config),
            mode=mode,
            settings=wandb.Settings(silent=True, console="off"),  # the terminal belongs to the run's display
        )
        if mode == "offline":
            opening.on_notice(
                f"Weights & Biases is offline: `wandb sync {opening.directory / 'wandb' / 'offline-run-*'}` uploads "
                "the run. WANDB_MODE=online uploads at once."
            )

    def write(self, point: MetricPoint) -> None:
        self._run.log(_named(point), step=point.step)

    def alert(self, point: AlertPoint) -> None:
        self._run.alert(title=point.kind, text=point.message, level="WARN")

    def examples(self, point: ExamplesPoint) -> None:
        import wandb

        columns = list(point.rows[0])
        table = wandb.Table(columns=columns, data=[[row[column] for column in columns] for row in point.rows])
        self._run.log({"examples": table, "round": point.round}, step=point.step)

    def close(self) -> None:
        self._run.finish()


class TrackioSink(MetricSink):
    """A run in trackio's local store (TRACKIO_DIR moves it); a resumed run continues it."""

    def __init__(self, opening: SinkContext) -> None:
        import trackio

        self._level = trackio.AlertLevel.WARN
        with redirect_stdout(sys.stderr):  # trackio prints, and stdout may be reserved for one JSON document
            self._run = trackio.init(
                project="pvg",
                name=opening.name,
                config=dict(opening.config),
                resume="allow" if opening.resumed else "never",
                embed=False,
            )

    def write(self, point: MetricPoint) -> None:
        self._run.log(_named(point), step=point.step)

    def alert(self, point: AlertPoint) -> None:
        with redirect_stdout(sys.stderr):
            self._run.alert(title=point.kind, text=point.message, level=self._level, step=point.step)

    def examples(self, point: ExamplesPoint) -> None:
        import trackio

        table = trackio.Table(data=[dict(row) for row in point.rows])
        self._run.log({"examples": table, "round": point.round}, step=point.step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()


class AlertCommand(MetricSink):
    """Runs the user's command for each alert, without a shell, with the alert as one JSON object on standard input. Its
    first failure (or timeout after `limit_s` seconds) gives a notice; later alerts still run it."""

    def __init__(self, command: Sequence[str], limit_s: float, on_notice: Callable[[str], None]) -> None:
        self._command, self._limit_s, self._on_notice = tuple(command), limit_s, on_notice
        self._failed = False

    def alert(self, point: AlertPoint) -> None:
        try:
            done = subprocess.run(
                self._command,
                input=orjson.dumps(asdict(point)),
                stdout=subprocess.DEVNULL,  # not a pipe, which would stay open in processes that the command started
                stderr=subprocess.DEVNULL,
                timeout=self._limit_s,
                check=False,
                start_new_session=True,  # Ctrl-C must reach only the run
            )
        except subprocess.TimeoutExpired:
            self._complain(f"was killed after {self._limit_s:g} s")
        except (OSError, ValueError) as error:
            self._complain(f"could not be started ({error})")
        else:
            if done.returncode:
                self._complain(f"ended with exit status {done.returncode}")

    def _complain(self, what: str) -> None:
        if not self._failed:
            self._failed = True
            self._on_notice(f"The alert command {self._command[0]} {what}. Later failures are not reported.")


# Name in `telemetry.sinks`, which is also the extra to install -> the sink's class. It raises ImportError without it.
SINKS: dict[str, Callable[[SinkContext], MetricSink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
}


def open_sinks(names: Sequence[str], opening: SinkContext) -> dict[str, MetricSink]:
    """Open all sinks, or none: if one fails, those opened before it are closed again."""
    opened: dict[str, MetricSink] = {}
    try:
        for name in dict.fromkeys(names):
            try:
                opened[name] = SINKS[name](opening)
            except ImportError as error:
                says = f"telemetry.sinks names {name}, which cannot be imported ({error})."
                raise MissingRequirementError(says, install_extra(name)) from error
            except Exception as error:
                if raised_by_pvg(error):
                    raise
                own = sorted(variable for variable in os.environ if variable.startswith(f"{name.upper()}_"))
                named = ", ".join(variables_quoted(error) or own) or "its installation"
                raise MissingRequirementError(
                    f"telemetry.sinks names {name}, which does not start: {one_line(str(error)).rstrip('.')}.",
                    f"Check {named}, or leave {name} out of telemetry.sinks.",
                ) from error
    except BaseException:
        for sink in opened.values():
            sink.close()
        raise
    return opened


def _named(point: MetricPoint) -> dict[str, float | int | str]:
    """As a tracker logs it."""
    return {**_existing(point), "round": point.round, "phase": point.phase}


def _existing(point: MetricPoint) -> dict[str, float]:
    return {name: value for name, value in point.metrics.items() if not math.isnan(value)}


# Kind of point -> the method that takes one, its name in a notice, and what has all of them.
_POINTS: dict[type[Point], tuple[str, str, str]] = {
    MetricPoint: ("write", "metrics", "metrics.jsonl is complete."),
    AlertPoint: ("alert", "alerts", "events.log has all alerts."),
    ExamplesPoint: ("examples", "example solutions", "The run's folder has all solutions."),
}


class SinkBoard:
    """Writes points to all `sinks` (by name) from one thread, which also calls `on_notice`."""

    def __init__(
        self, sinks: Mapping[str, MetricSink], on_notice: Callable[[str], None], *, capacity: int = CAPACITY
    ) -> None:
        self._sinks = dict(sinks)
        self._on_notice = on_notice
        self._capacity = capacity
        self._points: deque[Point] = deque()
        self._failed: set[tuple[str, type[Point]]] = set()  # (sink, kind of point) that gets no more points
        self._changed = threading.Condition()
        self._closing = False
        self.dropped = 0  # points that were not written because the queue was full
        self._thread = threading.Thread(target=self._run, name="metric sinks", daemon=True)
        self._thread.start()

    def put(self, point: Point) -> None:
        """Queue a point; returns at once. Does nothing after `close`."""
        with self._changed:
            full = len(self._points) >= self._capacity
            if self._closing:
                return
            if full:
                self.dropped += 1
            else:
                self._points.append(point)
                self._changed.notify()
        if full and self.dropped == 1:
            self._on_notice(
                f"The metric sinks ({', '.join(self._sinks)}) are slower than the run, so they miss points. "
                "metrics.jsonl is complete."
            )

    def close(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Write the queued points and close every sink, within about `limit_s` seconds; a second call does nothing."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._on_notice(
                f"The metric sinks did not finish within {limit_s:g} s: {', '.join(self._sinks)} may miss their end "
                f"({counted(len(self._points), 'point')}). metrics.jsonl is complete."
            )
        if self.dropped:
            self._on_notice(f"The metric sinks were too slow and miss {counted(self.dropped, 'point')}.")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._points or self._closing)
                if not self._points:
                    break
                point = self._points.popleft()
            for name, sink in self._sinks.items():
                self._hand_over(name, sink, point)
        for name, sink in self._sinks.items():
            self._close(name, sink)

    def _hand_over(self, name: str, sink: MetricSink, point: Point) -> None:
        kind = type(point)
        if (name, kind) in self._failed:
            return
        take, points, complete = _POINTS[kind]
        try:
            getattr(sink, take)(point)
        except Exception as error:  # noqa: BLE001 - a third-party sink may raise anything
            self._failed.add((name, kind))
            self._on_notice(
                f"The metric sink {name} failed and gets no more {points} ({type(error).__name__}: {error}). {complete}"
            )

    def _close(self, name: str, sink: MetricSink) -> None:
        """A sink that has failed may fail to close too, which needs no second notice."""
        try:
            sink.close()
        except Exception as error:  # noqa: BLE001 - a third-party sink may raise anything
            if not any(name == failed for failed, _ in self._failed):
                self._on_notice(
                    f"The metric sink {name} could not be closed ({type(error).__name__}: {error}), so its last points "
                    "may be missing. metrics.jsonl is complete."
                )
