"""Where the groups of a batch come from. A round's loop (pvg.game.round) asks one `GroupSource` for them.

- `FreshGroups`: sampled now.
- `CarriedGroups`: with those that a deadline has interrupted in earlier batches (`rollout.deadline = "continue"`).
- `pvg.game.prefetch.Prefetcher`: sampled while the trainer works on earlier batches (`rollout.prefetch`).

After scoring, `Refill` replaces groups without a signal (`training.dynamic_sampling`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from pvg.game.orders import ProverOrders
from pvg.game.statistics import RolloutColumns, cut_metrics, play_metrics, sampling_metrics, staleness_metrics
from pvg.models.language_model import LanguageModel
from pvg.records import Float32, Group, Role, Rollout
from pvg.telemetry.spans import span
from pvg.training.batch import PolicyBatch, batch_of
from pvg.training.losses import PolicyObjective

if TYPE_CHECKING:
    from pvg.game.players import Players
    from pvg.rollout.dispatcher import PartialSampling
    from pvg.rollout.engine import EngineStats
    from pvg.workers.training import ModelInWorkers


# The log-probs that a batch's loss needs besides the sampler's: of the reference, and of the policy in training.


Compute = Callable[[Sequence[Rollout]], Awaitable[list[Float32]]]


class EarlyReference:
    """Computes log-probs under the frozen reference while others sample the rest of a batch: servers, or other workers.

        early = EarlyReference(compute)        # compute(rollouts): their log-probs under the reference
        early.start()                          # outside of spans: its work overlaps with the wait
        async with early.compute_passes():          # around a wait for rollouts
            ...                                # early.arrived(rollouts), for each complete group
        known = early.take(rollouts, oldest)   # the available log-probs, by rollout id
        await early.close()

    While others sample, the trainer's processes are idle. One forward pass takes all groups that have arrived; groups
    that arrive during it go into the next pass. No pass starts outside of `compute_passes`, so no pass delays the
    trainer. With an engine in the trainer's processes there is no gain, because sampling needs the same threads.

    Invariant: the log-probs equal those of one pass over the whole batch, up to rounding. Call all methods from the
    thread of one event loop.
    """

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._arrived: list[Rollout] = []
        self._known: dict[str, tuple[int, Float32]] = {}  # rollout id -> version, log-probs
        self._waiting = False
        self._wanted = asyncio.Event()  # set when there are rollouts to compute and the trainer waits
        self._pass = asyncio.Lock()  # held during a forward pass
        self._worker: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._worker = asyncio.create_task(self._work(), name="early reference")

    async def close(self) -> None:
        """Wait for the current pass, then stop. Does nothing before `start`."""
        if self._worker is not None:
            worker, self._worker = self._worker, None
            async with self._pass:
                worker.cancel()
            await asyncio.wait([worker])

    def arrived(self, rollouts: Sequence[Rollout]) -> None:
        """Add a complete group; the rest of its batch is still in flight."""
        self._arrived += rollouts
        if self._waiting:
            self._wanted.set()

    @asynccontextmanager
    async def compute_passes(self) -> AsyncIterator[None]:
        """Compute arrived groups while the block runs. The block ends after the last pass. Raises the exception of a
        failed pass."""
        self._waiting = True
        if self._arrived:
            self._wanted.set()
        try:
            yield
        finally:
            self._waiting = False
            self._wanted.clear()
            async with self._pass:
                pass
        if self._worker is not None and self._worker.done():
            self._worker.result()

    def take(self, rollouts: Sequence[Rollout], oldest: int) -> dict[str, Float32]:
        """The log-probs of those `rollouts` that were computed early, by id. Forgets them, and all rollouts older than
        version `oldest`, because no step trains on those."""
        ids = {rollout.id for rollout in rollouts}
        found = {id_: logprobs for id_, (_, logprobs) in self._known.items() if id_ in ids}
        self._known = {id_: kept for id_, kept in self._known.items() if id_ not in ids and kept[0] >= oldest}
        self._arrived = [rollout for rollout in self._arrived if rollout.id not in ids and rollout.version >= oldest]
        return found

    async def _work(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if not (self._waiting and self._arrived):
                continue
            rollouts, self._arrived = self._arrived, []
            async with self._pass:
                found = await self._compute(rollouts)
            self._known |= {r.id: (r.version, logprobs) for r, logprobs in zip(rollouts, found, strict=True)}


class LateReference:
    """In place of an `EarlyReference` where the trainer's threads sample: nothing is computed early."""

    def start(self) -> None: ...

    async def close(self) -> None: ...

    def arrived(self, rollouts: Sequence[Rollout]) -> None: ...

    @asynccontextmanager
    async def compute_passes(self) -> AsyncIterator[None]:
        yield

    def take(self, rollouts: Sequence[Rollout], oldest: int) -> dict[str, Float32]:
        return {}


class BatchLogprobs:
    """Adds to a batch the log-probs that its loss needs. `learner`: the policy in training. `workers`: compute in its
    place, if given. `recomputed`: instead of the sampler's (`rollout.logprobs`). `staleness_budget`: the most versions
    that a rollout may be behind."""

    def __init__(
        self,
        players: Players,
        objective: PolicyObjective,
        learner: LanguageModel,
        *,
        workers: ModelInWorkers[PolicyBatch] | None = None,
        recomputed: bool = False,
        staleness_budget: int = 0,
    ) -> None:
        self._players, self._objective, self._learner, self._workers = players, objective, learner, workers
        self._recomputed, self._budget = recomputed, staleness_budget
        early = objective.needs_reference and players.samples_elsewhere
        self.early = EarlyReference(self._reference_of) if early else LateReference()

    async def add(self, batch: PolicyBatch, rollouts: Sequence[Rollout]) -> PolicyBatch:
        """`batch`, which consists of these `rollouts`, with log-probs:

        - The reference's, if the loss has a KL term.
        - The current policy's, if the loss clips around them and the batch has several steps.
        - Recomputed ones instead of the sampler's, with `rollout.logprobs = "recomputed"`.
        """
        objective = self._objective
        if objective.needs_reference:
            batch = replace(batch, reference_logprobs=await self.reference(batch, rollouts))
        if self._recomputed:
            batch = replace(batch, sampled_logprobs=await self._compute("recompute", batch))
        if objective.needs_start:
            return replace(batch, proximal_logprobs=await self._compute("recompute", batch))
        stale_N = batch.versions_N < self._players.engine.version
        if objective.decoupled and stale_N.any():
            if objective.one_step:
                return replace(batch, stale_N=stale_N)
            stale_M = np.flatnonzero(stale_N)
            recomputed = await self._compute("recompute", batch.select(stale_M))
            proximal = list(batch.sampled_logprobs)  # fresh rows: the sampler is the policy at the start of the batch
            for row, logprobs in zip(stale_M, recomputed, strict=True):
                proximal[row] = logprobs
            batch = replace(batch, proximal_logprobs=proximal)
        return batch

    async def reference(self, batch: PolicyBatch, rollouts: Sequence[Rollout]) -> list[Float32]:
        """The reference's log-probs: those computed early, and the rest computed now."""
        known = self.early.take(rollouts, self._players.engine.version - self._budget)
        missing_M = np.flatnonzero([rollout.id not in known for rollout in rollouts])
        if len(missing_M):
            rest = batch if len(missing_M) == len(batch) else batch.select(missing_M)
            for row, logprobs in zip(missing_M.tolist(), await self._compute("reference", rest), strict=True):
                known[rollouts[row].id] = logprobs
        return [known[rollout.id] for rollout in rollouts]

    async def _reference_of(self, rollouts: Sequence[Rollout]) -> list[Float32]:
        return await self._compute("reference", batch_of(rollouts, np.zeros(len(rollouts), dtype=np.float32)))

    async def _compute(self, part: Literal["reference", "recompute"], batch: PolicyBatch) -> list[Float32]:
        """The log-probs under the base prover ("reference") or the policy in training ("recompute")."""
        if self._workers is not None:
            with span(part):
                return await self._workers.logprobs("base" if part == "reference" else "learner", batch)
        model = self._players.base if part == "reference" else self._learner

        def recompute() -> list[Float32]:
            # The span starts here, so the wait for the thread does not count as training.
            with span(part, device=True):
                return self._objective.recompute(model.module, batch)

        return await self._players.compute(recompute)


Bools = NDArray[np.bool_]


class FreshGroups:
    """Every batch is sampled by the newest policy when it is asked for."""

    ahead = False
    carried = 0

    def __init__(self, orders: ProverOrders) -> None:
        self._orders = orders

    def start(self, version: int, batch: int, batches: int) -> None: ...

    def published(self, version: int) -> None: ...

    async def batch(self, number: int) -> tuple[list[Group], dict[str, float]]:
        with span("rollout"):
            return await self._orders.sample(self._orders.batch(number), number), {}

    async def close(self) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> int:
        return 0


class CarriedGroups(FreshGroups):
    """A batch is what is complete at the deadline; the rest continues in the next batch."""

    def __init__(self, orders: ProverOrders, partial: PartialSampling) -> None:
        super().__init__(orders)
        self._partial = partial

    @property
    def carried(self) -> int:  # type: ignore[override]
        return self._partial.carried

    async def batch(self, number: int) -> tuple[list[Group], dict[str, float]]:
        with span("rollout"):
            return await self._partial.sample(self._orders.plan, number), self._partial.metrics

    def state(self) -> dict[str, Any]:
        return dict(self._partial.state())

    def load_state(self, state: Mapping[str, Any]) -> int:
        return self._partial.load_state(dict(state))


# --- scored groups, and their refill ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScoredGroups:
    """Groups that were sampled, scored and rewarded. `trained_M`: the rows of the N rollouts to train on;
    `similarity_N`: see pvg.game.rewards."""

    groups: Sequence[Group]
    scores_N: Float32
    rewards_N: Float32
    aligned_N: Bools
    trained_M: NDArray[np.int64]
    similarity_N: Float32 | None = None

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def live_G(self) -> Bools:
        return live_groups(self.rewards_N, [len(group.rollouts) for group in self.groups])

    def stored(self, verifier_version: str) -> list[Rollout]:
        """The rollouts with scores and rewards, as they are stored."""
        return [
            replace(r, score=float(score), reward=float(reward), verifier_version=verifier_version)
            for r, score, reward in zip(self.rollouts, self.scores_N, self.rewards_N, strict=True)
        ]

    def metrics(self, threshold: float, version: int, engine: EngineStats, seconds: float) -> dict[str, float]:
        """Metrics of all sampled rollouts. `version`: the engine's; `engine`: its counts over these `seconds`."""
        rollouts = self.rollouts
        return {
            **play_metrics(RolloutColumns(rollouts, self.scores_N), threshold),
            "reward_mean": float(self.rewards_N.mean()),
            **cut_metrics(self.groups),
            **sampling_metrics(rollouts, engine, seconds),
            **staleness_metrics(rollouts, version),
        }

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


Score = Callable[[Sequence[Group]], Awaitable[ScoredGroups]]


class Refill:
    """Replaces groups whose rewards are all equal, in at most `attempts` rounds per batch (0: none)."""

    def __init__(self, orders: ProverOrders, attempts: int) -> None:
        self._orders, self._attempts, self._told = orders, attempts, False

    async def fill(
        self, scored: ScoredGroups, number: int, score: Score
    ) -> tuple[ScoredGroups, float, dict[str, float]]:
        """Sample further groups for batch `number` until it has enough live ones. Returns all groups (`scored` first,
        with the rows to train on), the seconds spent on sampling, and metrics ({} with 0 attempts)."""
        if not self._attempts:
            return scored, 0.0, {}
        wanted = Counter(group.role for group in scored.groups)
        ordered, seconds, rounds = self._orders.batch(number), 0.0, 0
        while rounds < self._attempts:
            seen = Counter(group.role for group in scored.groups)
            live = Counter(group.role for group, is_live in zip(scored.groups, scored.live_G, strict=True) if is_live)
            more = self._orders.refill(number, rounds, refill_counts(wanted, seen, live), ordered)
            if not more:
                break
            rounds += 1
            ordered += more
            started = time.perf_counter()
            with span("rollout"):
                groups = await self._orders.sample(more, number)
            seconds += time.perf_counter() - started
            scored = scored.with_more(await score(groups))
        live_G = scored.live_G
        places = chosen_groups([group.role for group in scored.groups], live_G, wanted)
        missing = len(places) - int(live_G[places].sum())
        if missing:
            self._tell_missing(number, missing, rounds)
        metrics = {
            "refills": float(rounds),
            "groups_sampled": float(len(scored.groups)),
            "groups_surplus": float(live_G.sum() - live_G[places].sum()),
            "groups_missing": float(missing),
        }
        return scored.restricted(places), seconds, metrics

    def _tell_missing(self, number: int, missing: int, rounds: int) -> None:
        """Log each batch, and notify once per phase."""
        session = self._orders.session
        session.ledger.log.event("rollout", event="short", step=number, groups=missing, rounds=rounds)
        if not self._told:
            self._told = True
            session.observer.noticed(
                f"{missing} groups of batch {number} have equal rewards and so no signal. Resampling {self._attempts} "
                "times (or using all problems) did not replace them. Raise training.dynamic_sampling. The metric "
                "groups_missing counts such groups."
            )
