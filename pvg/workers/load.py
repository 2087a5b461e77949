"""How busy the workers are, from what they report of themselves, and what the exchange with them costs.

A worker reports with every answer to a probe how long it has run on a core, and how long it has waited for one. Both
count as busy: on a shared machine, a worker that waits for a core has work to do. It also reports its peak memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pvg.telemetry.device import note_worker_peaks

MOST_NAMED = 64  # workers that have separate metrics


@dataclass
class _Load:
    """One worker: seconds since the last sample. `since`, `until`: when the counted time began and ended."""

    ran_s: float = 0.0
    waited_s: float = 0.0
    since: float = 0.0
    until: float = 0.0


class LoadMeter:
    """Collects the reports of `count` workers. Use it from one thread. Times are those of `time.monotonic`."""

    def __init__(self, count: int, began: float | None = None) -> None:
        now = time.monotonic() if began is None else began
        self._loads = [_Load(since=now, until=now) for _ in range(count)]
        self._peaks: dict[int, float] = {}  # resident bytes, by worker

    def begin(self, worker: int) -> None:
        """A worker's process has started: its time counts from now."""
        now = time.monotonic()
        self._loads[worker] = _Load(since=now, until=now)

    def report(self, worker: int, fields: Mapping[str, float], now: float | None = None) -> None:
        """Add a worker's `ran_s` and `waited_s` since its last report. Without them, it cannot measure itself.
        `peak_bytes`: the largest resident memory of its process so far."""
        if "peak_bytes" in fields:
            self._peaks[worker] = max(self._peaks.get(worker, 0.0), fields["peak_bytes"])
            note_worker_peaks(self._peaks.values())
        if "ran_s" not in fields:
            return
        load = self._loads[worker]
        load.ran_s += fields["ran_s"]
        load.waited_s += fields["waited_s"]
        load.until = time.monotonic() if now is None else now

    def sample(self, up: Sequence[bool], restarts: Sequence[int]) -> dict[str, float]:
        """The metrics of the place `workers` (pvg.telemetry.catalogue) since the last call. `up`, `restarts`: by
        worker. A worker without a report since then has no share."""
        found = {"up": float(sum(up)), "restarts": float(sum(restarts))}
        shares: dict[int, float] = {}
        ran_s = waited_s = longest_s = 0.0
        for worker, load in enumerate(self._loads):
            wall_s = load.until - load.since
            if wall_s > 0.0:
                shares[worker] = min(1.0, (load.ran_s + load.waited_s) / wall_s)
                ran_s, waited_s = ran_s + load.ran_s, waited_s + load.waited_s
                longest_s = max(longest_s, load.waited_s)
                self._loads[worker] = _Load(since=load.until, until=load.until)
        if shares:
            found["busy"] = sum(shares.values()) / len(shares)
            found["busy_most"], found["busy_least"] = max(shares.values()), min(shares.values())
            found["core_wait"] = waited_s / (ran_s + waited_s) if ran_s + waited_s else 0.0
            found |= {"ran_s": ran_s, "waited_s": waited_s, "longest_wait_s": longest_s}
        if len(up) <= MOST_NAMED:
            for worker, share in shares.items():
                found[f"w{worker}_busy"] = share
            for worker, (is_up, count) in enumerate(zip(up, restarts, strict=True)):
                found |= {f"w{worker}_up": float(is_up), f"w{worker}_restarts": float(count)}
        return found
