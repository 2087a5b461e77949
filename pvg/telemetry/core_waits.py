"""Measures how long this process's threads waited for a core, which shows that the machine is shared.

    waits = CoreWaits()
    ...
    found = waits.take()            # since the last take; None if the kernel does not count it
    found.share                     # 0.4: of 10 s ready to run, 4 s without a core

The Linux kernel counts this (/proc/self/task/*/schedstat): nanoseconds on a core, and nanoseconds in which a thread was
ready to run while the core ran something else. A thread that sleeps or waits for a lock counts in neither.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

TASKS = Path("/proc/self/task")
# Share of a window above which the machine counts as shared. Two programs that compute on one core have 0.5.
SHARED = 0.2
LEAST_CPU = 0.2  # cores in use; below this, waiting does not matter


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

    def event_fields(self) -> dict[str, float]:
        """The fields of a "[loop] lag" line in events.log."""
        return {
            "ran_ms": 1e3 * self.ran_s,
            "waited_ms": 1e3 * self.waited_s,
            "longest_wait_ms": 1e3 * self.longest_s,
        }


def usable_cores() -> int:
    """Cores that this process may use; in a container or under taskset fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def crowding(metrics: Mapping[str, float]) -> str | None:
    """The notice for a "device" record in which this process's threads waited for cores; None if they did not. If other
    processes used no cores, this process has more threads than cores."""
    share, own = metrics.get("core_wait", 0.0), metrics.get("process_cpu", 0.0)
    if share <= SHARED or own < LEAST_CPU or "cpu" not in metrics:
        return None
    cores = psutil.cpu_count() or 1
    others = max(0.0, metrics["cpu"] * cores - own)
    waits = f"pvg's threads waited for a core {share:.0%} of the time in which they were ready to run"
    if others < LEAST_CPU:
        return (
            f"{waits}, while hardly anything else ran: pvg has more threads and child processes than cores. "
            "Lower models.threads if it is above 1."
        )
    return (
        f"The machine is shared: {waits}, while other processes used {others:.1f} of {cores} cores. Steps take longer; "
        "results stay the same."
    )
