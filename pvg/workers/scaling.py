"""Decides how many worker processes a run has, between a lowest and a highest number. Knows no process and no clock.

Work *waits* while its process works for another shard, so only another process makes it faster. A worker is added when
work has waited for half of about the last WINDOW_S, and the trainer was idle meanwhile. A trainer that is never idle
needs no faster rollouts. A worker is removed when it had next to nothing to do for IDLE_S.

The two thresholds are far apart (hysteresis), and a new decision uses only what was seen since the last change, so the
number of workers does not go up and down under a constant load.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pvg.errors import counted, in_percent
from pvg.telemetry.device import note_worker_peaks

WINDOW_S = 5.0  # a few steps of the embedded game; also the least time between two changes
IDLE_S = 30.0  # so that a short pause of the workers ends none of them
LEAST_WAITED = 0.5  # share of the window
LEAST_IDLE = 0.2  # share of the window; the optimizer, packing and commits stay below it
MOST_BUSY = 0.05  # share of the time; a moving average falls to it within IDLE_S
MOST_NAMED = 64  # workers that have separate metrics
SHARD_COST = 0.01  # load of a shard without work, so that such shards are divided too
TRAINING = frozenset({"gradient", "logprobs"})  # kinds of requests that the trainer waits for

Work = Mapping[int, Mapping[int, Sequence[str]]]  # the kinds of the requests in flight, by worker and shard


@dataclass
class Demand:
    """What was seen in the `seen_s` seconds since the last change, as moving averages: the share of the time in which
    anything `waited` and in which the trainer was idle, over WINDOW_S; for each worker the share in which it was busy,
    and the same of each shard that had work, over IDLE_S / 3. `waiting`: the last requests that waited."""

    seen_s: float = 0.0
    waiting: int = 0
    waited: float = 0.0
    trainer_idle: float = 0.0
    busy: dict[int, float] = field(default_factory=dict)
    shards: dict[int, float] = field(default_factory=dict)

    def add(self, lasted_s: float, work: Work, workers: Collection[int], trained_s: float) -> None:
        """These `workers` had this `work` for `lasted_s` seconds (above 0), in which the trainer worked for
        `trained_s`. All of it waits but that of one shard of each worker."""
        self.seen_s += lasted_s
        # The mean of all that was seen, until this is more than the window.
        weight, longer = (min(1.0, lasted_s / min(self.seen_s, window_s)) for window_s in (WINDOW_S, IDLE_S / 3))
        waiting = [kind for shards in work.values() for kinds in [*shards.values()][1:] for kind in kinds]
        self.waiting = len(waiting) or self.waiting
        self.waited += weight * (bool(waiting) - self.waited)
        idle = max(0.0, 1.0 - trained_s / lasted_s) if TRAINING.isdisjoint(waiting) else 1.0
        self.trainer_idle += weight * (idle - self.trainer_idle)
        working_shards = {shard for shards in work.values() for shard in shards}
        for shares, numbers, working in (
            (self.busy, workers, work.keys()),
            (self.shards, working_shards | self.shards.keys(), working_shards),
        ):
            for number in numbers:
                before = shares.get(number, 0.0)
                shares[number] = before + longer * ((number in working) - before)


@dataclass(frozen=True, slots=True)
class Decision:
    """Add a worker (`remove` is None), or remove the one with this number. `why`: half a sentence."""

    remove: int | None
    why: str


def decide(demand: Demand, *, lowest: int, highest: int) -> Decision | None:
    """The next change of the number of workers, or None."""
    if demand.seen_s < WINDOW_S:
        return None
    workers = len(demand.busy)
    if workers < highest and demand.waited >= LEAST_WAITED and demand.trainer_idle >= LEAST_IDLE:
        why = f"{counted(demand.waiting, 'request')} waited for {in_percent(demand.waited)} of the last {WINDOW_S:g} s"
        return Decision(None, f"{why}, and the trainer was idle for {in_percent(demand.trainer_idle)}")
    if workers > lowest and demand.seen_s >= IDLE_S:
        number = max((worker for worker, busy in demand.busy.items() if busy <= MOST_BUSY), default=None)
        if number is not None:
            return Decision(number, f"it had work for {in_percent(demand.busy[number])} of about the last {IDLE_S:g} s")
    return None


def shards_to_take(served: Mapping[int, Sequence[int]], busy: Mapping[int, float]) -> list[int]:
    """The shards that a new worker takes from the others, `served` by number of worker. `busy`: as `Demand.shards`. The
    most loaded worker gives its second busiest shard, again and again, while it stays the more loaded one. So the new
    worker gets work that has waited, and every other one keeps a shard."""
    rest = {worker: sorted(shards, key=lambda shard: -busy.get(shard, 0.0)) for worker, shards in served.items()}
    taken: list[int] = []

    def load(shards: Sequence[int]) -> float:
        return sum(busy.get(shard, 0.0) + SHARD_COST for shard in shards)

    while donors := [shards for shards in rest.values() if len(shards) > 1]:
        donor = max(donors, key=load)
        if taken and load([*taken, donor[1]]) > load([donor[0], *donor[2:]]):
            break
        taken.append(donor.pop(1))
    return taken


class LoadMeter:
    def __init__(self) -> None:
        self._times: dict[int, tuple[float, float, float]] = {}  # by worker: on a core, waiting for one, and in all
        self._peaks: dict[int, float] = {}  # resident bytes, by worker

    def report(self, worker: int, fields: Mapping[str, float]) -> None:
        """`ran_s` and `waited_s` in the `wall_s` since the last report, if the system counts them; `peak_bytes` of its
        resident memory so far."""
        self._peaks[worker] = max(self._peaks.get(worker, 0.0), fields.get("peak_bytes", 0.0))
        note_worker_peaks(self._peaks.values())
        if "ran_s" in fields:
            new = (fields["ran_s"], fields["waited_s"], fields["wall_s"])
            before = self._times.get(worker, (0.0, 0.0, 0.0))
            self._times[worker] = (before[0] + new[0], before[1] + new[1], before[2] + new[2])

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
