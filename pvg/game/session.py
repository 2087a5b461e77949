"""What the phases of a run share while one process plays it: the experiment, the ledger, the players, the observer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pvg.experiment import Experiment
from pvg.game.ledger import Checkpoint, Ledger
from pvg.game.players import Players
from pvg.game.roles import Render
from pvg.game.seeds import draw_cyclic, seed_for
from pvg.game.states import GameState
from pvg.records import Half, Problem, Role
from pvg.rollout.dispatcher import GroupOrder
from pvg.tasks.halves import problems_of_half
from pvg.tasks.task import Task
from pvg.telemetry.alerts import Alert
from pvg.telemetry.budget import StepBudget
from pvg.telemetry.observer import Observer, PhaseInfo, Progress

if TYPE_CHECKING:
    from torch import Tensor

    from pvg.training.trainer import Trainer


class InterruptedByUser(Exception):
    """The stop event was seen at a commit point; everything is committed."""


@dataclass
class Session:
    experiment: Experiment
    task: Task
    ledger: Ledger
    players: Players
    render: Render
    observer: Observer
    stop: asyncio.Event
    budget: StepBudget = field(default_factory=StepBudget)
    phase_metrics: dict[str, float | None] = field(default_factory=dict)  # of the newest finished phase
    _problems: dict[str, list[Problem]] = field(default_factory=dict)

    @property
    def state(self) -> GameState:
        return self.ledger.state

    @property
    def seed(self) -> int:
        return self.experiment.seed

    def problems(self, half: Half) -> list[Problem]:
        """The training problems of one half; prover and verifier problems are disjoint (invariant 4)."""
        if half not in self._problems:
            self._problems[half] = problems_of_half(self.task, half)
        return self._problems[half]

    def test_problems(self) -> list[Problem]:
        if "test" not in self._problems:
            self._problems["test"] = list(self.task.problems("test"))
        return self._problems["test"]

    def draw(self, half: Half, start: int, size: int, place: str) -> list[Problem]:
        """`size` problems of a half from position `start` of its endless shuffle."""
        pool = self.problems(half)
        return [pool[i] for i in draw_cyclic(len(pool), start, size, seed_for(self.seed, place, half))]

    def order(self, problem: Problem, role: Role, group: int, size: int) -> GroupOrder:
        return GroupOrder(problem=problem, role=role, prompt_ids=self.render(problem, role), group=group, size=size)

    # --- telling -----------------------------------------------------------------------------------------------

    def begin(self, unit: str, total: int, done: int = 0) -> PhaseInfo:
        """Open a phase of `total` units, `done` of them in an earlier process; tell everybody who watches."""
        state = self.state
        info = PhaseInfo(state.round, self.experiment.game.rounds, state.phase.value, unit, total, done)
        self.observer.phase_started(info)
        self.ledger.log.event("phase", event="start", round=state.round, phase=state.phase.value, step=state.step)
        self.budget.close()
        self.budget.take_spans()
        return info

    def report_step(self, info: PhaseInfo, done: int, metrics: Mapping[str, float]) -> None:
        """Close the step's budget; tell the observer, the metrics file and the spans file."""
        seconds = self.budget.close()
        place = {"round": info.round, "phase": info.phase, "step": done}
        self.ledger.record("step", **place, of=info.total, metrics=finite(metrics), budget=seconds)
        self.ledger.record_spans(self.budget.take_spans(), **place)
        self.observer.progressed(Progress(done, dict(metrics), seconds))

    def finish_phase(self, info: PhaseInfo, metrics: Mapping[str, float], seconds: float) -> None:
        self.phase_metrics = finite(metrics)
        self.ledger.record("phase", round=info.round, phase=info.phase, seconds=seconds, metrics=self.phase_metrics)
        self.observer.phase_finished(info, metrics)

    def tell_about_excluded_sources(self, excluded: Mapping[str, str]) -> None:
        """Alert to sources of the mixture that hold no pair at all: the verifier learns without them."""
        self.alert(
            [Alert("source_excluded", f"Source {name} has no pairs: {why}.") for name, why in excluded.items()], 0
        )

    def alert(self, alerts: Sequence[Alert], step: int) -> None:
        state = self.state
        for alert in alerts:
            self.ledger.record(
                "alert",
                round=state.round,
                phase=state.phase.value,
                step=step,
                name=alert.name,
                message=alert.message,
            )
            self.ledger.log.event("alert", name=alert.name, message=alert.message, step=step)
            self.observer.alerted(alert.name, alert.message)

    # --- committing --------------------------------------------------------------------------------------------

    def due(self, step: int, total: int) -> bool:
        """Whether a step is a commit point by the schedule, or because the user asked to stop."""
        # Since the last commit, not multiples: a commit has to wait for the end of a sampled batch.
        waited = step - self.state.step
        return self.stop.is_set() or waited >= self.experiment.store.commit_every or step >= total

    def commit(self, checkpoint: Checkpoint | None = None, **changes: Any) -> None:
        """Commit the state with `changes`; raises InterruptedByUser afterwards if a stop was asked for."""
        with self.budget.part("checkpoint"):
            self.ledger.commit(replace(self.state, **changes), checkpoint)
        self.check_stop()

    def commit_trainer(self, trainer: Trainer[Any], extra: Mapping[str, Tensor] | None = None, **changes: Any) -> None:
        """Commit a trainer after its newest step, with `extra` tensors beside its own. The time is charged to the next
        step: this one's budget is closed, for its metrics are part of the commit."""
        with self.budget.part("checkpoint"):
            tensors, meta = trainer.state()
        self.commit(({**tensors, **(extra or {})}, meta), step=trainer.steps_done, **changes)

    def commit_state(self, state: GameState) -> None:
        """Commit a state made by `GameState.enter`."""
        with self.budget.part("checkpoint"):
            self.ledger.commit(state)
        self.check_stop()

    def leave_phase(self, state: GameState) -> None:
        """Commit the `state` that enters the next phase, and with it the manifest of the one that is finished."""
        with self.budget.part("checkpoint"):
            self.ledger.commit(state, finished=self.phase_metrics)
        self.check_stop()

    def check_stop(self) -> None:
        if self.stop.is_set():
            raise InterruptedByUser


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as JSON takes them: what is not finite (a mean over nothing) becomes null."""
    return {name: (float(value) if math.isfinite(value) else None) for name, value in metrics.items()}
