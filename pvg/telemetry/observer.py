"""The interface through which a run reports its progress to the live display or to a test.

A run usually calls an observer from its event loop, so an observer must return at once and must not raise. Only
`alerted` may be called from another thread: an alert about a blocked loop cannot wait for the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PhaseInfo:
    """A phase that begins or ends. `total`: its units of work (rollouts or optimizer steps). `done`: the finished ones,
    which is above 0 after a resume. If the work has parts (an evaluation): the phase belongs to `part` of `parts`, from
    1, which is called `label`. Without parts: 0."""

    round: int
    rounds: int
    phase: str
    unit: str
    total: int
    done: int = 0
    part: int = 0
    parts: int = 0
    label: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` units of the phase, the newest metrics, the seconds by part of the step that just ended, and the newest
    metrics of the worker processes."""

    done: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    budget: Mapping[str, float] = field(default_factory=dict)
    workers: Mapping[str, float] = field(default_factory=dict)


class Observer(Protocol):
    def phase_started(self, info: PhaseInfo) -> None: ...

    def progressed(self, progress: Progress) -> None: ...

    def phase_finished(self, info: PhaseInfo, metrics: Mapping[str, float]) -> None: ...

    def round_finished(self, round_: int, metrics: Mapping[str, float]) -> None: ...

    def alerted(self, name: str, message: str) -> None: ...

    def noticed(self, message: str) -> None:
        """A message for the user: a recovery, a commit on Ctrl-C, a model being loaded."""
        ...


class SilentObserver:
    def phase_started(self, info: PhaseInfo) -> None: ...

    def progressed(self, progress: Progress) -> None: ...

    def phase_finished(self, info: PhaseInfo, metrics: Mapping[str, float]) -> None: ...

    def round_finished(self, round_: int, metrics: Mapping[str, float]) -> None: ...

    def alerted(self, name: str, message: str) -> None: ...

    def noticed(self, message: str) -> None: ...
