"""Where the groups of a batch come from. A round's loop (pvg.game.round) asks one of these sources for them.

- `FreshGroups`: sampled now.
- `CarriedGroups`: with those that a deadline has interrupted in earlier batches (`rollout.deadline = "continue"`).
- `pvg.game.prefetch.Prefetcher`: sampled while the trainer works on earlier batches (`rollout.prefetch`).

After scoring, `Refill` replaces groups without a signal (`training.dynamic_sampling`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pvg.game.orders import ProverOrders
from pvg.game.rewards import Earned
from pvg.game.statistics import (
    RolloutColumns,
    cut_metrics,
    play_metrics,
    read_metrics,
    sampling_metrics,
    staleness_metrics,
)
from pvg.records import Float32, Group, Role, Rollout
from pvg.telemetry.spans import span

if TYPE_CHECKING:
    from pvg.rollout.dispatcher import PartialSampling
    from pvg.rollout.engine import EngineStats

Bools = NDArray[np.bool_]


class FreshGroups:
    """Every batch is sampled by the newest policy when it is asked for. `ahead`: whether the source samples while the
    trainer works. `carried`: rollouts that wait for the next batch."""

    ahead = False

    def __init__(self, orders: ProverOrders) -> None:
        self._orders = orders

    @property
    def carried(self) -> int:
        return 0

    def start(self, version: int, batch: int, batches: int) -> None:
        """Begin with batch number `batch`; engine and trainer have `version`. `batches` of them remain."""

    def published(self, version: int) -> None:
        """The engine has received the trainer's new `version`."""

    async def batch(self, number: int) -> tuple[list[Group], dict[str, float]]:
        with span("rollout"):
            return await self._orders.sample(self._orders.batch(number), number), {}

    async def close(self) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> int:
        """Returns the number of rollouts that were in progress and are lost."""
        return 0


class CarriedGroups(FreshGroups):
    """A batch is what is complete at the deadline; the rest continues in the next batch."""

    def __init__(self, orders: ProverOrders, partial: PartialSampling) -> None:
        super().__init__(orders)
        self._partial = partial

    @property
    def carried(self) -> int:
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
    `similarity_N`, `earned`: see pvg.game.rewards."""

    groups: Sequence[Group]
    scores_N: Float32
    rewards_N: Float32
    trained_M: NDArray[np.int64]
    similarity_N: Float32 | None = None
    earned: Sequence[Earned] = ()

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def live_G(self) -> Bools:
        return live_groups(self.rewards_N, [len(group.rollouts) for group in self.groups])

    def stored(self, verifier_version: str) -> list[Rollout]:
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
            **sampling_metrics([each for r in rollouts for each in (r, *r.others.values())], engine, seconds),
            **staleness_metrics(rollouts, version),
            **read_metrics(rollouts),
        }

    def with_more(self, more: ScoredGroups) -> ScoredGroups:
        """Both together; trains on all rows."""
        alike = [part.similarity_N for part in (self, more) if part.similarity_N is not None]
        return ScoredGroups(
            [*self.groups, *more.groups],
            np.concatenate([self.scores_N, more.scores_N]),
            np.concatenate([self.rewards_N, more.rewards_N]),
            np.arange(len(self.rewards_N) + len(more.rewards_N)),
            np.concatenate(alike) if alike else None,
            [*self.earned, *more.earned],
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
