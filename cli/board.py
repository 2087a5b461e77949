"""What a watched run has told so far: the state behind the live display and the plain lines. No drawing here.

Invariant: every number on the display comes from the observer's calls; nothing is extrapolated but the ETA.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pvg.reporting.formats import HOME_PHASES, total_budget
from pvg.telemetry.observer import PhaseInfo, Progress

if TYPE_CHECKING:
    from pvg.reporting.run_summary import RunSummary

HISTORY = 600  # points kept per metric: a sparkline shows fewer
RATE_WINDOW = 20  # the rate is taken over this many reports, so that one slow step does not swing the ETA
BUDGET_WINDOW = 10  # steps that the time budget is averaged over

PHASES = ("mint", "train_verifier", "train_prover", "checkpoint")


@dataclass
class Board:
    """Collects an observer's calls. `clock` gives seconds and is replaced in tests."""

    experiment: str
    run: str
    rounds: int
    clock: Callable[[], float] = time.monotonic
    phases: tuple[str, ...] = PHASES  # the phases of a round, in order
    once: bool = True  # each comes once in a round; false: some come again, and nobody knows how long all will take
    info: PhaseInfo | None = None
    done: int = 0
    series: dict[str, deque[float]] = field(default_factory=dict)
    rounds_done: dict[int, dict[str, float]] = field(default_factory=dict)
    phase_seconds: dict[tuple[int, str], float] = field(default_factory=dict)
    alerts: list[tuple[str, str]] = field(default_factory=list)
    newest: dict[str, float] = field(default_factory=dict)  # value of each metric that a step of the phase has reported

    def __post_init__(self) -> None:
        self.started = self.clock()
        self.phase_began = self.started
        self._marks: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)
        self._at_home: set[str] = set()
        self._budgets: deque[dict[str, float]] = deque(maxlen=BUDGET_WINDOW)

    # --- what the observer is told ---------------------------------------------------------------------------------

    def start_phase(self, info: PhaseInfo) -> None:
        self.info, self.done, self.rounds = info, info.done, info.rounds
        self.phase_began = self.clock()
        if not self.once:
            self.phase_seconds.pop((info.round, info.phase), None)
        self._marks.clear()
        self._marks.append((self.phase_began, info.done))
        self._budgets.clear()
        self.newest.clear()

    def progress(self, progress: Progress) -> None:
        self.done = progress.done
        self._marks.append((self.clock(), progress.done))
        if progress.budget:
            self._budgets.append(dict(progress.budget))
        self.newest |= progress.metrics
        self._record(progress.metrics, self.info.phase if self.info else "")

    def finish_phase(self, info: PhaseInfo, metrics: Mapping[str, float]) -> None:
        self.phase_seconds[info.round, info.phase] = self.clock() - self.phase_began
        self.done = info.total
        # Metrics that a step has reported are not reported again.
        self._record({name: value for name, value in metrics.items() if name not in self.newest}, info.phase)

    def finish_round(self, round_: int, metrics: Mapping[str, float]) -> None:
        self.rounds_done[round_] = dict(metrics)

    def alert(self, name: str, message: str) -> None:
        self.alerts.append((name, message))

    def recall(self, summary: RunSummary) -> None:
        """Take in what a run told before it stopped, so that its lines go on where they ended."""
        self.rounds_done |= summary.rounds
        self.alerts += [(alert.name, alert.message) for alert in summary.alerts]
        for step in summary.steps:
            self._record(step.metrics, step.phase)
        of_steps = set(self.series)
        for phase in summary.phases:
            if phase.finished:
                told_at_the_end = {name: value for name, value in phase.metrics.items() if name not in of_steps}
                self._record(told_at_the_end, phase.phase)

    def _record(self, metrics: Mapping[str, float], phase: str) -> None:
        for name, value in metrics.items():
            series = self.series.setdefault(name, deque(maxlen=HISTORY))
            if HOME_PHASES.get(name) == phase and name not in self._at_home:
                self._at_home.add(name)
                series.clear()
            if name not in self._at_home or HOME_PHASES[name] == phase:
                series.append(float(value))

    # --- what is shown ---------------------------------------------------------------------------------------------

    @property
    def elapsed(self) -> float:
        return self.clock() - self.started

    def latest(self, name: str) -> float | None:
        """The newest finite value of a metric."""
        return next((value for value in reversed(self.series.get(name, ())) if math.isfinite(value)), None)

    def rate(self) -> float | None:
        """Units of work per second over the last reports; None before the second one."""
        if len(self._marks) < 2:
            return None
        (begin, first), (end, last) = self._marks[0], self._marks[-1]
        return (last - first) / (end - begin) if end > begin and last > first else None

    def phase_eta(self) -> float | None:
        """Seconds that the phase still takes at the present rate."""
        rate = self.rate()
        if self.info is None or rate is None:
            return None
        left = max(0, self.info.total - self.done) / rate
        return max(0.0, left - (self.clock() - self._marks[-1][0]))

    def game_eta(self) -> float | None:
        """Seconds that the whole game still takes, once every kind of phase has been timed.

        A phase of a later round is taken to last as long as the latest finished one of its kind.
        """
        phase_eta = self.phase_eta()
        if self.info is None or self.info.phase not in self.phases or phase_eta is None or not self.once:
            return None
        lasted: dict[str, float] = {}
        for (_, phase), seconds in self.phase_seconds.items():
            lasted[phase] = seconds
        now = self.phases.index(self.info.phase)
        to_come = [*self.phases[now + 1 :], *(self.phases * (self.rounds - self.info.round - 1))]
        if not all(phase in lasted for phase in to_come):
            return None
        return phase_eta + sum(lasted[phase] for phase in to_come)

    def budget(self) -> dict[str, float]:
        """Mean seconds per step by part, over the last steps; the largest first, `unaccounted` last."""
        totals = total_budget(self._budgets)
        return {part: seconds / len(self._budgets) for part, seconds in totals.items()}

    def phase_state(self, phase: str) -> str:
        """`done`, `now` or `next` in the current round."""
        if self.info is None:
            return "next"
        if (self.info.round, phase) in self.phase_seconds:
            return "done"
        if phase == self.info.phase:
            return "now"
        if (
            phase in self.phases
            and self.info.phase in self.phases
            and self.phases.index(phase) < self.phases.index(self.info.phase)
        ):
            return "done"
        return "next"
