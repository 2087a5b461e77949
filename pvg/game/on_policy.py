"""Batches for the prover: sample, grade, score, pay, assign credit. One call is one batch.

The path of a step (architecture.md): token ids and log-probs come from the sampler and are used as they are. With
`rollout.prefetch` groups are sampled and scored while the trainer works on others (pvg.game.prefetch), and a batch is
made of those that are there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from pvg.errors import TrainingDivergedError
from pvg.game.challenge import environment_of
from pvg.game.orders import ProverOrders
from pvg.game.prefetch import Prefetcher
from pvg.game.rewards import Outcomes, rewards
from pvg.game.session import Session
from pvg.game.statistics import (
    Columns,
    cache_metrics,
    cut_metrics,
    play_metrics,
    sampling_metrics,
    staleness_metrics,
    value_metrics,
)
from pvg.models.language_model import LanguageModel
from pvg.records import Float32, Group, Rollout
from pvg.rollout.engine import EngineStats
from pvg.rollout.partial import PartialSampling, partial_sampling
from pvg.telemetry.spans import span
from pvg.training.batch import PolicyBatch, routed_experts_of, sampled_masks_of
from pvg.training.credit import advantages, soft_overlong_rewards, tracked_advantages, zero_signal_groups
from pvg.training.losses import PolicyObjective
from pvg.training.values import ValueTracker
from pvg.verifier.scorer import ScorerStats, VerifierScorer


@dataclass(frozen=True, slots=True)
class _Since:
    """Where everything stood when the sampling of a batch began."""

    at: float
    engine: EngineStats
    scorer: ScorerStats


@dataclass
class OnPolicySource:
    """A BatchSource: batch k is a function of the policy's weights and of k, `batches_done` counts them; with spo also
    of what `tracker` has learnt from the batches before, with a deadline of what arrived in time, with `partial` of
    what was left unfinished by the batches before, and with rollout.prefetch of what has arrived at all: then `start`
    comes first, and `close` last.

    `metrics` are those of the newest batch. `learner` is the policy in training, read only for log-probs that are
    computed again (`rollout.logprobs = "recomputed"`, `training.off_policy = "decoupled"`).
    """

    session: Session
    scorer: VerifierScorer
    threshold: float
    objective: PolicyObjective
    learner: LanguageModel
    batches_done: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    tracker: ValueTracker | None = field(init=False)
    orders: ProverOrders = field(init=False)
    partial: PartialSampling | None = field(init=False)
    prefetcher: Prefetcher | None = field(init=False)
    _since: _Since = field(init=False)

    def __post_init__(self) -> None:
        experiment = self.session.experiment
        self.tracker = ValueTracker(experiment.training.spo_half_life) if experiment.training.loss == "spo" else None
        self.orders = ProverOrders(self.session, self.tracker, environment_of(self.session, self.scorer))
        self.partial = partial_sampling(experiment, self.session.players.dispatcher)
        self.prefetcher = Prefetcher(self.orders, self.scorer) if experiment.rollout.prefetch else None
        self._since = self._now()

    # --- sampling ahead: nothing of it in a synchronous game ----------------------------------------------------------

    def start(self, version: int) -> None:
        """The engine has the trainer's `version`. To be called outside of spans."""
        if self.prefetcher is not None:
            self._since = self._now()
            training = self.session.experiment.training
            self.prefetcher.start(version, -(-training.steps // training.minibatches) - self.batches_done)

    def published(self, version: int) -> None:
        """The trainer's new `version` has reached the engine."""
        if self.prefetcher is not None:
            self.prefetcher.published(version)

    async def close(self) -> None:
        """Give up what is sampled ahead."""
        if self.prefetcher is not None:
            await self.prefetcher.close()

    # --- a batch ------------------------------------------------------------------------------------------------------

    async def next_batch(self) -> PolicyBatch:
        session, scorer, number = self.session, self.scorer, self.batches_done
        ahead: dict[str, float] = {}
        if self.prefetcher is None:
            self._since = self._now()
            with span("rollout"):
                groups = await self._sample(number)
        else:
            groups, ahead = await self.prefetcher.batch(number)
        sampled = self._now()
        session.tell_rollouts(groups, number)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        with span("score"):  # of those that were scored as they came, the scores are in the cache
            scores_N = await scorer.score(rollouts)
        with span("credit"):
            rewards_N, batch, credit_metrics = self._credit(rollouts, scores_N)
        batch = await self._with_logprobs(batch)
        since = self._since
        with span("record"):
            session.ledger.keep(
                [
                    replace(r, score=float(s), reward=float(p), verifier_version=scorer.version)
                    for r, s, p in zip(rollouts, scores_N, rewards_N, strict=True)
                ]
            )
            self.batches_done += 1
            self.metrics = {
                **play_metrics(Columns(rollouts, scores_N), self.threshold),
                "reward_mean": float(rewards_N.mean()),
                **credit_metrics,
                **cut_metrics(groups),
                **({} if self.partial is None else self.partial.metrics),
                **sampling_metrics(rollouts, sampled.engine.since(since.engine), sampled.at - since.at),
                **staleness_metrics(rollouts, session.players.engine.version),
                **ahead,
                **cache_metrics(since.scorer, scorer.stats),
            }
        self._since = replace(sampled, scorer=scorer.stats)
        return batch

    async def _sample(self, number: int) -> list[Group]:
        if self.partial is not None:
            return await self.partial.sample(self.orders.plan, number)
        return await self.orders.sample(self.orders.batch(number), number)

    def _now(self) -> _Since:
        return _Since(time.perf_counter(), self.session.players.engine.stats, self.scorer.stats)

    def _credit(self, rollouts: list[Rollout], scores_N: Float32) -> tuple[Float32, PolicyBatch, dict[str, float]]:
        """The rewards, the batch with its advantages, and what there is to tell of them. spo's tracker learns here."""
        experiment = self.session.experiment
        columns = Columns(rollouts, scores_N)
        numbers: dict[str, int] = {}
        problem_ids_N = np.array([numbers.setdefault(r.problem_id, len(numbers)) for r in rollouts], dtype=np.int64)
        try:
            rewards_N = rewards(
                Outcomes(
                    scores_N,
                    columns.correct_N,
                    columns.helpful_N,
                    columns.well_formed_N,
                    problem_ids_N,
                    solver_correct_N=columns.solver_correct_N,
                    kept_answer_N=columns.kept_N,
                ),
                experiment.game,
            )
        except ValueError as error:
            raise TrainingDivergedError(str(error)) from None
        lengths_N = np.array([r.sampled_tokens for r in rollouts])
        rewards_N = rewards_N + soft_overlong_rewards(
            lengths_N, experiment.rollout.max_tokens, experiment.training.overlong_buffer
        )
        group_ids_N = np.array([r.group for r in rollouts], dtype=np.int32)
        role_ids_N = np.array([r.role.number for r in rollouts], dtype=np.int8)
        versions_N = np.array([r.version for r in rollouts], dtype=np.int32)
        if self.tracker is None:
            advantages_N = advantages(experiment.training.loss, rewards_N, group_ids_N, role_ids_N)
            metrics = {"zero_signal": zero_signal_groups(rewards_N, group_ids_N, role_ids_N)}
        else:
            values_N = self.tracker.observe([(r.problem_id, r.role) for r in rollouts], rewards_N, versions_N)
            advantages_N = tracked_advantages(rewards_N, values_N, lengths_N, role_ids_N)
            metrics = value_metrics(rewards_N, values_N, advantages_N)
        batch = PolicyBatch(
            sequences=[np.concatenate([r.prompt_ids, r.completion_ids]) for r in rollouts],
            prompt_lengths=np.array([len(r.prompt_ids) for r in rollouts], dtype=np.int32),
            sampled_logprobs=[r.logprobs[r.sampled_mask] if r.turns else r.logprobs for r in rollouts],
            reference_logprobs=None,
            advantages_N=advantages_N,
            role_ids_N=role_ids_N,
            group_ids_N=group_ids_N,
            versions_N=versions_N,
            routed_experts=routed_experts_of(rollouts),
            sampled_masks=sampled_masks_of(rollouts),
        )
        return rewards_N, batch, metrics

    async def _with_logprobs(self, batch: PolicyBatch) -> PolicyBatch:
        """Add the reference's log-probs where the loss has a KL term, and those of the policy as it is now where stale
        rows are clipped around them; replace the sampler's where so configured."""
        players, objective, experiment = self.session.players, self.objective, self.session.experiment
        if objective.needs_reference:
            work = partial(self._recompute, "reference", players.base, batch)
            batch = replace(batch, reference_logprobs=await players.compute(work))
        if experiment.rollout.logprobs == "recomputed":
            work = partial(self._recompute, "recompute", self.learner, batch)
            batch = replace(batch, sampled_logprobs=await players.compute(work))
        stale_N = np.flatnonzero(batch.versions_N < players.engine.version)
        if objective.decoupled and len(stale_N):
            work = partial(self._recompute, "recompute", self.learner, batch.select(stale_N))
            proximal = list(batch.sampled_logprobs)  # of a fresh row, the sampler is the policy at batch start
            for row, logprobs in zip(stale_N, await players.compute(work), strict=True):
                proximal[row] = logprobs
            batch = replace(batch, proximal_logprobs=proximal)
        return batch

    def _recompute(self, part: str, model: LanguageModel, batch: PolicyBatch) -> list[Float32]:
        """In the compute thread, where the span begins: waiting for the thread is no work of the trainer's."""
        with span(part, device=True):
            return self.objective.recompute(model.module, batch)
