"""Decides how many worker processes a run has, between a lowest and a highest number. Knows no process and no clock.

    meter = DemandMeter(now)
    meter.add(now, moment, trained_s)                       # several times per second
    decision = decide(meter.demand(), lowest=1, highest=4)

Work *waits* while its process works for another shard, so only another process makes it faster. A worker is added when
work has waited for half of the last WINDOW_S, and the trainer was idle meanwhile. A trainer that is never idle needs no
faster rollouts. A worker is removed when it had next to nothing to do for IDLE_S.

The two thresholds are far apart (hysteresis), and a new decision uses only what was seen since the last change, so the
number of workers does not go up and down under a constant load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pvg.errors import counted

WINDOW_S = 5.0  # a few steps of the embedded game; also the least time between two changes
IDLE_S = 30.0  # so that a short pause of the workers ends none of them
LEAST_WAITED = 0.5  # share of the window
LEAST_IDLE = 0.2  # share of the window; the optimizer, packing and commits stay below it
MOST_BUSY = 0.05  # share of IDLE_S
SHARD_COST = 0.01  # load of a shard without work, so that such shards are divided too


@dataclass(frozen=True, slots=True)
class Moment:
    """What waits at one moment: `groups` to be sampled, `parts` of a scoring or training step. `training_waits`: some
    of these parts belong to the trainer. `workers`: the numbers of all workers; `busy`: of those that have work;
    `shards`: the shards that have work."""

    groups: int
    parts: int
    training_waits: bool
    workers: frozenset[int]
    busy: frozenset[int]
    shards: frozenset[int]


@dataclass(frozen=True, slots=True)
class Demand:
    """What was seen in the `seen_s` seconds since the last change, in the last WINDOW_S of these: the most `groups` and
    `parts` that waited at once, how long anything waited, and the share of the time in which the trainer was idle.
    `busy`: for each worker, the share of the last IDLE_S in which it had work; `shards`: the same of each shard
    that had any."""

    seen_s: float
    groups: int
    parts: int
    waited_s: float
    trainer_idle: float
    busy: Mapping[int, float]
    shards: Mapping[int, float]


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
    waited, idle = demand.waited_s >= LEAST_WAITED * WINDOW_S, demand.trainer_idle >= LEAST_IDLE
    if workers < highest and waited and idle:
        what = counted(demand.groups, "group") if demand.groups else f"{counted(demand.parts, 'part')} of a step"
        why = f"{what} waited for {demand.waited_s:.1f} of {WINDOW_S:g} s"
        return Decision(None, f"{why}, and the trainer was idle for {demand.trainer_idle:.0%}")
    if workers > lowest and demand.seen_s >= IDLE_S:
        number = max((worker for worker, busy in demand.busy.items() if busy <= MOST_BUSY), default=None)
        if number is not None:
            return Decision(number, f"it had work for {demand.busy[number]:.0%} of the last {IDLE_S:g} s")
    return None


def shards_to_take(served: Mapping[int, Sequence[int]], busy: Mapping[int, float]) -> list[int]:
    """The shards that a new worker takes from the others, `served` by number of worker. `busy`: as `Demand.shards`.

    The most loaded worker gives its second busiest shard, again and again, while it stays the more loaded one. So the
    new worker gets work that has waited, and every other one keeps a shard.
    """
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


@dataclass(frozen=True, slots=True)
class _Tick:
    """A moment and how long it lasted. `trained_s`: of it, seconds in which the trainer worked."""

    at: float
    lasted_s: float
    moment: Moment
    trained_s: float


class DemandMeter:
    """Adds up moments since the last change. Times are those of one clock, in seconds."""

    def __init__(self, now: float, trained_s: float = 0.0) -> None:
        self._began = self._at = now
        self._trained_s = trained_s
        self._ticks: deque[_Tick] = deque()

    def add(self, now: float, moment: Moment, trained_s: float) -> None:
        """It was like this `moment` since the last call. `trained_s`: seconds that the trainer has worked in all."""
        self._ticks.append(_Tick(now, now - self._at, moment, trained_s - self._trained_s))
        self._at, self._trained_s = now, trained_s
        while self._ticks[0].at <= now - IDLE_S:
            self._ticks.popleft()

    def demand(self) -> Demand:
        """Call `add` first."""
        newest = [tick for tick in self._ticks if tick.at > self._at - WINDOW_S]
        seconds = sum(tick.lasted_s for tick in newest)
        waiting = [tick for tick in newest if tick.moment.groups or tick.moment.parts]
        trained_s = sum(tick.trained_s for tick in newest if not tick.moment.training_waits)
        return Demand(
            self._at - self._began,
            max((tick.moment.groups for tick in waiting), default=0),
            max((tick.moment.parts for tick in waiting), default=0),
            min(WINDOW_S, sum(tick.lasted_s for tick in waiting)),
            max(0.0, 1.0 - trained_s / seconds) if seconds else 0.0,
            self._shares(self._ticks[-1].moment.workers, lambda moment: moment.busy),
            self._shares(
                frozenset().union(*(tick.moment.shards for tick in self._ticks)), lambda moment: moment.shards
            ),
        )

    def _shares(self, numbers: frozenset[int], of: Callable[[Moment], frozenset[int]]) -> dict[int, float]:
        """For each number, the share of the time in which it was in `of` the moment."""
        seconds = sum(tick.lasted_s for tick in self._ticks) or 1.0
        return {
            number: sum(tick.lasted_s for tick in self._ticks if number in of(tick.moment)) / seconds
            for number in sorted(numbers)
        }
