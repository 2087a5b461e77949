"""Batches for the prover: sample, grade, score, reward, assign credit. One call of `next_batch` gives one batch.

Token ids and log-probs come from the sampler unchanged. With `rollout.prefetch`, groups are sampled and scored while
the trainer works on earlier ones (pvg.game.prefetch). With `training.dynamic_sampling`, groups without a signal are
replaced (pvg.game.on_policy). All sampled rollouts are recorded, counted and tracked, not only those trained on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pvg.config.training import SpoLoss
from pvg.game.batch_logprobs import EarlyReference, compute_logprobs, with_logprobs
from pvg.game.orders import Curriculum, ProverOrders, curriculum_of
from pvg.game.prefetch import Prefetcher
from pvg.game.protocols import environment_of
from pvg.game.rewards import pay
from pvg.game.session import Session
from pvg.game.statistics import (
    RolloutColumns,
    cache_metrics,
    cut_metrics,
    mean_score,
    play_metrics,
    sampling_metrics,
    staleness_metrics,
    value_metrics,
)
from pvg.models.language_model import LanguageModel
from pvg.records import Float32, Group, Role, Rollout
from pvg.rollout.dispatcher import PartialSampling, partial_sampling
from pvg.rollout.engine import EngineStats
from pvg.telemetry.spans import span
from pvg.training.batch import PolicyBatch, batch_of, groups_and_roles
from pvg.training.credit import (
    RoleBaseline,
    ValueTracker,
    advantages,
    baseline_advantages,
    tracked_advantages,
    zero_signal_groups,
)
from pvg.training.losses import PolicyObjective
from pvg.verifier.scorer import ScorerStats, VerifierScorer

if TYPE_CHECKING:
    from pvg.workers.training import ModelInWorkers


# Dynamic sampling: replace groups whose rewards are all equal by newly sampled groups
# (`training.dynamic_sampling`).


Bools = NDArray[np.bool_]


def live_groups(rewards_N: Float32, sizes_G: Sequence[int]) -> Bools:
    """bool [G]: whether each group has more than one reward value. `rewards_N` holds the groups of `sizes_G` rollouts
    one after the other."""
    parts = np.split(rewards_N, np.cumsum(sizes_G)[:-1]) if len(sizes_G) else []
    return np.array([len(part) > 0 and bool(part.min() < part.max()) for part in parts], dtype=bool)


def refill_counts(wanted: Mapping[Role, int], seen: Mapping[Role, int], live: Mapping[Role, int]) -> dict[Role, int]:
    """How many further groups of each role to sample, so that the expected number of live ones covers the missing ones.

    `wanted`: live groups of a full batch. `seen`: groups sampled so far, of which `live` are live. The expected share
    of live groups is (live + 1) / (seen + 1), which is never 0. A role gets at most `wanted` further groups; complete
    roles are left out.
    """
    counts: dict[Role, int] = {}
    for role, count in wanted.items():
        missing = count - live.get(role, 0)
        if missing > 0:
            expected = -(-missing * (seen.get(role, 0) + 1) // (live.get(role, 0) + 1))
            counts[role] = min(expected, count)
    return counts


def chosen_groups(roles_G: Sequence[Role], live_G: Bools, wanted: Mapping[Role, int]) -> list[int]:
    """Places of the groups to train on, ascending: for each role the first `wanted` live groups, then the first others
    if there are too few."""
    chosen: list[int] = []
    for role, count in wanted.items():
        places = [place for place, of in enumerate(roles_G) if of is role]
        places.sort(key=lambda place: not live_G[place])  # stable
        chosen += places[:count]
    return sorted(chosen)


@dataclass(frozen=True, slots=True)
class ScoredGroups:
    """Groups that were sampled, scored and rewarded. `trained_M`: the rows of the N rollouts to train on;
    `similarity_N`: see pvg.game.rewards."""

    groups: Sequence[Group]
    scores_N: Float32
    rewards_N: Float32
    aligned_N: NDArray[np.bool_]
    trained_M: NDArray[np.int64]
    similarity_N: Float32 | None = None

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def live_G(self) -> NDArray[np.bool_]:
        return live_groups(self.rewards_N, [len(group.rollouts) for group in self.groups])

    def with_more(self, more: ScoredGroups) -> ScoredGroups:
        """Both together; trains on all rows."""
        alike = [part.similarity_N for part in (self, more) if part.similarity_N is not None]
        return ScoredGroups(
            [*self.groups, *more.groups],
            np.concatenate([self.scores_N, more.scores_N]),
            np.concatenate([self.rewards_N, more.rewards_N]),
            np.concatenate([self.aligned_N, more.aligned_N]),
            np.arange(len(self.rewards_N) + len(more.rewards_N)),
            np.concatenate(alike) if alike else None,
        )

    def restricted(self, places: Sequence[int]) -> ScoredGroups:
        """The same groups, training only on those at `places`."""
        sizes_G = np.array([len(group.rollouts) for group in self.groups])
        kept_N = np.repeat(np.isin(np.arange(len(sizes_G)), places), sizes_G)
        return replace(self, trained_M=np.flatnonzero(kept_N))


async def refilled(
    scored: ScoredGroups, number: int, orders: ProverOrders, play: Callable[[Sequence[Group]], Awaitable[ScoredGroups]]
) -> tuple[ScoredGroups, float, dict[str, float]]:
    """Sample further groups for batch `number` until it has enough live ones. Returns all groups (`scored` first, with
    the rows to train on), the seconds spent on sampling, and metrics."""
    session = orders.session
    wanted = Counter(group.role for group in scored.groups)
    ordered, seconds, rounds = orders.batch(number), 0.0, 0
    while rounds < session.experiment.training.dynamic_sampling:
        seen = Counter(group.role for group in scored.groups)
        live = Counter(group.role for group, is_live in zip(scored.groups, scored.live_G, strict=True) if is_live)
        more = orders.refill(number, rounds, refill_counts(wanted, seen, live), ordered)
        if not more:
            break
        rounds += 1
        ordered += more
        started = time.perf_counter()
        with span("rollout"):
            groups = await orders.sample(more, number)
        seconds += time.perf_counter() - started
        scored = scored.with_more(await play(groups))
    live_G = scored.live_G
    places = chosen_groups([group.role for group in scored.groups], live_G, wanted)
    missing = len(places) - int(live_G[places].sum())
    if missing:
        session.ledger.log.event("rollout", event="short", step=number, groups=missing, rounds=rounds)
    return (
        scored.restricted(places),
        seconds,
        {
            "refills": float(rounds),
            "groups_sampled": float(len(scored.groups)),
            "groups_surplus": float(live_G.sum() - live_G[places].sum()),
            "groups_missing": float(missing),
        },
    )


@dataclass(frozen=True, slots=True)
class _Since:
    """Time and counters when the sampling of a batch began."""

    at: float
    engine: EngineStats
    scorer: ScorerStats


@dataclass
class OnPolicySource:
    """Produces one training batch per call. Call `start` before the first batch and `close` after the last.

    A batch is deterministic given the weights and its number (`batches_done`), with these additions: `spo` also depends
    on `tracker`, `rae` on `baseline`, `training.curriculum` on `curriculum`, `partial` on rollouts that earlier batches
    left unfinished, and a deadline or rollout.prefetch on which rollouts have arrived.

    `metrics`: those of the newest batch. `learner`: the policy in training, used only to recompute log-probs
    (`rollout.logprobs = "recomputed"`, `training.importance = "decoupled"`).
    """

    session: Session
    scorer: VerifierScorer
    threshold: float
    objective: PolicyObjective
    learner: LanguageModel
    batches_done: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    tracker: ValueTracker | None = field(init=False)
    baseline: RoleBaseline | None = field(init=False)
    curriculum: Curriculum | None = field(init=False)
    orders: ProverOrders = field(init=False)
    partial: PartialSampling | None = field(init=False)
    prefetcher: Prefetcher | None = field(init=False)
    early: EarlyReference | None = field(init=False)
    workers: ModelInWorkers[PolicyBatch] | None = None
    _since: _Since = field(init=False)
    _warned_short: bool = False

    def __post_init__(self) -> None:
        experiment = self.session.experiment
        loss = experiment.training.loss
        self.tracker = ValueTracker() if isinstance(loss, SpoLoss) else None
        self.baseline = RoleBaseline() if experiment.training.loss.kind == "rae" else None
        self.curriculum = curriculum_of(experiment)
        self.orders = ProverOrders(self.session, self.curriculum, environment_of(self.session, self.scorer))
        self.early = None
        if self.objective.needs_reference and self.session.players.samples_elsewhere:
            self.early = EarlyReference(self._early_logprobs)
            self.orders.on_group = self.early.arrived
        self.partial = partial_sampling(experiment, self.session.players.dispatcher)
        self.prefetcher = Prefetcher(self.orders, self.scorer) if experiment.rollout.prefetch.kind != "none" else None
        self._since = self._now()

    # --- work that overlaps with the trainer: prefetched rollouts and their reference ---------------------------------

    def start(self, version: int) -> None:
        """Begin work ahead; the engine has the trainer's `version`. Call it outside of spans."""
        if self.early is not None:
            self.early.start()
        if self.prefetcher is not None:
            self._since = self._now()
            training = self.session.experiment.training
            batches = -(-training.steps // training.minibatches) - self.batches_done
            self.prefetcher.start(version, self.batches_done, batches)

    def published(self, version: int) -> None:
        """The engine has received the trainer's new `version`."""
        if self.prefetcher is not None:
            self.prefetcher.published(version)

    async def close(self) -> None:
        """Cancel prefetched work."""
        try:
            if self.early is not None:
                await self.early.close()
        finally:  # even if the wait for the early pass was cancelled
            if self.prefetcher is not None:
                await self.prefetcher.close()

    # --- resuming -----------------------------------------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        """What the next batches depend on besides the weights, as JSON data."""
        return {
            "batches": self.batches_done,
            **({} if self.tracker is None else {"values": self.tracker.state()}),
            **({} if self.baseline is None else {"baseline": self.baseline.state()}),
            **({} if self.curriculum is None else {"success": self.curriculum.state()}),
            **({} if self.prefetcher is None else {"groups_begun": self.prefetcher.started}),
            **({} if self.partial is None else {"partial": self.partial.state()}),
        }

    def load_progress(self, progress: Mapping[str, Any]) -> int:
        """Restore `progress`. Returns the number of unfinished rollouts that it carried and that are lost."""
        self.batches_done = progress["batches"]
        if self.tracker is not None:
            self.tracker.load_state(progress["values"])
        if self.baseline is not None:
            self.baseline.load_state(progress["baseline"])
        if self.curriculum is not None:
            self.curriculum.load_state(progress["success"])
        if self.prefetcher is not None:
            self.prefetcher.resume(progress["groups_begun"])
        return 0 if self.partial is None else self.partial.load_state(progress["partial"])

    # --- a batch ------------------------------------------------------------------------------------------------------

    async def next_batch(self) -> PolicyBatch:
        session, scorer, number = self.session, self.scorer, self.batches_done
        ahead: dict[str, float] = {}
        async with nullcontext() if self.early is None else self.early.compute_passes():
            if self.prefetcher is None:
                self._since = self._now()
                with span("rollout"):
                    groups = await self._sample(number)
            else:
                groups, ahead = await self.prefetcher.batch(number)
        sampled = self._now()
        seconds = sampled.at - self._since.at
        scored = await self._with_rewards(groups)
        if session.experiment.training.dynamic_sampling:
            scored, resampled_s, ahead = await refilled(scored, number, self.orders, self._with_rewards)
            seconds += resampled_s
            sampled = self._now()
            self._tell_short(int(ahead["groups_missing"]))
        with span("credit"):
            batch, credit_metrics = await self._credit(scored)
        everything = scored.rollouts
        batch = await with_logprobs(self, batch, [everything[row] for row in scored.trained_M])
        since = self._since
        with span("record"):
            engine, version = sampled.engine.since(since.engine), session.players.engine.version
            measured = partial(_measured, scored, self.threshold, engine, seconds, version)
            session.ledger.keep(await session.players.off_loop(partial(_scored, scored, scorer.version)))
            self.batches_done += 1
            self.metrics = {
                **await session.players.off_loop(measured),
                **credit_metrics,
                **({} if self.partial is None else self.partial.metrics),
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

    def _tell_short(self, groups: int) -> None:
        """Notify once per phase; the metric groups_missing reports each batch."""
        if groups and not self._warned_short:
            self._warned_short = True
            self.session.observer.noticed(
                f"{groups} groups of batch {self.batches_done} have equal rewards and so no signal. Resampling "
                f"{self.session.experiment.training.dynamic_sampling} times (or using all problems) did not "
                "replace them. Raise training.dynamic_sampling. The metric groups_missing counts such groups."
            )

    async def _with_rewards(self, groups: Sequence[Group]) -> ScoredGroups:
        """Score and reward groups that were sampled together."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        with span("score"):  # the cache already holds the scores of prefetched groups
            scores_N = await self.scorer.score(rollouts)
        with span("credit"):
            work = partial(pay, self.session.experiment, self.session.task, rollouts, scores_N)
            paid = await self.session.players.off_loop(work)
        return ScoredGroups(
            groups, scores_N, paid.rewards_N, paid.aligned_N, np.arange(len(rollouts)), paid.similarity_N
        )

    async def _credit(self, scored: ScoredGroups) -> tuple[PolicyBatch, dict[str, float]]:
        """The batch with its advantages, and metrics. Updates the value tracker, the baseline and the curriculum."""
        everything = scored.rollouts
        metrics = {"zero_signal": zero_signal_groups(scored.rewards_N, *groups_and_roles(everything))}
        if scored.similarity_N is not None:
            metrics["similarity"] = mean_score(
                scored.similarity_N, np.array([r.role is Role.SNEAKY for r in everything])
            )
        if self.curriculum is not None:
            metrics |= self.curriculum.observe(everything, scored.aligned_N)
        rollouts, rewards_N = [everything[row] for row in scored.trained_M], scored.rewards_N[scored.trained_M]
        group_ids_N, role_ids_N = groups_and_roles(rollouts)
        versions_N = np.array([r.version for r in rollouts], dtype=np.int32)
        if self.tracker is not None:
            values_N = self.tracker.observe([(r.problem_id, r.role) for r in rollouts], rewards_N, versions_N)
            lengths_N = np.array([r.sampled_tokens for r in rollouts])
            advantages_N = tracked_advantages(rewards_N, values_N, lengths_N, role_ids_N)
            metrics |= value_metrics(rewards_N, values_N, advantages_N)
        elif self.baseline is not None:
            values_N = self.baseline.observe([r.role for r in rollouts], rewards_N)
            advantages_N = baseline_advantages(rewards_N, values_N, role_ids_N)
            metrics |= value_metrics(rewards_N, values_N, advantages_N)
        else:
            loss = self.session.experiment.training.loss.kind
            advantages_N = advantages(loss, rewards_N, group_ids_N, role_ids_N, credit=self.objective.credit)
        return await self.session.players.off_loop(partial(batch_of, rollouts, advantages_N)), metrics

    async def _early_logprobs(self, rollouts: Sequence[Rollout]) -> list[Float32]:
        return await compute_logprobs(self, "reference", batch_of(rollouts, np.zeros(len(rollouts), dtype=np.float32)))


def _scored(scored: ScoredGroups, verifier_version: str) -> list[Rollout]:
    """The rollouts with scores and rewards, as they are stored."""
    return [
        replace(r, score=float(score), reward=float(reward), verifier_version=verifier_version)
        for r, score, reward in zip(scored.rollouts, scored.scores_N, scored.rewards_N, strict=True)
    ]


def _measured(
    scored: ScoredGroups, threshold: float, engine: EngineStats, seconds: float, version: int
) -> dict[str, float]:
    """Metrics of all sampled rollouts. `engine`: its counts over these `seconds`; `version`: its current version."""
    rollouts = scored.rollouts
    return {
        **play_metrics(RolloutColumns(rollouts, scored.scores_N), threshold),
        "reward_mean": float(scored.rewards_N.mean()),
        **cut_metrics(scored.groups),
        **sampling_metrics(rollouts, engine, seconds),
        **staleness_metrics(rollouts, version),
    }
