"""TRAIN_PROVER: the prover starts as `game.start` says, and plays both roles against the round's verifier.

The phase ends after its steps, or earlier if the sneaky role catches up (`StopRule`; Kirchner et al. 2024).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from pvg.config.game import StopAfterSteps, StopAtScoreParity
from pvg.errors import StateError, counted
from pvg.game.batch_logprobs import LogprobSource
from pvg.game.on_policy import OnPolicySource
from pvg.game.players import Players
from pvg.game.prefetch import Prefetcher
from pvg.game.round_verifier import read_verifier
from pvg.game.session import Session, finite
from pvg.game.simultaneous import VerifierUpdates, open_updates
from pvg.game.states import GameState, Phase
from pvg.game.statistics import sync_metrics
from pvg.models.adapters import AdaptedModel
from pvg.models.language_model import LanguageModel
from pvg.models.low_rank import LowRankAdapter
from pvg.models.starts import open_learner
from pvg.rollout.dispatcher import PartialSampling
from pvg.store.checkpoints import TENSORS_FILE
from pvg.store.run_players import adapter_name, final_verifier_name, prover_weights_name, verifier_weights_name
from pvg.telemetry.alerts import Alerts
from pvg.telemetry.observer import PhaseInfo
from pvg.telemetry.spans import span
from pvg.training.batch import MinibatchSource, PolicyBatch
from pvg.training.losses import PolicyObjective
from pvg.training.optimizer import OptimizerSettings
from pvg.training.trainer import Trainer
from pvg.verifier.backend import ScoringModel

if TYPE_CHECKING:
    from torch import Tensor


# Batches before score_parity can end a phase: the averages need about as many (StopRule.decay).
MIN_STEPS = 10


@dataclass
class StopRule:
    """`score_parity`: stop when the EMA of the mean sneaky-incorrect score reaches that of helpful-correct.

    A batch that lacks one kind leaves that kind's average unchanged. `seen` counts batches.
    """

    stop: StopAfterSteps | StopAtScoreParity
    sneaky: float | None = None
    helpful: float | None = None
    seen: int = 0
    decay: float = 0.9  # of the averages: about the last ten batches, as many as score_parity waits for

    def observe(self, metrics: Mapping[str, float]) -> bool:
        """Add the metrics of a batch. Returns whether the phase ends now."""
        self.seen += 1
        self.sneaky = self._ema(self.sneaky, metrics.get("score_sneaky_incorrect", math.nan))
        self.helpful = self._ema(self.helpful, metrics.get("score_helpful_correct", math.nan))
        if not isinstance(self.stop, StopAtScoreParity) or self.seen < MIN_STEPS:
            return False
        return self.sneaky is not None and self.helpful is not None and self.sneaky >= self.helpful

    def state(self) -> dict[str, Any]:
        return {"sneaky": self.sneaky, "helpful": self.helpful, "seen": self.seen}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.sneaky, self.helpful, self.seen = state["sneaky"], state["helpful"], state["seen"]

    def _ema(self, before: float | None, value: float) -> float | None:
        if not math.isfinite(value):
            return before
        return value if before is None else self.decay * before + (1 - self.decay) * value


class WeightsReader(Protocol):
    """A run's finished weights: the ledger of a run in progress, or of a run that is only read."""

    @property
    def state(self) -> GameState: ...

    def read_weights(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]: ...


class RunWithPlayers(Protocol):
    """The parts that opening a finished model needs: a `Session` has them, and so does a run under evaluation."""

    @property
    def players(self) -> Players: ...

    @property
    def ledger(self) -> WeightsReader: ...


class TrainingStop(Protocol):
    """Decides whether a prover's training ends early (`StopRule`, or an attack's goal). Commits store its state.
    The phase calls `observe` once per batch, after the last optimizer step on it."""

    def observe(self, metrics: Mapping[str, float]) -> bool: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


async def train_prover(session: Session) -> None:
    """Run the phase from the last committed step on, then enter CHECKPOINT."""
    info = session.begin("steps", session.experiment.training.steps, session.state.step)
    started = time.perf_counter()
    with span("open_models"):
        verifier, threshold = await open_round_verifier(session, session.state.round)
        from_previous = session.experiment.game.start.kind == "previous"
        learner = await session.players.compute(lambda: open_round_learner(session, from_previous=from_previous))
    try:
        with session.players.divided_workers():
            with span("open_models"):
                updates = await open_updates(session, verifier, threshold)
                phase = ProverPhase(session, info, verifier, threshold, learner, updates=updates)
            await phase.play()
        phase.tell_unfinished()
        with span("checkpoint"):
            names = await save_prover(session, learner, phase.done)
            if updates is not None:
                names.append(await updates.save())
        session.finish_phase(info, phase.last_metrics, time.perf_counter() - started)
        entered = session.state.enter(Phase.CHECKPOINT)
        # Commits the version too: it may have changed since the phase's last commit.
        await session.leave_phase(replace(entered, weights=(*entered.weights, *names), version=phase.version))
    finally:
        learner.close()
        verifier.close()


def open_round_learner(session: Session, *, from_previous: bool) -> LanguageModel:
    """The prover at the start of the round's training: the base prover, or the previous round's if there is one. The
    caller closes it."""
    round_, read = session.state.round, session.ledger.read_weights
    if not from_previous or round_ == 0:
        return open_learner(session.players, round_)
    name = prover_weights_name(round_ - 1)
    if session.experiment.training.adapters.kind == "none":
        tensors, _ = read(name)
        learner = open_learner(session.players, round_)
        learner.load_weights(tensors)
        return learner
    low_rank, meta = read(adapter_name(name))
    learner = open_learner(session.players, round_)
    assert isinstance(learner, AdaptedModel)
    learner.load_adapter(LowRankAdapter(low_rank, meta["config"]))
    return learner


async def policy_of(session: Session, learner: LanguageModel) -> tuple[dict[str, Tensor], LowRankAdapter | None]:
    """A learner's tensors of the whole model, and its adapter if it has one, to publish or save."""
    return await session.players.compute(
        lambda: (learner.weights(), learner.adapter() if isinstance(learner, AdaptedModel) else None)
    )


async def save_prover(session: Session, learner: LanguageModel, steps: int) -> list[str]:
    """Write the round's prover; returns the names to commit."""
    meta = {"round": session.state.round, "steps": steps}
    return await save_policy(session, learner, prover_weights_name(session.state.round), meta)


async def save_policy(session: Session, learner: LanguageModel, name: str, meta: Mapping[str, Any]) -> list[str]:
    """Write a policy as `name`, with its adapter next to it if it has one; returns the names to commit."""
    tensors, adapter = await policy_of(session, learner)
    files = await session.players.compute(lambda: learner.description(TENSORS_FILE))
    await session.ledger.save_weights(name, tensors, meta, files)
    if adapter is None:
        return [name]
    await session.ledger.save_weights(adapter_name(name), adapter.tensors, {**meta, "config": dict(adapter.config)})
    return [name, adapter_name(name)]


def read_prover(session: RunWithPlayers, source: str) -> tuple[dict[str, Tensor], LowRankAdapter | None]:
    """Read what `save_prover` wrote in the round of `source`."""
    return read_policy(session.ledger, f"{source}-prover")


def read_policy(ledger: WeightsReader, name: str) -> tuple[dict[str, Tensor], LowRankAdapter | None]:
    """Read what `save_policy` wrote as `name`."""
    tensors, _ = ledger.read_weights(name)
    if adapter_name(name) not in ledger.state.weights:
        return tensors, None
    low_rank, meta = ledger.read_weights(adapter_name(name))
    return tensors, LowRankAdapter(low_rank, meta["config"])


async def open_round_verifier(session: RunWithPlayers, round_: int) -> tuple[ScoringModel, float]:
    """The frozen verifier of a round (one model or an ensemble) and its acceptance threshold; the caller closes it."""
    players, read = session.players, session.ledger.read_weights
    final = final_verifier_name(round_)  # exists if the verifier trained during the prover phase, and that has ended
    name = final if final in session.ledger.state.weights else verifier_weights_name(round_)
    return await players.compute(lambda: read_verifier(players, read, name))


class PhaseSource(LogprobSource, Protocol):
    """A phase's source of batches: `OnPolicySource`, or games (pvg.game.play_phase.PlaySource)."""

    batches_done: int
    metrics: dict[str, float]
    prefetcher: Prefetcher | None
    partial: PartialSampling | None

    async def next_batch(self) -> PolicyBatch: ...

    def start(self, version: int) -> None: ...

    def published(self, version: int) -> None: ...

    async def close(self) -> None: ...

    def progress(self) -> dict[str, Any]: ...

    def load_progress(self, progress: Mapping[str, Any]) -> int: ...


class ProverPhase:
    """One prover phase: the trainer, its source of batches, the stop rule and the alerts, restored from the last
    commit. `updates`: trains the verifier during the phase; None: it is frozen. Without a verifier, a subclass opens a
    source that needs none."""

    def __init__(
        self,
        session: Session,
        info: PhaseInfo,
        verifier: ScoringModel | None,
        threshold: float,
        learner: LanguageModel,
        stop_rule: TrainingStop | None = None,
        updates: VerifierUpdates | None = None,
    ) -> None:
        """`stop_rule`: None takes the rule of the session's game."""
        experiment = session.experiment
        training = experiment.training
        self.session, self.info, self.learner, self.verifier = session, info, learner, verifier
        objective = PolicyObjective(training, experiment.rollout, learner.tokenizer.pad_id)
        self.scorer = None if verifier is None else session.players.scorer(verifier, beside_trainer=True)
        self.updates = updates
        self.source: PhaseSource = self.open_source(objective, threshold)
        self.minibatches = MinibatchSource(self.source, training.minibatches)
        learner.require_gradients()
        optimizer = OptimizerSettings(learning_rate=training.learning_rate, total_steps=max(1, training.steps))
        self.workers = self.source.workers = session.players.prover_workers(experiment, learner.module)
        self.ranks = session.players.prover_ranks(experiment, learner.module, optimizer, session.ledger.read_checkpoint)
        self.trainer: Trainer[PolicyBatch] = Trainer(
            learner.module,
            objective,
            optimizer,
            self.minibatches,
            executor=session.players.executor,
            precision=training.precision,
            gradient_checkpointing=training.gradient_checkpointing,
            memory=objective.memory,
            events=session.ledger.log,
            workers=self.workers,
            ranks=self.ranks,
        )
        self.stop_rule: TrainingStop = StopRule(experiment.game.stop) if stop_rule is None else stop_rule
        self.alerts = Alerts(two_roles=0 < experiment.game.sneaky_share < 1)
        self.stopped = False
        self.version = session.state.version
        self.last_metrics: dict[str, float] = {}
        self._resume()

    def open_source(self, objective: PolicyObjective, threshold: float) -> PhaseSource:
        """Called once, by the constructor."""
        assert self.scorer is not None
        return OnPolicySource(self.session, self.scorer, threshold, objective, self.learner)

    @property
    def done(self) -> int:
        return self.trainer.steps_done

    async def play(self) -> None:
        # The start weights get a new version: the engine may hold those of the last mint or evaluation.
        if self.done == 0:
            self.version += 1
        with span("sync"):
            await self._publish()
        with span("open_models"):
            if self.verifier is not None:
                await self.session.players.prepare_scoring(self.verifier)
            if self.workers is not None:
                await self.workers.prepare()
            if self.ranks is not None:
                await self.ranks.prepare()
        self.source.start(self.version)
        self.session.first_step()
        try:
            while self.done < self.info.total and not self.stopped:
                await self._step()
        finally:
            with span("rollout"):
                await self.source.close()
            if self.workers is not None:
                await self.workers.close()
            if self.ranks is not None:
                await self.ranks.close()
            if self.updates is not None:
                await self.updates.close()

    async def _step(self) -> None:
        session = self.session
        new_batch = self.minibatches.pending == 0  # if so, this step samples a batch
        report = await self.trainer.step()
        if report is None:
            raise StateError("The source of prover batches ended before the phase did; this is a defect of pvg.")
        whole_batch = self.minibatches.pending == 0
        if whole_batch:
            self.version += 1
            with span("sync"):
                await self._publish()
            self.source.published(self.version)
        synced = sync_metrics(session.players.last_sync, session.players.load_at_sync) if whole_batch else {}
        updated: dict[str, float] = {}
        if self.updates is not None and whole_batch and self.updates.due(self.source.batches_done):
            assert self.scorer is not None
            updated = await self.updates.play(self.scorer)
            self._take_threshold(self.updates)
        of_step = {**report.metrics, **synced, **updated}
        metrics = self.last_metrics = {**self.source.metrics, **of_step}
        session.alert(self.alerts.check(metrics, new_batch=new_batch), self.done)
        if whole_batch:
            self.stopped = self.stop_rule.observe(metrics)
        # Only the record of a batch's first step has the batch's metrics, so that readers count them once.
        session.report_step(self.info, self.done, metrics if new_batch else of_step, whole=new_batch)
        if whole_batch and (session.due(self.done, self.info.total) or self.stopped):
            # The checkpoint includes the score cache, so that a resumed run asks the verifier for the same scores. A
            # score depends on its batch mates in its last bits, and these would reach the weights. Prefetch is not
            # reproducible bit by bit anyway, and scores may be in flight at any time, so it stores no cache.
            ahead = self.source.prefetcher is not None
            cache: dict[str, Tensor] = {}
            if self.scorer is not None and not ahead:
                cache = await session.players.off_loop(self.scorer.cache_state)
            progress = self._progress()
            if self.updates is not None:
                tensors, progress["updates"] = await self.updates.state()
                cache |= tensors
            await session.commit_trainer(self.trainer, cache, version=self.version, progress=progress)

    def _take_threshold(self, updates: VerifierUpdates) -> None:
        assert isinstance(self.source, OnPolicySource)
        self.source.threshold = updates.threshold

    async def _publish(self) -> None:
        tensors, adapter = await policy_of(self.session, self.learner)
        await self.session.players.publish(tensors, self.version, adapter)

    def tell_unfinished(self) -> None:
        """Report carried rollouts at the end of the phase: the next policy does not continue them."""
        partial = self.source.partial
        if partial is not None and partial.carried:
            self._tell_lost(partial.carried, "were unfinished when the phase ended and are dropped")

    def _tell_lost(self, rollouts: int, how: str) -> None:
        self.session.ledger.log.event("rollout", event="lost", rollouts=rollouts, step=self.done)
        self.session.observer.noticed(f"{counted(rollouts, 'rollout')} {how} (rollout.deadline).")

    # --- resuming ----------------------------------------------------------------------------------------------

    def _progress(self) -> dict[str, Any]:
        return {
            **self.source.progress(),
            "version": self.version,
            "stopped": self.stopped,
            "stop_rule": self.stop_rule.state(),
            "alerts": self.alerts.state(),
            "metrics": finite(self.last_metrics),
        }

    def _resume(self) -> None:
        state = self.session.state
        checkpoint = self.session.ledger.read_checkpoint()
        if checkpoint is None:
            return
        tensors, meta = checkpoint
        if self.updates is not None:
            assert self.scorer is not None
            tensors = self.updates.load_state(tensors, state.progress["updates"], self.scorer)
            self._take_threshold(self.updates)
        cache = {name: tensor for name, tensor in tensors.items() if name.startswith("scores.")}
        if self.scorer is not None and self.source.prefetcher is None:
            self.scorer.load_cache_state(cache)
        self.trainer.load_state({name: t for name, t in tensors.items() if name not in cache}, meta)
        if lost := self.source.load_progress(state.progress):
            self._tell_lost(lost, "were unfinished when the run stopped and are lost")
        self.version = state.progress["version"]
        self.stopped = state.progress["stopped"]
        self.stop_rule.load_state(state.progress["stop_rule"])
        self.alerts.load_state(state.progress["alerts"])
        self.last_metrics = {k: math.nan if v is None else v for k, v in state.progress["metrics"].items()}
