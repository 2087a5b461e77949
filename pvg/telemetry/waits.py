"""Measures two kinds of waiting: threads that wait for a core (the machine is shared), and an event loop that is late.

The Linux kernel counts the first (/proc/self/task/*/schedstat): nanoseconds on a core, and those in which a thread was
ready to run while the core ran something else. A thread that sleeps or waits for a lock counts in neither.

The lag is the delay of a tick. Tick k is due at start + k / hz. A stalled loop cannot tick, so every tick that was due
during a stall counts with its own lag, the time since it was due (no coordinated omission): at 10 Hz a stall of one
second gives ten samples, about 1.0, 0.9, ... 0.1 s. A percentile is the lag for work that arrives at a random moment.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import psutil

from pvg.errors import in_percent
from pvg.telemetry.alerts import Alert, AlertKind

Result = TypeVar("Result")

ROOT = Path("/")
TASKS = Path("/proc/self/task")
# Share of a window above which the machine counts as shared. Two programs that compute on one core have 0.5.
SHARED = 0.2
LEAST_CPU = 0.2  # cores in use; below this, waiting does not matter
# Python's are 700, 10, 10. New objects before a collection of the new ones; such collections before one of the newer
# ones, which scans 20,000 objects or a few ms; and such ones before a full collection.
COLLECTOR = (2_000, 10, 2_500)


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Seconds in a window: `ran_s` on a core and `waited_s` for one, summed over the threads. `longest_s`: the longest
    wait of one thread, at most the length of the window."""

    ran_s: float
    waited_s: float
    longest_s: float

    @property
    def share(self) -> float:
        """Time waited for a core / time ready to run."""
        ready_s = self.ran_s + self.waited_s
        return self.waited_s / ready_s if ready_s else 0.0

    @property
    def shared(self) -> bool:
        return self.share > SHARED

    def __add__(self, other: CoreTime) -> CoreTime:
        """The sum of both windows; `longest_s` is the sum of the longest waits of each."""
        return CoreTime(self.ran_s + other.ran_s, self.waited_s + other.waited_s, self.longest_s + other.longest_s)

    @classmethod
    def of_metrics(cls, metrics: Mapping[str, float]) -> CoreTime | None:
        """The times in a record of this process ("loop") or of all workers; None if it has not measured any."""
        names = ("ran_s", "waited_s", "longest_wait_s")
        return cls(*(metrics[name] for name in names)) if names[0] in metrics else None

    def metrics(self) -> dict[str, float]:
        """By name, as in the "loop" records of metrics.jsonl."""
        return {"ran_s": self.ran_s, "waited_s": self.waited_s, "longest_wait_s": self.longest_s}


class CalmCollector:
    """Freeze the objects in memory, and make full garbage collections rare, until `close`.

    Otherwise each collection scans a million objects of torch and all rollouts in flight, and stops the event loop for
    0.1 s and more: with 32,000 rollouts a quarter of the driver's time. A run calls `gc.collect` where a phase ends. If
    the program has frozen objects itself, this freezes no others, because `close` could not tell them apart.
    """

    def __init__(self) -> None:
        self._thresholds = gc.get_threshold()
        self._freezes = gc.get_freeze_count() == 0
        if self._freezes:
            gc.collect()
            gc.freeze()
        gc.set_threshold(*COLLECTOR)

    def close(self) -> None:
        gc.set_threshold(*self._thresholds)
        if self._freezes:
            gc.unfreeze()


def finished(future: Future[Result]) -> Result:
    """The result of `future`, for the main thread. In `Future.result` Python may miss a signal that comes just before
    the thread sleeps, and handle it only when the result is there. So this looks twice a second."""
    while not future.done():
        wait([future], timeout=0.5)
    return future.result()


def in_daemon(work: Callable[[], Result], name: str) -> Future[Result]:
    """Run `work` in a daemon thread, which neither the end of the process nor a wait for the result with a limit waits
    for: a call of a library that has no limit of time."""
    done: Future[Result] = Future()
    threading.Thread(target=fulfil, args=(done, work), name=name, daemon=True).start()
    return done


def fulfil(future: Future[Result], work: Callable[[], Result]) -> None:
    """Do `work`, and give `future` its result or its error."""
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 (the caller gets it)
        future.set_exception(error)


def usable_cores(root: Path = ROOT) -> int:
    """Cores that this process may use; in a container or under taskset fewer than the machine has. A quota that is no
    whole number counts as the next one. `root`: the folder with /proc and /sys."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, cpu_quota(root))))


def cpu_quota(root: Path = ROOT) -> float:
    """The CPU time per second that the cgroups of this process allow it, such as 0.5 after `docker run --cpus 0.5`.
    Infinite without a quota. A group's quota also holds for the groups in it."""
    return min(map(_quota_of, _groups("cpu", root)), default=math.inf)


def usable_memory(root: Path = ROOT) -> tuple[int, int]:
    """The memory that this process may have, and what is free of it now, in bytes: of the machine, or of the tightest
    cgroup, such as after `docker run -m 4g`."""
    machine = psutil.virtual_memory()
    limits = [found for group in _groups("memory", root) if (found := _memory_of(group)) is not None]
    totals, free = zip((machine.total, machine.available), *limits, strict=True)
    return min(totals), max(0, min(free))


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of the cgroups of this process that may limit it. A group's limit also holds for those in it."""
    cgroups = root / "sys/fs/cgroup"
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for _, controllers, path in (line.split(":", 2) for line in groups if line.count(":") >= 2):
        if controller in controllers.split(",") or not controllers:
            for mount in {cgroups / (controllers or "unified"), cgroups / controller, cgroups}:
                # In a container, `path` may be that of the host, and the mount be the container's own group.
                inside = mount / path.strip("/")
                yield from [inside, *inside.parents][: len(Path(path).parts)]


def _memory_of(group: Path) -> tuple[int, int] | None:
    """The limit of one group, of version 1 or 2, and the bytes below the limit that pvg can use; None without a limit.
    The cache of files that no process reads counts as usable."""
    for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        try:
            limit, taken = (int((group / file).read_text(encoding="ascii")) for file in (most, used))
            counts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        except (OSError, ValueError):  # not this version, or "max"
            continue
        return limit, limit - taken + int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
    return None


def _quota_of(group: Path) -> float:
    """The quota of one group, of version 1 or 2: "max" and -1 mean none."""
    for files in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        try:
            quota, period = " ".join((group / file).read_text(encoding="ascii") for file in files).split()
            if quota.isdecimal() and int(quota) and int(period):
                return int(quota) / int(period)
        except (OSError, ValueError):  # not this version
            continue
    return math.inf


class CoreWaits:
    """Reads the counters of this process's threads. Use it from one thread. `tasks`: a folder like /proc/self/task."""

    def __init__(self, tasks: Path = TASKS) -> None:
        self._tasks = tasks
        self._before = self._read()

    def take(self) -> CoreTime | None:
        """The times since the last take, or since the start. The last part of a thread that has ended is missing. None
        without such a folder or count: on systems other than Linux, and in some containers."""
        before, self._before = self._before, self._read()
        if not any(ran for ran, _ in self._before.values()):
            return None
        ran, waited = [], []
        for thread, (ran_ns, waited_ns) in self._before.items():
            ran_before, waited_before = before.get(thread, (0, 0))
            if ran_ns < ran_before:  # a new thread has reused the number of an ended one
                ran_before = waited_before = 0
            ran.append((ran_ns - ran_before) / 1e9)
            waited.append((waited_ns - waited_before) / 1e9)
        return CoreTime(sum(ran), sum(waited), max(waited))

    def _read(self) -> dict[str, tuple[int, int]]:
        """(ran, waited) nanoseconds so far, by thread number. Empty if nothing can be read."""
        found: dict[str, tuple[int, int]] = {}
        if not self._tasks.is_dir():
            return found
        for task in self._tasks.iterdir():
            try:
                ran, waited, _ = (task / "schedstat").read_text(encoding="ascii").split()
            except (OSError, ValueError):  # the thread has ended, or this kernel does not count
                continue
            found[task.name] = (int(ran), int(waited))
        return found


def crowding(metrics: Mapping[str, float], waits: CoreTime | None = None) -> str | None:
    """The notice for a "device" record in which this process's threads waited for cores; None if they did not.
    `waits`: of this process and its workers; None: there are no workers."""
    share = metrics.get("core_wait", 0.0) if waits is None else waits.share
    if share <= SHARED or metrics.get("process_cpu", 0.0) < LEAST_CPU:
        return None
    return (
        f"The cores are shared: pvg's threads waited for a core {in_percent(share)} of the time in which they were "
        "ready to run. Steps take longer; results stay the same. `pvg diagnose RUN` says why, and what to change."
    )


def runner() -> tuple[asyncio.Runner, str | None]:
    """A runner with uvloop's event loop; without uvloop (it does not run on Windows) asyncio's, and a notice."""
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner(), "uvloop is not installed: the run uses asyncio's event loop, which is slower."
    return asyncio.Runner(loop_factory=uvloop.new_event_loop), None


def run_to_end(work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run the coroutine of `work()` in a new event loop and return its result.

    If this thread already runs an event loop, as in a notebook, another thread runs the new one.
    """

    def run() -> Result:
        with runner()[0] as loop:
            return loop.run(work())

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(1, "pvg-loop") as thread:
        return thread.submit(run).result()


@cache
def _background() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="pvg-background", daemon=True).start()
    return loop


def in_background(work: Coroutine[Any, Any, Result]) -> Future[Result]:
    """Run `work` in the background event loop of this process, which is in a daemon thread. For callers in any thread
    whose connections or models belong to one event loop. `work` must not block."""
    return asyncio.run_coroutine_threadsafe(work, _background())


# --- lag --------------------------------------------------------------------------------------------------------------

SHORTEST_LOOK_S = 0.001  # between two looks of the heartbeat


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
        """Of at least one lag. Percentiles are nearest-rank: the smallest lag such that at least this share of the
        samples is not above it."""
        ordered = sorted(lags)
        p50, p90, p99 = (ordered[max(1, math.ceil(len(ordered) * percent / 100)) - 1] for percent in (50, 90, 99))
        return cls(len(ordered), ordered[0], math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])

    def metrics(self) -> dict[str, float]:
        """By name, as in the "loop" records of metrics.jsonl."""
        lags = asdict(self)
        return {"samples": float(lags.pop("samples"))} | {f"lag_{name}": lag for name, lag in lags.items()}


class LoopLagMonitor:
    """Measures the event loop in which it is started, from a task. `clock`: monotonic seconds."""

    def __init__(self, hz: float, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._period = 1.0 / hz
        self._clock = clock
        self._lags = array("d")
        self._due = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LoopLagMonitor:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self) -> None:
        """Begin to tick, on the running event loop."""
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

    @property
    def late_s(self) -> float:
        """By how much the tick that is due next is late; negative before that. May be read from any thread."""
        return self._clock() - self._due

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
            self._lags.append(max(0.0, now - self._due))  # a timer may fire early: uvloop rounds to milliseconds
            self._due += self._period
            if self._due > now:
                return


@dataclass(frozen=True, slots=True)
class LagLimits:
    """When a lag of the event loop is worth an alert, in seconds. With any lag the run continues, but requests and
    timeouts are late: a second now and then is usual with large batches, half a minute is a defect."""

    p90_s: float = 1.0
    p99_s: float = 5.0
    max_s: float = 30.0


LAG_LIMITS = LagLimits()


def warnings(window: LagWindow, limits: LagLimits, cores: CoreTime | None = None) -> list[Alert]:
    """One alert for each of the `limits` that the window exceeds. `cores`: of the same window; None: unknown."""
    measured: dict[AlertKind, tuple[float, float]] = {
        "loop_lag_p90": (window.p90_s, limits.p90_s),
        "loop_lag_p99": (window.p99_s, limits.p99_s),
        "loop_lag_max": (window.max_s, limits.max_s),
    }
    reason = "Something computes on the event loop that should run in a thread."
    if cores is not None and cores.shared:
        reason = f"The cores are shared: pvg's threads ran for {cores.ran_s:.3g} s and waited {cores.waited_s:.3g} s."
    says = "The event loop was late: its lag ({}) is {:.3g} s, above {:g} s. {}"
    return [
        Alert(kind, says.format(kind.removeprefix("loop_lag_"), lag_s, limit_s, reason))
        for kind, (lag_s, limit_s) in measured.items()
        if lag_s > limit_s
    ]


class Heartbeat:
    """Looks from a thread whether the event loop is blocked: whether a tick is late by more than `limits.max_s`.

    Start it after `monitor`, on the same loop. The thread calls `on_look(blocked)` at every look. `blocked`: None, or
    an alert that names the blocking code.
    """

    def __init__(
        self, monitor: LoopLagMonitor, limits: LagLimits, stall_s: float, on_look: Callable[[Alert | None], None]
    ) -> None:
        self._monitor, self._limit_s, self._on_look = monitor, limits.max_s, on_look
        self._every_s = max(SHORTEST_LOOK_S, min(1.0, limits.max_s / 4, stall_s / 4))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._loop_thread = threading.get_ident()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            late_s = self._monitor.late_s
            self._on_look(self._blocked(late_s) if late_s > self._limit_s else None)

    def _blocked(self, late_s: float) -> Alert:
        frame = sys._current_frames()[self._loop_thread]  # the innermost Python function, as `decode (lean.py:123)`
        place = f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        says = f"The event loop has been blocked for {late_s:.0f} s, above {self._limit_s:g} s. It is in {place}."
        return Alert("loop_lag_max", says)
