"""`simulate`: the discrete-event model of sampling, training and weight updates.

    outcome = simulate(world, batches=40)
    outcome.step_s, outcome.idle, outcome.dropped

The trainer takes a batch, trains, publishes weights, and takes the next one, while the workers decode
(pvg.planning.decoding) and groups begin and arrive (pvg.planning.groups). The first batches fill the pipeline and are
not counted. Deterministic for a seed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np

from pvg.errors import ConfigurationError
from pvg.planning.groups import SimulatedGroups
from pvg.planning.world import World

BATCHES = 40
# Failures during one batch after which the model ends: workers fail faster than rollouts finish.
MOST_FAILURES = 20_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means over the counted batches. Times are seconds of a batch; their sum is `batch_s`.

    - `waiting_s`: for rollouts; `training_s`; `other_s`; `update_s`: for weight updates.
    - `tokens_per_s`: completion tokens trained on per second. `sampled_tokens_per_s`: also those that were dropped.
    - `staleness`, `staleness_max`: versions behind of the rollouts trained on, by their oldest token.
    - `dropped`: rollouts dropped per rollout sampled or cancelled. `on_arrival`, `in_queue`, `cancelled`: its parts.
    - `engine_busy`: share of the workers' rows that decode.
    - `failures`: failures of workers per batch.
    """

    batches: int
    batch_s: float
    waiting_s: float
    training_s: float
    other_s: float
    update_s: float
    tokens: float
    rollouts: float
    tokens_per_s: float
    sampled_tokens_per_s: float
    staleness: float
    staleness_max: int
    dropped: float
    on_arrival: float
    in_queue: float
    cancelled: float
    engine_busy: float
    failures: float

    @property
    def idle(self) -> float:
        """Share of the time in which the trainer does not train (pvg's metric trainer_idle)."""
        return 1.0 - self.training_s / self.batch_s

    @property
    def waiting(self) -> float:
        """Share of the time in which the trainer waits for rollouts."""
        return self.waiting_s / self.batch_s


@dataclass(slots=True)
class _Totals:
    """Sums over the counted batches, from `since` on."""

    since: float = 0.0
    waiting_s: float = 0.0
    training_s: float = 0.0
    tokens: int = 0
    rollouts: int = 0
    behind: int = 0
    behind_most: int = 0
    batches: int = 0
    failures: int = 0


def simulate(world: World, batches: int = BATCHES, seed: int = 0, fill: int | None = None) -> Outcome:
    """Simulate `fill` batches (default: until the pipeline is in its steady state), then count `batches`.

    Raises ConfigurationError for a world whose sampling cannot end.
    """
    if batches < 1:
        raise ConfigurationError(f"The number of batches is {batches}, but must be at least 1.")
    ahead = world.ahead
    default = 1 if ahead is None else 3 + 2 * max(ahead.batches, ahead.budget)
    return _Run(world, batches, default if fill is None else fill, seed).outcome()


class _Run:
    def __init__(self, world: World, batches: int, fill: int, seed: int) -> None:
        self._world, self._batches, self._fill = world, batches, fill
        self._now, self._paused_s = 0.0, 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._groups = SimulatedGroups(world, seed, self._at, self._look)
        self._workers = self._groups.workers
        self._totals = _Totals()
        self._before = (0, 0, 0, 0, 0.0)  # lost on arrival, waiting, cancelled; sampled tokens; row seconds
        self._waits_since: float | None = None
        self._done = 0
        self._failures = 0  # during this batch
        self._chance = np.random.default_rng([seed, 4])
        if math.isfinite(world.mtbf_s):
            for number in range(world.workers):
                self._at(self._chance.exponential(world.mtbf_s), lambda number=number: self._fail(number))  # type: ignore[misc]

    def outcome(self) -> Outcome:
        self._next_batch()
        while self._done < self._fill + self._batches:
            self._advance()
        return self._result()

    def _advance(self) -> None:
        """Go on to the next event: of the trainer and the failures, or of the workers, whose clock pauses stop."""
        ends = None if self._workers.paused else self._workers.next_s
        wall = math.inf if ends is None else ends + self._paused_s
        if self._events and self._events[0][0] <= wall:
            self._now, _, call = heapq.heappop(self._events)
            if not self._workers.paused:
                self._workers.now = self._now - self._paused_s
            call()
        else:
            assert ends is not None, "nothing happens any more"
            self._now = wall
            self._workers.end_next()

    def _at(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._numbers), call))

    # --- the trainer -------------------------------------------------------------------------------------------------

    def _next_batch(self) -> None:
        self._waits_since = self._now
        self._groups.begin_batch()
        self._look()

    def _look(self) -> None:
        """Take the next batch if the trainer waits for it and it is there."""
        if self._waits_since is None:
            return
        waited_from, self._waits_since = self._waits_since, None  # `take` may begin groups, which must not call again
        taken = self._groups.take()
        if taken is None:
            self._waits_since = waited_from
            return
        totals, tokens = self._totals, sum(group.tokens for group in taken)
        behind = [self._groups.version - version for group in taken for version in group.versions]
        training_s = self._world.training_s(tokens)
        totals.waiting_s += self._now - waited_from
        totals.training_s += training_s
        totals.tokens += tokens
        totals.rollouts += len(behind)
        totals.behind += sum(behind)
        totals.behind_most = max(totals.behind_most, *behind)
        totals.batches += 1
        busy_s = training_s + self._world.other_s
        self._at(busy_s + self._world.update_s - self._world.pause_s, self._pause)

    def _pause(self) -> None:
        if not self._world.pause_s:
            self._publish(0.0)
            return
        self._workers.now = self._now - self._paused_s
        self._workers.paused = True
        self._at(self._world.pause_s, lambda: self._publish(self._world.pause_s))

    def _publish(self, paused_s: float) -> None:
        self._paused_s += paused_s
        version = self._groups.version + 1
        self._workers.resume(version)
        self._groups.published(version)
        self._done += 1
        self._failures = 0
        if self._done == self._fill:
            self._start_counting()
        if self._done < self._fill + self._batches:
            self._next_batch()

    # --- failures ----------------------------------------------------------------------------------------------------

    def _fail(self, number: int) -> None:
        self._totals.failures += 1
        self._failures += 1
        if self._failures > MOST_FAILURES:
            raise ConfigurationError(
                f"Workers fail every {self._world.mtbf_s:g} s (mtbf_s), so rollouts hardly ever end.",
                "Raise mtbf_s, or shorten the rollouts.",
            )
        self._workers.fail(number)
        self._at(self._world.restart_s + self._world.update_s, lambda: self._return(number))

    def _return(self, number: int) -> None:
        self._workers.return_(number)
        self._at(self._chance.exponential(self._world.mtbf_s), lambda: self._fail(number))

    # --- the result --------------------------------------------------------------------------------------------------

    def _counters(self) -> tuple[int, int, int, int, float]:
        lost = self._groups.lost
        sampled = self._groups.sampled_tokens
        return lost.on_arrival, lost.waiting, lost.cancelled, sampled, self._workers.row_seconds()

    def _start_counting(self) -> None:
        self._totals = _Totals(since=self._now)
        self._before = self._counters()

    def _result(self) -> Outcome:
        world, totals, batches = self._world, self._totals, self._totals.batches
        seconds = self._now - totals.since
        after = self._counters()
        on_arrival, waiting, cancelled, sampled, row_s = (b - a for a, b in zip(self._before, after, strict=True))
        all_rollouts = totals.rollouts + on_arrival + waiting + cancelled
        return Outcome(
            batches=batches,
            batch_s=seconds / batches,
            waiting_s=totals.waiting_s / batches,
            training_s=totals.training_s / batches,
            other_s=world.other_s,
            update_s=world.update_s,
            tokens=totals.tokens / batches,
            rollouts=totals.rollouts / batches,
            tokens_per_s=totals.tokens / seconds,
            sampled_tokens_per_s=sampled / seconds,
            staleness=totals.behind / totals.rollouts,
            staleness_max=totals.behind_most,
            dropped=(on_arrival + waiting + cancelled) / all_rollouts,
            on_arrival=on_arrival / all_rollouts,
            in_queue=waiting / all_rollouts,
            cancelled=cancelled / all_rollouts,
            engine_busy=row_s / (world.workers * world.slots * seconds),
            failures=totals.failures / batches,
        )
