"""The session: the objects that the phases of a run share in one process (experiment, ledger, players, observer)."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pvg.config.game import Game
from pvg.config.rollout import Rollouts
from pvg.config.training import Training, Verifier
from pvg.errors import counted
from pvg.game.ledger import Ledger
from pvg.game.players import Players
from pvg.game.roles import PromptBuilder
from pvg.game.states import GameState
from pvg.game.statistics import sample_metrics
from pvg.records import Half, Problem, Role, Rollout
from pvg.rollout.dispatcher import GroupOrder, SampleCall
from pvg.seeds import draw_cyclic, seed_for
from pvg.store.shards import columns_in_memory
from pvg.tasks.task import Task, problems_of_half
from pvg.telemetry.alerts import Alert, verifier_at_chance
from pvg.telemetry.events import Observer, PhaseInfo, Progress, Sample
from pvg.telemetry.spans import SHORTEST_SPAN_S, StepBudget, Tracer, add_seconds, span, trained_seconds

if TYPE_CHECKING:
    from torch import Tensor

    from pvg.telemetry.monitoring import Monitoring
    from pvg.training.trainer import Trainer

TRAINED_PHASES = frozenset({"warmup", "train_verifier", "train_prover"})


class InterruptedByUser(Exception):
    """A commit point found the stop event set; everything is committed."""


@dataclass
class Session:
    """`game` to `verifier`: sections of the experiment. The other sections have become the objects below."""

    seed: int
    commit_every: int  # optimizer steps
    game: Game
    training: Training
    rollout: Rollouts
    verifier: Verifier
    task: Task
    ledger: Ledger
    players: Players
    prompts: PromptBuilder
    observer: Observer
    stop: asyncio.Event
    tracer: Tracer
    evaluates: bool = False  # an attack or a reference: `game.reward` pays the prover, whatever the rules pay it
    longest: int = 0  # tokens of a prompt and its completion, at most
    monitoring: Monitoring | None = None
    phase_metrics: dict[str, float | None] = field(default_factory=dict)  # of the latest finished phase
    _problems: dict[str, list[Problem]] = field(default_factory=dict)
    _outside_steps: dict[str, float] = field(default_factory=dict)  # seconds by part since the last step or phase
    _all_seconds: dict[str, float] = field(default_factory=dict)  # of this process

    @property
    def state(self) -> GameState:
        return self.ledger.state

    def problems(self, half: Half) -> list[Problem]:
        """The training problems of one half; the two halves are disjoint (invariant 4)."""
        if half not in self._problems:
            self._problems[half] = problems_of_half(self.task, half)
        return self._problems[half]

    def halves(self) -> dict[Half, list[Problem]]:
        return {"prover": self.problems("prover"), "verifier": self.problems("verifier")}

    def test_problems(self) -> list[Problem]:
        if "test" not in self._problems:
            self._problems["test"] = list(self.task.problems("test"))
        return self._problems["test"]

    def draw(self, half: Half, start: int, size: int, place: str) -> list[Problem]:
        """`size` problems of a half, from position `start` of its endless shuffle."""
        pool = self.problems(half)
        return [pool[i] for i in draw_cyclic(len(pool), start, size, seed_for(self.seed, place, half))]

    def order(self, problem: Problem, role: Role, group: int, size: int) -> GroupOrder:
        return self.prompts.order(problem, role, group, size)

    # --- reporting ---------------------------------------------------------------------------------------------

    def begin(self, unit: str, total: int, done: int = 0) -> PhaseInfo:
        """Begin a phase of `total` units, `done` of them in an earlier process, and notify the observer and the log."""
        state = self.state
        info = PhaseInfo(state.round, self.game.rounds, state.phase.value, unit, total, done)
        self.observer.phase_started(info)
        self.ledger.log.event("phase", event="start", round=state.round, phase=state.phase.value, step=state.step)
        return info

    def first_step(self) -> None:
        """Charge the time since the previous phase's last step to this phase, not to its first step."""
        add_seconds(self._outside_steps, self._close_budget().exposed)

    def report_step(
        self,
        info: PhaseInfo,
        done: int,
        metrics: Mapping[str, float],
        *,
        whole: bool = True,
        samples: Sequence[Sample] = (),
    ) -> None:
        """Close the step's time budget; report to the observer, the metrics file, the spans file and the sinks. A step
        that is not `whole` omits metrics that an earlier step reported and that are still valid."""
        budget = self._close_budget()
        with span("record"):
            recorded = dict(metrics)
            if info.phase in TRAINED_PHASES:
                recorded["trainer_idle"] = self._log_idle(info, done, budget)
            seconds = {"budget": budget.exposed, "busy": budget.busy}
            if budget.device_s:
                seconds["device_s"] = budget.device_s
            place = {"round": info.round, "phase": info.phase, "step": done}
            self.ledger.record("step", **place, of=info.total, metrics=finite(recorded), **seconds)
            self._record_spans(**place)
            if self.monitoring is not None:
                self.monitoring.step(info.round, info.phase, done, recorded, budget.exposed, budget.busy, whole=whole)
            workers = self.monitoring.workers if self.monitoring is not None else {}
            self.observer.progressed(Progress(done, recorded, workers, samples))

    def _log_idle(self, info: PhaseInfo, done: int, budget: StepBudget) -> float:
        """The share of the step's time in which the trainer did not train. Logs it."""
        trained_s = trained_seconds(budget.exposed)
        idle_s = budget.wall_s - trained_s
        times = {"wall_ms": budget.wall_s * 1e3, "train_ms": trained_s * 1e3, "idle_ms": idle_s * 1e3}
        self.ledger.log.event("step", event="done", phase=info.phase, round=info.round, step=done, **times)
        return idle_s / budget.wall_s if budget.wall_s > 0 else 0.0

    def _record_spans(self, **place: Any) -> None:
        spans = [s for s in self.tracer.take_spans() if s.end_s - s.start_s >= SHORTEST_SPAN_S]
        self.ledger.record_spans(spans, **place)

    def _close_budget(self) -> StepBudget:
        budget = self.tracer.close_step()
        add_seconds(self._all_seconds, budget.exposed)
        return budget

    def finish_phase(self, info: PhaseInfo, metrics: Mapping[str, float], seconds: float) -> None:
        """Report a finished phase. Its `budget` is the time outside of steps, such as opening models and committing."""
        self.phase_metrics = finite(metrics)
        add_seconds(self._outside_steps, self._close_budget().exposed)
        outside, self._outside_steps = self._outside_steps, {}
        place = {"round": info.round, "phase": info.phase}
        self.ledger.record("phase", **place, seconds=seconds, metrics=self.phase_metrics, budget=outside)
        self._record_spans(**place, step=info.total)
        if info.phase == "train_verifier" and (chance := verifier_at_chance(metrics)):
            self.alert([chance], info.total)
        if self.monitoring is not None:
            self.monitoring.phase(info.round, info.phase, metrics)
        self.observer.phase_finished(info, metrics)

    def finish_round(self, metrics: Mapping[str, float]) -> None:
        self.ledger.record("round", round=self.state.round, metrics=finite(metrics))
        if self.monitoring is not None:
            self.monitoring.round(self.state.round, metrics)
        self.observer.round_finished(self.state.round, metrics)

    def finish_run(self, status: str) -> None:
        """Write the process's last record: how it spent all its time."""
        self._close_budget()
        seconds = sum(self._all_seconds.values())
        self.ledger.record("run", status=status, seconds=seconds, budget=self._all_seconds)
        self.ledger.log.event("run", event="stop", status=status, seconds=seconds)

    def tell_rollouts(self, rollouts: Sequence[Rollout], step: int) -> None:
        """Log one `[rollout]` line for a batch: truncation and staleness."""
        version, oldest = self.players.engine.version, min(rollout.version for rollout in rollouts)
        self.ledger.log.event(
            "rollout",
            event="batch",
            trunc_pct=100 * sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts),
            current_step=step,
            ckpt_step=oldest,
            staleness=version - oldest,
        )

    def tell_lost(self, rollouts: int, step: int, how: str) -> None:
        """Log and show that unfinished rollouts are lost."""
        self.ledger.log.event("rollout", event="lost", rollouts=rollouts, step=step)
        self.observer.noticed(f"{counted(rollouts, 'rollout')} {how} (rollout.deadline).")

    def tell_about_excluded_sources(self, excluded: Mapping[str, str]) -> None:
        """Raise an alert for each source of the mixture without any pairs: the verifier learns nothing from it."""
        self.alert(
            [Alert("source_excluded", f"Source {name} has no pairs: {why}.") for name, why in excluded.items()], 0
        )

    def alert(self, alerts: Sequence[Alert], step: int) -> None:
        for alert in alerts:
            self.record_alert(alert, step)
            self.announce(alert, step)

    def record_alert(self, alert: Alert, step: int) -> None:
        place = {"round": self.state.round, "phase": self.state.phase.value, "step": step}
        self.ledger.record("alert", **place, name=alert.name, message=alert.message)

    def announce(self, alert: Alert, step: int) -> None:
        """Send an alert to the sinks, then log and show it. Any thread may call this. The sinks come first, because the
        alert may be about a full disk or a blocked terminal."""
        if self.monitoring is not None:
            self.monitoring.send(alert)
        self.ledger.log.event("alert", name=alert.name, message=alert.message, step=step)
        self.observer.alerted(alert.name, alert.message)

    # --- committing --------------------------------------------------------------------------------------------

    def due(self, step: int, total: int) -> bool:
        """Whether to commit after this step: by the schedule, or because the user asked to stop."""
        # Counts from the last commit, because a commit waits for the end of a sampled batch.
        waited = step - self.ledger.newest.step
        return self.stop.is_set() or waited >= self.commit_every or step >= total

    async def commit(self, **changes: Any) -> None:
        """Commit the state with `changes`, then raise InterruptedByUser if the user asked to stop."""
        await self.commit_state(replace(self.state, **changes))

    async def commit_trainer(
        self, trainer: Trainer[Any], extra: Mapping[str, Tensor] | None = None, **changes: Any
    ) -> None:
        """Begin to commit a trainer after its newest step, with `extra` tensors next to its own. The phase's step
        becomes the trainer's unless `changes` set another. If the trainer copies its state, the commit is written
        beside the next steps, so nothing may change `extra` and `changes`; `settled` waits for it. The time of this
        call counts for the next step, because this step's budget is closed (the commit contains its metrics)."""
        await self.settled()
        with span("checkpoint"):
            tensors, meta = await self.players.compute(trainer.state)
        state = replace(self.state, **{"step": trainer.steps_done, **changes})
        self.ledger.begin_commit(state, ({**tensors, **(extra or {})}, meta))
        if not trainer.copies_state:
            await self.settled()
        await self.check_stop()

    async def settled(self) -> None:
        """Wait for the commit in flight. Call it before anything that the commit adds to the state is read, and before
        the trainer's state is copied again, because memory has room for one copy."""
        with span("checkpoint"):
            await self.ledger.settled()

    async def commit_state(self, state: GameState, finished: Mapping[str, float | None] | None = None) -> None:
        """Commit a state made by `GameState.enter`; `finished`: see Ledger.begin_commit."""
        self.ledger.begin_commit(state, finished=finished)  # outside of the span, which keeps all the waiting
        await self.settled()
        await self.check_stop()

    async def leave_phase(self, state: GameState) -> None:
        """Commit the `state` that enters the next phase, together with the manifest of the finished phase."""
        await self.commit_state(state, self.phase_metrics)
        gc.collect()  # the phase's models may be in reference cycles, and full collections are rare (CalmCollector)

    async def check_stop(self) -> None:
        """Raise InterruptedByUser if the user asked to stop, as soon as the commit in flight is on the disk."""
        if self.stop.is_set():
            await self.settled()
            raise InterruptedByUser


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics for JSON: values that are not finite (such as a mean of nothing) become null."""
    return {name: (float(value) if math.isfinite(value) else None) for name, value in metrics.items()}


async def sample_chunks(
    session: Session,
    info: PhaseInfo,
    chunks: int,
    orders: Callable[[int], tuple[list[GroupOrder], SampleCall]],
    load: Callable[[int], Awaitable[int]],
    examine: Callable[[], Awaitable[Mapping[str, float]]] | None = None,
) -> dict[str, float]:
    """Sample and record the `orders` of each chunk, from the last committed chunk on, and finish the phase. A chunk is
    a step with a commit. `load` gives the engine the weights of a chunk and returns their version. `examine`: more
    metrics, after the last chunk. Returns the metrics of the phase."""
    started, state, done = time.perf_counter(), session.state, info.done
    session.first_step()
    for number in range(state.step, chunks):
        began = time.perf_counter()
        version = await load(number)
        with span("rollout"):
            groups = await session.players.dispatcher.sample(*orders(number))
            rollouts = [rollout for group in groups for rollout in group.rollouts]
        with span("record"):
            session.ledger.keep(rollouts)
            done += len(rollouts)
            metrics = sample_metrics(columns_in_memory(rollouts), time.perf_counter() - began)
        session.report_step(info, done, metrics)
        await session.commit(step=number + 1, version=version)
    with span("record"):
        sampled = await session.ledger.sample_columns(state.round, state.phase.value)
    seconds = time.perf_counter() - started
    metrics = sample_metrics(sampled, seconds)
    if state.step:  # an earlier process sampled a part, and this process does not know its seconds
        del metrics["tokens_per_s"]
    if examine is not None:
        metrics |= await examine()
        seconds = time.perf_counter() - started
    session.finish_phase(info, metrics, seconds)
    return metrics
