"""TRAIN_PROVER: the prover starts as `game.start` says, and plays both roles against the round's verifier.

The phase ends after its steps, or earlier if the verifier judges worse (`StopRule`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pvg.config.rollout import SamplingAhead
from pvg.game.audit import audit_of
from pvg.game.groups import CarriedGroups, FreshGroups, Refill
from pvg.game.orders import ProverOrders, RunWithPlayers, WeightsReader, interaction_of, prover_orders
from pvg.game.parts import Batches, BatchLogprobs, Helper, TrainingStop
from pvg.game.rewards import credit_of, pay, reading_of
from pvg.game.round import GameBatches, TrainingPhase
from pvg.game.session import Session
from pvg.game.states import Phase
from pvg.game.statistics import BatchClock
from pvg.game.verifier_phase import FixedVerifier, read_verifier
from pvg.models.language_model import LanguageModel, LowRankAdapter
from pvg.models.sources import open_learner
from pvg.rollout.dispatcher import partial_sampling
from pvg.store.checkpoints import TENSORS_FILE
from pvg.store.run_players import adapter_name, prover_weights_name, saved_verifier_name, verifier_weights_name
from pvg.telemetry.alerts import DECAY, Alerts
from pvg.telemetry.events import PhaseInfo
from pvg.telemetry.spans import span
from pvg.training.batch import MinibatchSource, PolicyBatch
from pvg.training.losses import PolicyObjective
from pvg.training.trainer import OptimizerSettings, Trainer
from pvg.verifier.scorer import ScoringModel, VerifierScorer

if TYPE_CHECKING:
    from torch import Tensor


OpenUpdates = Callable[[Session, ScoringModel, float], Awaitable[FixedVerifier]]
# Batches before a rule can end a phase: the averages need about as many (StopRule.decay).
MIN_STEPS = 10


@dataclass
class StopRule:
    """`judge_decay`: stop when the EMA of `verifier_mcc` is DECAY below its highest value; a policy is honest within
    half of that. A batch without this metric leaves the average unchanged. `hack_alarm`: stop when `hack_evidence`
    (pvg.game.audit) reaches 1; a policy is honest at 0."""

    stop: str  # `game.stop`
    mcc: float | None = None
    judged: int = 0  # batches with an MCC
    best: float = -1.0  # of the average, once it has MIN_STEPS batches: one batch has much noise
    evidence: float = 0.0  # of hacks
    decay: float = 0.9  # of the averages: about the last ten batches, as many as the rules wait for

    @property
    def rewinds(self) -> bool:
        return self.stop != "steps"

    @property
    def honest(self) -> bool:
        if self.stop == "hack_alarm":
            return self.evidence <= 0.0
        return not self.rewinds or self.mcc is None or self.mcc >= self.best - DECAY / 2

    def observe(self, metrics: Mapping[str, float]) -> bool:
        """Add the metrics of a batch. Returns whether the phase ends now."""
        if math.isfinite(mcc := metrics.get("verifier_mcc", math.nan)):  # the first batches equally
            self.judged += 1
            kept = min(self.decay, 1.0 - 1.0 / self.judged)
            self.mcc = mcc if self.mcc is None else kept * self.mcc + (1.0 - kept) * mcc
        if self.mcc is not None and self.judged >= MIN_STEPS:
            self.best = max(self.best, self.mcc)
        self.evidence = metrics.get("hack_evidence", self.evidence)
        if self.stop == "hack_alarm":
            return self.evidence >= 1.0
        return self.rewinds and self.mcc is not None and self.mcc < self.best - DECAY

    def state(self) -> dict[str, Any]:
        return asdict(self)

    def load_state(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


async def train_prover(session: Session, open_updates: OpenUpdates | None = None) -> None:
    """Run the phase from the last committed step on, then enter CHECKPOINT. `open_updates`: of the verifier, if it
    learns meanwhile."""
    info = session.begin("steps", session.training.steps, session.state.step)
    started = time.perf_counter()
    with span("open_models"):
        verifier, threshold = await open_round_verifier(session, session.state.round)
        from_previous = session.game.start == "previous"
        learner = await session.players.compute(lambda: open_round_learner(session, from_previous=from_previous))
    try:
        with session.players.divided_workers():
            with span("open_models"):
                current = FixedVerifier(threshold)
                if open_updates is not None:
                    current = await open_updates(session, verifier, threshold)
                phase = open_prover_phase(session, info, verifier, current, learner)
            await phase.play()
        phase.tell_unfinished()
        with span("checkpoint"):
            names = [*await save_prover(session, learner, phase.done), *await current.save()]
        session.finish_phase(info, phase.last_metrics, time.perf_counter() - started)
        entered = session.state.enter(Phase.CHECKPOINT)
        # Commits the version too: it may have changed since the phase's last commit.
        await session.leave_phase(replace(entered, weights=(*entered.weights, *names), version=phase.version))
    finally:
        learner.close()
        verifier.close()


def open_prover_phase(
    session: Session,
    info: PhaseInfo,
    verifier: ScoringModel | VerifierScorer,
    current: FixedVerifier,
    learner: LanguageModel,
    stop_rule: TrainingStop | None = None,
) -> TrainingPhase:
    """The training of `learner` against `verifier`, a model or what scores already, from the last commit on.
    `current`: what it does meanwhile. `stop_rule`: None takes the rule of the game. The caller owns both."""
    scorer = verifier if isinstance(verifier, VerifierScorer) else session.players.scorer(verifier, beside_trainer=True)
    batches = partial(open_batches, session, scorer, current)
    return open_phase(session, info, learner, batches, stop_rule)


def open_phase(
    session: Session,
    info: PhaseInfo,
    learner: LanguageModel,
    open_batches: Callable[[PolicyObjective, BatchLogprobs], Batches],
    stop_rule: TrainingStop | None = None,
) -> TrainingPhase:
    """The training of `learner` on batches for its objective, from the last commit on."""
    return TrainingPhase(
        session,
        info,
        learner,
        *open_trainer(session, learner, open_batches),
        StopRule(session.game.stop) if stop_rule is None else stop_rule,
        Alerts(two_roles=0 < session.game.sneaky_share < 1),
    )


def open_trainer(
    session: Session, learner: LanguageModel, open_batches: Callable[[PolicyObjective, BatchLogprobs], Batches]
) -> tuple[Batches, MinibatchSource, Trainer[PolicyBatch], list[Helper]]:
    """What trains `learner` on batches for its objective: the batches, the trainer's source, the trainer, and what
    helps."""
    training, players = session.training, session.players
    objective = PolicyObjective(training, session.rollout, learner.tokenizer.pad_id, players.models.compute_dtype)
    learner.require_gradients()
    optimizer = OptimizerSettings(learning_rate=training.learning_rate, total_steps=max(1, training.steps))
    workers = players.prover_workers(training, session.rollout, learner.module)
    ranks = players.prover_ranks(training, session.rollout, learner.module, optimizer)
    recomputed = session.rollout.logprobs == "recomputed"
    logprobs = BatchLogprobs(players, objective, learner, workers=workers, recomputed=recomputed)
    batches = open_batches(objective, logprobs)
    minibatches = MinibatchSource(batches, training.minibatches)
    trainer: Trainer[PolicyBatch] = Trainer(
        learner.module,
        objective,
        optimizer,
        minibatches,
        executor=players.executor,
        precision=players.models.compute_dtype,
        gradient_checkpointing=training.gradient_checkpointing,
        workers=workers,
        ranks=ranks,
    )
    helpers: list[Helper] = [helper for helper in (logprobs, workers, ranks) if helper is not None]
    return batches, minibatches, trainer, helpers


def open_batches(
    session: Session,
    scorer: VerifierScorer,
    verifier: FixedVerifier,
    objective: PolicyObjective,
    logprobs: BatchLogprobs,
) -> GameBatches:
    players, training = session.players, session.training
    orders = prover_orders(session, interaction_of(session, scorer), reference=logprobs.served)
    rules: Any = orders.interaction.rules
    batches = -(-training.steps // training.minibatches)
    return GameBatches(
        session,
        batches,
        orders,
        _groups_of(session, orders, scorer),
        Refill(orders, training.dynamic_sampling),
        scorer,
        verifier,
        partial(pay, session.game, session.task, rules, by_rules=not session.evaluates),
        {seat: credit_of(training.loss.kind, objective.credit) for seat in rules.voices},
        reading_of(session.game.reward, str(players.device), players.executor),
        logprobs,
        BatchClock(players.engine, scorer),
        audit_of(session, batches),
    )


def _groups_of(session: Session, orders: ProverOrders, scorer: VerifierScorer) -> FreshGroups:
    players, rollout = session.players, session.rollout
    ahead = rollout.prefetch
    if isinstance(ahead, SamplingAhead):
        from pvg.game.prefetch import Prefetcher, WhenScored

        beside = players.scoring is not None or players.workers is not None
        scored: WhenScored = "background" if beside else "batch"
        if session.verifier.engine != "torch":
            scored = "arrival"
        return Prefetcher(
            orders, scorer, ahead, budget=rollout.staleness_budget, concurrency=rollout.concurrency, scored=scored
        )
    carried = partial_sampling(rollout, session.training, session.game.reward.kind, players.dispatcher)
    return FreshGroups(orders) if carried is None else CarriedGroups(orders, carried)


def open_round_learner(session: Session, *, from_previous: bool) -> LanguageModel:
    """The prover at the start of the round's training: the base prover, or the previous round's if there is one. The
    caller closes it."""
    round_, read = session.state.round, session.ledger.read_weights
    learner = open_learner(session.players, round_, session.players.learner_device)
    if not from_previous or round_ == 0:
        return learner
    name = prover_weights_name(round_ - 1)
    if not session.training.adapters.rank:
        learner.load_weights(read(name)[0])
        return learner
    from pvg.models.adapters import AdaptedModel

    low_rank, meta = read(adapter_name(name))
    assert isinstance(learner, AdaptedModel)
    learner.load_adapter(LowRankAdapter(low_rank, meta["config"]))
    return learner


async def save_prover(session: Session, learner: LanguageModel, steps: int) -> list[str]:
    """Write the round's prover; returns the names to commit."""
    meta = {"round": session.state.round, "steps": steps}
    return await save_policy(session, learner, prover_weights_name(session.state.round), meta)


async def save_policy(session: Session, learner: LanguageModel, name: str, meta: Mapping[str, Any]) -> list[str]:
    """Write a policy as `name`, with its adapter next to it if it has one; returns the names to commit."""
    policy, adapter = await session.players.compute(learner.policy)
    tensors = await session.players.compute(lambda: {name: tensor.cpu() for name, tensor in policy.items()})
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
    name = saved_verifier_name(session.ledger.state.weights, round_) or verifier_weights_name(round_)
    return await players.compute(lambda: read_verifier(players.open_frozen_verifier, read, name))
