"""How busy the workers are, from what they report of themselves, and what the exchange with them costs.

A worker reports with every answer to a probe how long it has run on a core, and how long it has waited for one. Both
count as busy: on a shared machine, a worker that waits for a core has work to do. It also reports its peak memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pvg.telemetry.device import note_worker_peaks

MOST_NAMED = 64  # workers that have separate metrics


class LoadMeter:
    """Collects the reports of workers. Use it from one thread."""

    def __init__(self) -> None:
        self._times: dict[int, tuple[float, float, float]] = {}  # by worker: on a core, waiting for one, and in all
        self._peaks: dict[int, float] = {}  # resident bytes, by worker

    def report(self, worker: int, fields: Mapping[str, float]) -> None:
        """Add a worker's `ran_s` and `waited_s` in the `wall_s` since its last report. Without them, it cannot measure
        itself. `peak_bytes`: the largest resident memory of its process so far."""
        self._peaks[worker] = max(self._peaks.get(worker, 0.0), fields.get("peak_bytes", 0.0))
        note_worker_peaks(self._peaks.values())
        if "ran_s" in fields:
            ran_s, waited_s, wall_s = self._times.get(worker, (0.0, 0.0, 0.0))
            added = ran_s + fields["ran_s"], waited_s + fields["waited_s"], wall_s + fields["wall_s"]
            self._times[worker] = added

    def sample(self, up: Sequence[bool], restarts: Sequence[int]) -> dict[str, float]:
        """The metrics of the place `workers` (pvg.telemetry.catalogue) since the last call. `up`, `restarts`: by
        worker. A worker without a report since then has no share."""
        found = {"up": float(sum(up)), "restarts": float(sum(restarts))}
        times, self._times = self._times, {}
        shares = {worker: min(1.0, (ran_s + waited_s) / wall_s) for worker, (ran_s, waited_s, wall_s) in times.items()}
        if shares:
            ran, waited, _ = zip(*times.values(), strict=True)
            found |= {"ran_s": sum(ran), "waited_s": sum(waited), "longest_wait_s": max(waited)}
            found["core_wait"] = sum(waited) / (sum(ran) + sum(waited) or 1.0)
            found["busy"] = sum(shares.values()) / len(shares)
            found["busy_most"], found["busy_least"] = max(shares.values()), min(shares.values())
        if len(up) <= MOST_NAMED:
            found |= {f"w{worker}_busy": share for worker, share in shares.items()}
            for worker, (is_up, count) in enumerate(zip(up, restarts, strict=True)):
                found |= {f"w{worker}_up": float(is_up), f"w{worker}_restarts": float(count)}
        return found
