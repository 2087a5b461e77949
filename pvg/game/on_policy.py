"""On-policy batches for the prover: sample, grade, score, pay, assign credit. One call is one batch of fresh rollouts.

The path of a step (architecture.md): token ids and log-probs come from the sampler and are used as they are.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from pvg.errors import TrainingDivergedError
from pvg.game.rewards import Outcomes, rewards
from pvg.game.roles import assign_roles
from pvg.game.seeds import draw_weighted, generator_for, seed_for
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
from pvg.records import Float32, Group, Problem, Role, Rollout, source_of_round
from pvg.rollout.deadlines import training_deadline
from pvg.rollout.dispatcher import Call, GroupOrder
from pvg.rollout.partial import PartialSampling, partial_sampling
from pvg.telemetry.spans import span
from pvg.training.batch import PolicyBatch
from pvg.training.credit import advantages, soft_overlong_rewards, tracked_advantages, zero_signal_groups
from pvg.training.losses import PolicyObjective
from pvg.training.values import ValueTracker
from pvg.verifier.scorer import VerifierScorer


@dataclass
class OnPolicySource:
    """A BatchSource: batch k is a function of the policy's weights and of k, `batches_done` counts them; with spo also
    of what `tracker` has learnt from the batches before, and with a deadline of what arrived in time; with `partial`
    also of what was left unfinished by the batches before.

    `metrics` are those of the newest batch. `learner` is the policy in training, read only for
    `rollout.logprobs = "recomputed"`.
    """

    session: Session
    scorer: VerifierScorer
    threshold: float
    objective: PolicyObjective
    learner: LanguageModel
    batches_done: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    tracker: ValueTracker | None = field(init=False)
    partial: PartialSampling | None = field(init=False)

    def __post_init__(self) -> None:
        training = self.session.experiment.training
        self.tracker = ValueTracker(training.spo_half_life) if training.loss == "spo" else None
        self.partial = partial_sampling(self.session.experiment, self.session.players.dispatcher)

    async def next_batch(self) -> PolicyBatch:
        session, started, number = self.session, time.perf_counter(), self.batches_done
        engine, scorer = session.players.engine, self.scorer
        engine_before, scorer_before = engine.stats, scorer.stats
        with span("rollout"):
            groups = await self._sample(number)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        sampled_s = time.perf_counter() - started
        with span("score"):
            scores_N = await scorer.score(rollouts)
        with span("credit"):
            rewards_N, batch, credit_metrics = self._credit(rollouts, scores_N)
        batch = await self._with_logprobs(batch)
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
                **sampling_metrics(rollouts, engine.stats.since(engine_before), sampled_s),
                **staleness_metrics(rollouts, engine.version),
                **cache_metrics(scorer_before, scorer.stats, len(rollouts)),
            }
        return batch

    async def _sample(self, number: int) -> list[Group]:
        session = self.session
        if self.partial is not None:
            groups = await self.partial.sample(self._plan, step=number)
        else:
            orders, call = self._plan(number)
            groups = await session.players.dispatcher.sample(
                orders,
                round_=call.round,
                source=call.source,
                step=call.step,
                seed=call.seed,
                prefix=call.prefix,
                deadline=training_deadline(session.experiment),
            )
        session.tell_rollouts(groups, number)
        return groups

    def _plan(self, number: int) -> tuple[list[GroupOrder], Call]:
        """What batch `number` orders."""
        session, round_ = self.session, self.session.state.round
        training, game = session.experiment.training, session.experiment.game
        roles = assign_roles(
            training.groups, game.sneaky_share, generator_for(session.seed, round_, "prover-roles", number)
        )
        size = session.experiment.rollout.group_size
        orders = [
            session.order(problem, role, group, size)
            for group, (problem, role) in enumerate(zip(self._problems(number, roles), roles, strict=True))
        ]
        return orders, Call(
            round_,
            source_of_round(round_),
            step=number,
            seed=seed_for(session.seed, round_, "train_prover", number),
            prefix=f"{round_:03d}/train_prover/{number:05d}",
        )

    def _problems(self, number: int, roles: list[Role]) -> list[Problem]:
        """One problem for each of `roles`: the next ones of the endless shuffle, or drawn by how uncertain they are."""
        session, round_ = self.session, self.session.state.round
        if self.tracker is None or not session.experiment.training.spo_prioritised:
            return session.draw("prover", number * len(roles), len(roles), f"prover-{round_}")
        pool = session.problems("prover")
        ids = [problem.id for problem in pool]
        drawn: dict[Role, list[int]] = {}
        for role in dict.fromkeys(roles):
            generator = generator_for(session.seed, round_, "prover-problems", role.value, number)
            drawn[role] = draw_weighted(self.tracker.weights(ids, role), roles.count(role), generator)
        return [pool[drawn[role].pop()] for role in roles]

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
                    solver_correct_N=columns.correct_N,
                ),
                experiment.game,
            )
        except ValueError as error:
            raise TrainingDivergedError(str(error)) from None
        lengths_N = np.array([len(r.completion_ids) for r in rollouts])
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
            sampled_logprobs=[r.logprobs for r in rollouts],
            reference_logprobs=None,
            advantages_N=advantages_N,
            role_ids_N=role_ids_N,
            group_ids_N=group_ids_N,
            versions_N=versions_N,
        )
        return rewards_N, batch, metrics

    async def _with_logprobs(self, batch: PolicyBatch) -> PolicyBatch:
        """Add the reference's log-probs where the loss has a KL term; replace the sampler's where so configured."""
        players, objective = self.session.players, self.objective
        if objective.needs_reference:
            with span("reference", device=True):
                reference = await players.compute(lambda: objective.recompute(players.base.module, batch))
            batch = replace(batch, reference_logprobs=reference)
        if self.session.experiment.rollout.logprobs == "recomputed":
            with span("recompute", device=True):
                recomputed = await players.compute(lambda: objective.recompute(self.learner.module, batch))
            batch = replace(batch, sampled_logprobs=recomputed)
        return batch
