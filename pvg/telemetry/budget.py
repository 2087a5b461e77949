"""Where a step's time goes: named parts that nest, and the rest as `unaccounted`, summing to the wall time.

    budget = StepBudget()
    with budget.part("rollout"):
        ...
        with budget.part("grade"):   # charged to "grade" alone, not to "rollout"
            ...
    seconds = budget.close()         # {"rollout": 0.21, "grade": 0.01, "unaccounted": 0.001}

Invariant: the values `close` returns sum to the wall time since the budget opened or last closed (invariant 6).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

UNACCOUNTED = "unaccounted"


@dataclass(slots=True)
class Span:
    """One part as it ran: seconds since the budget's clock began, `depth` 0 for an outermost part."""

    name: str
    start_s: float
    end_s: float
    depth: int


@dataclass(slots=True)
class _Open:
    name: str
    start: float
    inner: float = 0.0  # seconds already charged to parts inside this one


@dataclass
class StepBudget:
    """The budget of one step after the other, for the one task that drives the steps. Not for concurrent tasks."""

    clock: Callable[[], float] = time.perf_counter
    spans: list[Span] = field(default_factory=list)
    _seconds: dict[str, float] = field(default_factory=dict)
    _open: list[_Open] = field(default_factory=list)
    _began: float = 0.0
    _origin: float = 0.0

    def __post_init__(self) -> None:
        self._began = self._origin = self.clock()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge the time inside to `name`, less what parts inside it charge to themselves."""
        opened = _Open(name, self.clock())
        self._open.append(opened)
        try:
            yield
        finally:
            end = self.clock()
            self._open.pop()
            whole = end - opened.start
            self._charge(name, whole - opened.inner)
            if self._open:
                self._open[-1].inner += whole
            self.spans.append(Span(name, opened.start - self._origin, end - self._origin, len(self._open)))

    def charge(self, seconds: Mapping[str, float]) -> None:
        """Move time measured elsewhere (a trainer's own timers) out of the part that is open now into named parts.

        Raises RuntimeError when no part is open: there would be nothing to take the time from.
        """
        if not self._open:
            raise RuntimeError("StepBudget.charge needs an open part to take the time from.")
        for name, amount in seconds.items():
            self._charge(name, amount)
            self._open[-1].inner += amount

    def close(self) -> dict[str, float]:
        """Seconds by part since the last close, with `unaccounted`; begins the next step."""
        if self._open:
            raise RuntimeError(f"StepBudget.close inside the open part {self._open[-1].name!r}.")
        now = self.clock()
        seconds, self._seconds = self._seconds, {}
        seconds[UNACCOUNTED] = (now - self._began) - sum(seconds.values())
        self._began = now
        return seconds

    def take_spans(self) -> list[Span]:
        spans, self.spans = self.spans, []
        return spans

    def _charge(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
