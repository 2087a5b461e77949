"""Which part of an evaluation runs, and how much time the rest takes.

    watched = PartsObserver(observer, planned_parts)
    with watched.part(0): ...

An evaluation has a known list of parts, each with its work by kind: rollouts to sample, rollouts to train on, solutions
for a KL, measures. The estimate uses only what this call has measured: seconds per unit of each kind. There is none
before the first unit. If a kind of work remains that has not begun, the estimate is a lower bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from pvg.telemetry.observer import Observer, PhaseInfo, Progress, TimeLeft

TRAINING = ("attack", "baseline")  # phases with the same kind of work: optimizer steps


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A part by its name for people. `work`: units by phase that are not stored yet. `unit_size`: what a unit of a
    training phase is worth in rollouts, so that phases with batches of another size can be compared."""

    name: str
    work: Mapping[str, float]
    unit_size: Mapping[str, float] = field(default_factory=dict)

    def size(self, phase: str) -> float:
        return self.unit_size.get(phase, 1.0)


def kind_of(phase: str) -> str:
    return "training" if phase in TRAINING else phase


class PartsObserver:
    """Passes all reports on, with the part and the time left. `clock`: seconds."""

    def __init__(
        self, observer: Observer, parts: Sequence[PlannedPart], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._observer = observer
        self._parts = parts
        self._clock = clock
        self._place = -1  # of the part that runs
        self._left: dict[str, float] = {}  # units of that part, by kind
        self._seen: set[tuple[str, str]] = set()  # phases of that part, with their units
        self._done: dict[str, float] = {}  # of this call, by kind
        self._seconds: dict[str, float] = {}
        self._phases_s = self._parts_s = 0.0
        self._part_began = self._phase_began = 0.0
        self._info: PhaseInfo | None = None
        self._reached = 0  # units of the phase so far

    @contextmanager
    def part(self, place: int) -> Iterator[None]:
        """The work of a part; `place` counts from 0."""
        part = self._parts[place]
        self._place, self._part_began, self._seen = place, self._clock(), set()
        self._left = {}
        for phase, units in part.work.items():
            self._left[kind_of(phase)] = self._left.get(kind_of(phase), 0.0) + units * part.size(phase)
        try:
            yield
        finally:
            self._parts_s += self._clock() - self._part_began
            self._part_began, self._left = self._clock(), {}

    def left(self) -> TimeLeft | None:
        """The time of all work that is left, 0 at the end; None before anything of it was measured, and outside of a
        part."""
        if self._place < 0:
            return None
        rest = dict(self._left)
        for part in self._parts[self._place + 1 :]:
            for phase, units in part.work.items():
                rest[kind_of(phase)] = rest.get(kind_of(phase), 0.0) + units * part.size(phase)
        wanted = {kind: units for kind, units in rest.items() if units > 0}
        if not wanted and self._done:
            return TimeLeft(0.0)
        known = {kind for kind in wanted if self._done.get(kind)}
        if not known:
            return None
        seconds = sum(wanted[kind] * self._seconds[kind] / self._done[kind] for kind in known)
        return TimeLeft(seconds * self._overhead(), at_least=known != wanted.keys())

    def _overhead(self) -> float:
        """All time of the parts so far divided by that of their phases: scoring and opening models have no phase."""
        parts_s = self._parts_s + self._clock() - self._part_began
        return max(1.0, parts_s / self._phases_s) if self._phases_s > 0 else 1.0

    # --- what the work reports -----------------------------------------------------------------------------------

    def phase_started(self, info: PhaseInfo) -> None:
        self._info, self._reached, self._phase_began = info, info.done, self._clock()
        if (info.phase, info.unit) not in self._seen:  # otherwise it goes on after a saved policy
            self._take(info.phase, info.done)
        self._seen.add((info.phase, info.unit))
        self._observer.phase_started(self._placed(info))

    def progressed(self, progress: Progress) -> None:
        if self._info is not None:
            self._count(self._info, progress.done)
        self._observer.progressed(replace(progress, left=self.left()))

    def phase_finished(self, info: PhaseInfo, metrics: Mapping[str, float]) -> None:
        if self._info is not None:
            if self._reached == self._info.done:  # a phase without progress, such as a KL
                self._count(self._info, info.total)
            self._take(info.phase, max(0, info.total - self._reached))  # an attack may end before its limit
            self._info = None
        self._observer.phase_finished(self._placed(info), metrics)

    def _count(self, info: PhaseInfo, reached: int) -> None:
        """Add finished units and their time."""
        now, units = self._clock(), max(0, reached - self._reached)
        kind, size = kind_of(info.phase), self._parts[self._place].size(info.phase) if self._place >= 0 else 1.0
        self._done[kind] = self._done.get(kind, 0.0) + units * size
        self._seconds[kind] = self._seconds.get(kind, 0.0) + now - self._phase_began
        self._phases_s += now - self._phase_began
        self._phase_began, self._reached = now, max(reached, self._reached)
        self._take(info.phase, units)

    def _take(self, phase: str, units: float) -> None:
        kind, size = kind_of(phase), self._parts[self._place].size(phase) if self._place >= 0 else 1.0
        self._left[kind] = max(0.0, self._left.get(kind, 0.0) - units * size)

    def _placed(self, info: PhaseInfo) -> PhaseInfo:
        if self._place < 0:
            return info
        return replace(info, part=self._place + 1, parts=len(self._parts), label=self._parts[self._place].name)

    def round_finished(self, round_: int, metrics: Mapping[str, float]) -> None:
        self._observer.round_finished(round_, metrics)

    def alerted(self, name: str, message: str) -> None:
        self._observer.alerted(name, message)

    def noticed(self, message: str) -> None:
        self._observer.noticed(message)
