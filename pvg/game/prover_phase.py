"""TRAIN_PROVER: from its initial weights, the prover plays both roles against the round's frozen verifier."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pvg.errors import StateError
from pvg.game.on_policy import OnPolicySource
from pvg.game.players import Players
from pvg.game.seeds import seed_for
from pvg.game.session import Session, finite
from pvg.game.simultaneous import VerifierUpdates, final_verifier_name, open_updates
from pvg.game.states import Phase
from pvg.game.statistics import sync_metrics
from pvg.game.stopping import StopRule
from pvg.game.verifier_phase import verifier_weights_name
from pvg.models.adapters import AdaptedModel, attach_adapters
from pvg.models.heads import VerifierModel
from pvg.models.language_model import LanguageModel
from pvg.models.low_rank import Adapter
from pvg.records import source_of_round
from pvg.telemetry.alerts import Alerts
from pvg.telemetry.observer import PhaseInfo
from pvg.telemetry.spans import span
from pvg.training.batch import MinibatchSource, PolicyBatch
from pvg.training.losses import PolicyObjective
from pvg.training.optimizer import OptimizerSettings
from pvg.training.trainer import Trainer

if TYPE_CHECKING:
    from torch import Tensor


def prover_weights_name(round_: int) -> str:
    return f"{source_of_round(round_)}-prover"


def adapter_name(weights_name: str) -> str:
    return f"{weights_name}-adapter"


async def train_prover(session: Session) -> None:
    """Play the phase from the last committed step on and enter CHECKPOINT."""
    info = session.begin("steps", session.experiment.training.steps, session.state.step)
    started = time.perf_counter()
    with span("open_models"):
        verifier, threshold = await open_round_verifier(session, session.state.round)
        learner = await session.players.compute(lambda: open_learner(session.players, session.state.round))
    try:
        with span("open_models"):
            updates = await open_updates(session, verifier, threshold)
            phase = ProverPhase(session, info, verifier, threshold, learner, updates)
        await phase.play()
        phase.tell_unfinished()
        with span("checkpoint"):
            names = await save_prover(session, learner, phase.done)
            if updates is not None:
                names.append(await updates.save())
        session.finish_phase(info, phase.last_metrics, time.perf_counter() - started)
        entered = session.state.enter(Phase.CHECKPOINT)
        # The version too: without a step, or after a step within a batch, no commit of the phase has told it yet.
        await session.leave_phase(replace(entered, weights=(*entered.weights, *names), version=phase.version))
    finally:
        learner.close()
        verifier.close()


def open_learner(players: Players, round_: int) -> LanguageModel:
    """The prover as the training of every round starts from it, with adapters where these are what is trained. The
    caller closes it. Raises what `attach_adapters` raises."""
    experiment, training = players.experiment, players.experiment.training
    if not training.lora_rank:
        return players.base.copy()
    seed = seed_for(experiment.seed, round_, "adapters")
    return attach_adapters(players.base, training.lora_rank, training.lora_alpha, seed)


async def policy_of(session: Session, learner: LanguageModel) -> tuple[dict[str, Tensor], Adapter | None]:
    """What is published and saved of a learner: the whole model's tensors, and its adapters where it has them."""
    return await session.players.compute(
        lambda: (learner.weights(), learner.adapter() if isinstance(learner, AdaptedModel) else None)
    )


async def save_prover(session: Session, learner: LanguageModel, steps: int) -> list[str]:
    """Write the round's prover; the names under which it is to be committed."""
    tensors, adapter = await policy_of(session, learner)
    name, meta = prover_weights_name(session.state.round), {"round": session.state.round, "steps": steps}
    await session.ledger.save_weights(name, tensors, meta)
    if adapter is None:
        return [name]
    await session.ledger.save_weights(adapter_name(name), adapter.tensors, {**meta, "config": dict(adapter.config)})
    return [name, adapter_name(name)]


def read_prover(session: Session, source: str) -> tuple[dict[str, Tensor], Adapter | None]:
    """What `save_prover` wrote in the round of `source`."""
    name = f"{source}-prover"
    tensors, _ = session.ledger.read_weights(name)
    if adapter_name(name) not in session.state.weights:
        return tensors, None
    low_rank, meta = session.ledger.read_weights(adapter_name(name))
    return tensors, Adapter(low_rank, meta["config"])


async def open_round_verifier(session: Session, round_: int) -> tuple[VerifierModel, float]:
    """The frozen verifier of a round and its acceptance threshold; the caller closes it."""

    final = final_verifier_name(round_)  # there where it went on learning beside the prover, which is over

    def opened() -> tuple[VerifierModel, float]:
        name = final if final in session.state.weights else verifier_weights_name(round_)
        tensors, meta = session.ledger.read_weights(name)
        verifier = session.players.open_verifier()
        verifier.load_trainable_state(tensors)
        return verifier, float(meta["threshold"])

    return await session.players.compute(opened)


class ProverPhase:
    """One prover phase: the trainer, its on-policy source, the stop rule and the alerts, resumed where they stood.
    `updates`: of a verifier that learns meanwhile; None: it is frozen."""

    def __init__(
        self,
        session: Session,
        info: PhaseInfo,
        verifier: VerifierModel,
        threshold: float,
        learner: LanguageModel,
        updates: VerifierUpdates | None = None,
    ) -> None:
        experiment = session.experiment
        training = experiment.training
        self.session, self.info, self.learner = session, info, learner
        objective = PolicyObjective(training, experiment.rollout, learner.tokenizer.pad_id)
        self.scorer = session.players.scorer(verifier)
        self.updates = updates
        self.source = OnPolicySource(session, self.scorer, threshold, objective, learner)
        self.minibatches = MinibatchSource(self.source, training.minibatches)
        learner.require_gradients()
        self.trainer: Trainer[PolicyBatch] = Trainer(
            learner.module,
            objective,
            OptimizerSettings(
                learning_rate=training.learning_rate,
                weight_decay=training.weight_decay,
                beta1=training.beta1,
                beta2=training.beta2,
                warmup=training.warmup,
                schedule=training.schedule,
                total_steps=max(1, training.steps),
                gradient_clip=training.gradient_clip,
            ),
            self.minibatches,
            executor=session.players.executor,
            precision=training.precision,
            gradient_checkpointing=training.gradient_checkpointing,
            memory=objective.memory,
            events=session.ledger.log,
        )
        self.stop_rule = StopRule(experiment.game)
        self.alerts = Alerts(experiment.telemetry, two_roles=0 < experiment.game.sneaky_share < 1)
        self.stopped = False
        self.version = session.state.version
        self.last_metrics: dict[str, float] = {}
        self._resume()

    @property
    def done(self) -> int:
        return self.trainer.steps_done

    async def play(self) -> None:
        # The start weights are a version of their own: the engine may still hold those of the last mint or evaluation.
        if self.done == 0:
            self.version += 1
        with span("sync"):
            await self._publish()
        self.source.start(self.version)
        self.session.first_step()
        try:
            while self.done < self.info.total and not self.stopped:
                await self._step()
        finally:
            with span("rollout"):
                await self.source.close()

    async def _step(self) -> None:
        session = self.session
        report = await self.trainer.step()
        if report is None:
            raise StateError("The on-policy source ended, which it never should.")
        whole_batch = self.minibatches.pending == 0
        if whole_batch:
            self.version += 1
            with span("sync"):
                await self._publish()
            self.source.published(self.version)
        synced = sync_metrics(session.players.last_sync) if whole_batch else {}
        updated: dict[str, float] = {}
        if self.updates is not None and whole_batch and self.updates.due(self.source.batches_done):
            updated = await self.updates.play(self.scorer)
            self.source.threshold = self.updates.threshold
        metrics = self.last_metrics = {**self.source.metrics, **report.metrics, **synced, **updated}
        session.alert(self.alerts.check(metrics), self.done)
        self.stopped = self.stop_rule.observe(metrics) and whole_batch
        session.report_step(self.info, self.done, metrics)
        if whole_batch and (session.due(self.done, self.info.total) or self.stopped):
            # The score cache goes along, so that a resumed run asks the verifier for what the uninterrupted run asks:
            # a score computed beside other solutions differs in its last bits, and those would reach the weights.
            # Sampled ahead, nothing is repeated bit by bit, and there may be no moment without a score on its way.
            cache = {} if self.source.prefetcher is not None else self.scorer.cache_state()
            progress = self._progress()
            if self.updates is not None:
                tensors, progress["updates"] = await self.updates.state()
                cache |= tensors
            await session.commit_trainer(self.trainer, cache, version=self.version, progress=progress)

    async def _publish(self) -> None:
        tensors, adapter = await policy_of(self.session, self.learner)
        await self.session.players.publish(tensors, self.version, adapter)

    def tell_unfinished(self) -> None:
        """At the end of the phase nobody continues what was carried: the next policy is another one."""
        partial = self.source.partial
        if partial is not None and partial.carried:
            self._tell_lost(partial.carried, "are unfinished at the end of the phase, and are given up")

    def _tell_lost(self, rollouts: int, how: str) -> None:
        self.session.ledger.log.event("rollout", event="lost", rollouts=rollouts, step=self.done)
        self.session.observer.noticed(f"{rollouts} rollouts {how} (rollout.partial).")

    # --- resuming ----------------------------------------------------------------------------------------------

    def _progress(self) -> dict[str, Any]:
        return {
            "batches": self.source.batches_done,
            "version": self.version,
            "stopped": self.stopped,
            "stop_rule": self.stop_rule.state(),
            "alerts": self.alerts.state(),
            "metrics": finite(self.last_metrics),
            **({} if self.source.tracker is None else {"values": self.source.tracker.state()}),
            **({} if self.source.prefetcher is None else {"groups_begun": self.source.prefetcher.begun}),
            **({} if self.source.partial is None else {"partial": self.source.partial.state()}),
        }

    def _resume(self) -> None:
        state = self.session.state
        checkpoint = self.session.ledger.read_checkpoint()
        if checkpoint is None:
            return
        tensors, meta = checkpoint
        if self.updates is not None:
            tensors = self.updates.load_state(tensors, state.progress["updates"], self.scorer)
            self.source.threshold = self.updates.threshold
        cache = {name: tensor for name, tensor in tensors.items() if name.startswith("scores.")}
        if self.source.prefetcher is None:
            self.scorer.load_cache_state(cache)
        self.trainer.load_state({name: t for name, t in tensors.items() if name not in cache}, meta)
        self.source.batches_done = state.progress["batches"]
        if self.source.tracker is not None:
            self.source.tracker.load_state(state.progress["values"])
        if self.source.prefetcher is not None:
            self.source.prefetcher.resume(state.progress["groups_begun"])
        if self.source.partial is not None and (lost := self.source.partial.load_state(state.progress["partial"])):
            self._tell_lost(lost, "were carried from batch to batch when the run stopped, and are lost")
        self.version = state.progress["version"]
        self.stopped = state.progress["stopped"]
        self.stop_rule.load_state(state.progress["stop_rule"])
        self.alerts.load_state(state.progress["alerts"])
        self.last_metrics = {k: math.nan if v is None else v for k, v in state.progress["metrics"].items()}
