"""The prover's round: sample, score, pay, credit, step, publish. This file is the loop of the game.

`GameBatches` makes a batch of rollouts with advantages and log-probs. `TrainingPhase` takes optimizer steps on it,
publishes the new policy, and commits. What varies is given in (pvg.game.parts): where groups come from, how rewards
become advantages, whether the verifier learns too, when to stop.

Token ids and log-probs come from the sampler unchanged. All sampled rollouts are recorded and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pvg.errors import StateError
from pvg.game.audit import Audit
from pvg.game.groups import FreshGroups, Refill, ScoredGroups
from pvg.game.orders import ProverOrders
from pvg.game.parts import Batches, BatchLogprobs, Helper, Progress, Tensors, TrainingStop
from pvg.game.rewards import Earned, GroupCredit, Unread, measures
from pvg.game.session import Session, finite
from pvg.game.statistics import BatchClock, BatchOutcomes, mean_of
from pvg.game.verifier_phase import FixedVerifier
from pvg.models.language_model import LanguageModel
from pvg.records import Float32, Group, Role, Rollout
from pvg.telemetry.alerts import Alerts
from pvg.telemetry.events import PhaseInfo, Sample
from pvg.telemetry.spans import span
from pvg.training.batch import MinibatchSource, PolicyBatch, batch_of, groups_and_roles
from pvg.training.credit import zero_signal_groups
from pvg.training.trainer import Trainer
from pvg.verifier.scorer import VerifierScorer

if TYPE_CHECKING:
    from torch import Tensor


# Why a rule of `game.stop` goes back to the last honest commit.
REASONS = {
    "judge_decay": "accepted solutions correlate less and less with correct ones",
    "hack_alarm": "the grader accepts more and more solutions that the truth rejects",
}


@dataclass
class TrainingPhase:
    """Trains `learner` on `batches` to the end of the phase, from the last commit on."""

    session: Session
    info: PhaseInfo
    learner: LanguageModel
    batches: Batches
    minibatches: MinibatchSource  # of `batches`; the trainer's source
    trainer: Trainer[PolicyBatch]
    helpers: Sequence[Helper]
    stop_rule: TrainingStop
    alerts: Alerts
    version: int = field(init=False)
    stopped: bool = False
    last_metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.version = self.session.state.version
        if (checkpoint := self.session.ledger.read_checkpoint()) is None:
            return
        progress, lost = self.session.state.progress, self._load(checkpoint)
        if lost:
            self.session.tell_lost(lost, self.done, "were unfinished when the run stopped and are lost")
        self.version, self.stopped = progress["version"], progress["stopped"]
        self.stop_rule.load_state(progress["stop_rule"])
        self.alerts.load_state(progress["alerts"])

    def _load(self, checkpoint: tuple[dict[str, Tensor], dict[str, Any]]) -> int:
        """Continue from the ledger's checkpoint. Returns the number of unfinished rollouts that are lost."""
        progress = self.session.state.progress
        tensors, lost = self.batches.load_state(checkpoint[0], progress["batches"])
        self.trainer.load_state(tensors, checkpoint[1])
        self.last_metrics = {k: math.nan if v is None else v for k, v in progress["metrics"].items()}
        return lost

    @property
    def done(self) -> int:
        return self.trainer.steps_done

    async def play(self) -> None:
        # The start weights get a new version: the engine may hold those of the last mint or evaluation.
        begins = self.session.state.checkpoint is None
        self.version += begins
        await self._publish()
        with span("open_models"):
            for helper in self.helpers:
                await helper.prepare()
        self.batches.start(self.version)
        self.session.first_step()
        try:
            if self.stop_rule.rewinds and begins:
                await self._commit()
            while self.done < self.info.total and not self.stopped:
                await self._step()
            await self.session.settled()
        finally:
            with span("rollout"):
                await self.batches.close()
            for helper in self.helpers:
                await helper.close()
        if self.stop_rule.rewinds and self.stopped:
            await self._rewind()

    async def _rewind(self) -> None:
        """Go back to the policy of the last commit. Records and rollouts of the later steps stay, as evidence."""
        stopped, checkpoint = self.done, self.session.ledger.read_checkpoint()
        assert checkpoint is not None, "a phase that can go back begins with a commit"
        await self.session.players.compute(partial(self._load, checkpoint))
        self.session.ledger.log.event("train", event="rewound", step=stopped, to=self.done)
        self.session.observer.noticed(
            f"The prover phase ended at step {stopped}, because {REASONS[self.session.game.stop]}. Its result is the "
            f"prover of step {self.done}, of the last commit before."
        )

    async def _step(self) -> None:
        session = self.session
        new_batch = self.minibatches.pending == 0  # if so, the trainer asks for `batches.next_batch`
        report = await self.trainer.step()
        if report is None:
            raise StateError("The source of batches ended before the phase did; this is a defect of pvg.")
        of_step = dict(report.metrics)
        whole_batch = self.minibatches.pending == 0
        if whole_batch:
            self.version += 1
            of_step |= await self._publish()
            of_step |= await self.batches.published(self.version)
        metrics = self.last_metrics = self.batches.metrics | of_step
        session.alert(self.alerts.check(metrics, new_batch=new_batch), self.done)
        if whole_batch:
            self.stopped = self.stop_rule.observe(metrics)
        # Only the record of a batch's first step has the batch's metrics, so that readers count them once.
        shown = metrics if new_batch else of_step
        session.report_step(self.info, self.done, shown, whole=new_batch, samples=self.batches.samples)
        ends = self.stopped and not self.stop_rule.rewinds
        if whole_batch and self.stop_rule.honest and (session.due(self.done, self.info.total) or ends):
            await self._commit()
        elif whole_batch:
            await session.check_stop()  # without a commit: the steps since the last one are repeated

    async def _publish(self) -> dict[str, float]:
        with span("sync"):
            tensors, adapter = await self.session.players.compute(self.learner.policy)
            return await self.session.players.publish(tensors, self.version, adapter)

    async def _commit(self) -> None:
        await self.session.settled()  # before the batches copy a trainer's state
        tensors, progress = await self.batches.state()
        progress = {
            "batches": progress,
            "version": self.version,
            "stopped": self.stopped,
            "stop_rule": self.stop_rule.state(),
            "alerts": self.alerts.state(),
            "metrics": finite(self.last_metrics),
        }
        await self.session.commit_trainer(self.trainer, tensors, version=self.version, progress=progress)

    def tell_unfinished(self) -> None:
        """Report carried rollouts at the end of the phase: the next policy does not continue them."""
        if self.batches.carried:
            self.session.tell_lost(
                self.batches.carried, self.done, "were unfinished when the phase ended and are dropped"
            )


@dataclass
class GameBatches(Batches):
    """The batches of the prover-verifier game. A batch is deterministic given the weights, its number and the states of
    the parts, unless a deadline or work ahead makes it depend on which rollouts have arrived.

    `total`: batches of the whole phase. `pay`: rewards of rollouts with scores float32 [N]. `credits`: by voice, the
    prover's first. `reading`: of `game.reward.reader`.
    """

    session: Session
    total: int
    orders: ProverOrders
    groups: FreshGroups
    refill: Refill
    scorer: VerifierScorer
    verifier: FixedVerifier
    pay: Callable[[Sequence[Rollout], Float32], tuple[Float32, BatchOutcomes, Sequence[Earned]]]
    credits: Mapping[str, GroupCredit]
    reading: Unread
    logprobs: BatchLogprobs
    clock: BatchClock
    audit: Audit
    done: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    samples: Sequence[Sample] = ()

    async def next_batch(self) -> PolicyBatch:
        session, players, number = self.session, self.session.players, self.done
        if not self.groups.ahead:
            self.clock.begin()
        groups, of_groups = await self.groups.batch(number)
        self.clock.sampled()
        scored, resampled_s, of_refill = await self.refill.fill(await self._score(groups), number, self._score)
        if of_refill:
            self.clock.resampled(resampled_s)
        everything = scored.rollouts
        session.tell_rollouts(everything, number)
        trained = [everything[row] for row in scored.trained_M]
        with span("credit"):
            trained, advantages_M, of_credit = self._credit(scored, trained)
            # Off the loop, because rules may grade what other voices wrote.
            of_rules = partial(measures, self.orders.interaction.rules, everything, scored.scores_N)
            of_credit |= await players.off_loop(of_rules)
            batch = await players.off_loop(partial(batch_of, trained, advantages_M))
        batch = await self.logprobs.add(batch)
        with span("record"):
            clock, place = self.clock, (self.verifier.threshold, players.engine.version)
            measured = partial(scored.metrics, *place, clock.counts, clock.seconds)
            session.ledger.keep(await players.off_loop(partial(scored.stored, self.scorer.version)))
            self.done += 1
            self.samples = _first_of_each_role(scored, self.verifier.threshold)
            self.metrics = await players.off_loop(measured) | of_credit | of_groups | of_refill | clock.end()
        return batch

    async def _score(self, groups: Sequence[Group]) -> ScoredGroups:
        """Score and reward groups that were sampled together."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        samples_on = self.groups.ahead or self.session.training.dynamic_sampling
        await self.session.players.engine.rest(replaced=not samples_on)
        with span("score"):  # the cache already holds the scores of groups that were sampled ahead
            scores_N = await self.scorer.score(rollouts)
        with span("read"):
            groups = await self.reading.read(groups)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        with span("credit"):
            rewards_N, outcomes, earned = await self.session.players.off_loop(partial(self.pay, rollouts, scores_N))
        rows_N = np.arange(len(rollouts))
        return ScoredGroups(groups, scores_N, rewards_N, rows_N, outcomes.similarity_N, earned)

    def _credit(
        self, scored: ScoredGroups, trained: Sequence[Rollout]
    ) -> tuple[list[Rollout], Float32, dict[str, float]]:
        """The rollouts to train on, of all voices, their advantages float32 [M], and metrics."""
        everything = scored.rollouts
        metrics = {"zero_signal": zero_signal_groups(scored.rewards_N, *groups_and_roles(everything))}
        if scored.similarity_N is not None:
            sneaky_N = np.array([r.role is Role.SNEAKY for r in everything])
            metrics["similarity"] = mean_of(scored.similarity_N, sneaky_N)
        (_, first), *others = self.credits.items()
        voices, advantages_M, of_credit = _observed(first, trained, scored.rewards_N[scored.trained_M])
        advantages = [advantages_M]
        for seat, credit in others:
            rows = [row for row in scored.trained_M if seat in everything[row].others]
            spoke = [everything[row].others[seat] for row in rows]
            rewards_S = np.array([scored.earned[row][seat] for row in rows], dtype=np.float32)
            learned, advantages_S, _ = _observed(credit, spoke, rewards_S)
            advantages.append(advantages_S)
            voices += learned
            metrics[f"reward_{seat}"] = mean_of(rewards_S, np.ones(len(rows), dtype=bool))
        return voices, np.concatenate(advantages), metrics | of_credit

    @property
    def carried(self) -> int:
        return self.groups.carried

    def start(self, version: int) -> None:
        self.clock.begin()
        self.groups.start(version, self.done, self.total - self.done)

    async def published(self, version: int) -> dict[str, float]:
        self.groups.published(version)
        return await self.verifier.after(self.done, self.scorer) | await self.audit.after(self.done)

    async def close(self) -> None:
        await self.groups.close()
        await self.verifier.close()
        await self.reading.close()

    async def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        # With the score cache, so that a resumed run asks the verifier for the same scores. Groups ahead are not
        # reproducible bit by bit anyway, and scores may be in flight at any time, so they store no cache.
        players = self.session.players
        cache = {} if self.groups.ahead else await players.off_loop(self.scorer.cache_state)
        tensors, updates = await self.verifier.state()
        own = {"done": self.done, "verifier": updates, "audit": self.audit.state()}
        learned = {seat: credit.state() for seat, credit in self.credits.items()}
        return {**cache, **tensors}, own | {"groups": self.groups.state(), "credit": learned}

    def load_state(self, tensors: Tensors, progress: Progress) -> tuple[dict[str, Tensor], int]:
        rest = self.verifier.load_state(tensors, progress["verifier"], self.scorer)
        if not self.groups.ahead:
            self.scorer.load_cache_state(rest)
        self.done = progress["done"]
        self.audit.load_state(progress["audit"])
        for seat, credit in self.credits.items():
            credit.load_state(progress["credit"][seat])
        rest = {name: tensor for name, tensor in rest.items() if not name.startswith("scores.")}
        return rest, self.groups.load_state(progress["groups"])


def _first_of_each_role(scored: ScoredGroups, threshold: float) -> list[Sample]:
    first: dict[Role, Sample] = {}
    for rollout, score in zip(scored.rollouts, scored.scores_N.tolist(), strict=True):
        if rollout.role not in first:
            grade = rollout.grade
            word = "correct" if grade.correct else "wrong" if grade.well_formed else "malformed"
            solution = Sample(rollout.role, rollout.question, rollout.solution, word, score, score >= threshold)
            first[rollout.role] = solution
    return [first[role] for role in Role if role in first]


def _observed(
    credit: GroupCredit, rollouts: Sequence[Rollout], rewards_N: Float32
) -> tuple[list[Rollout], Float32, dict[str, float]]:
    """The rollouts that learn, their advantages float32 [M], and metrics."""
    rows = [row for row, rollout in enumerate(rollouts) if rollout.compared != -1]
    learned = [rollouts[row].learned for row in rows]
    return learned, *(credit.observe(learned, rewards_N[rows]) if rows else (rewards_N[:0], {}))
