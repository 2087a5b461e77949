"""Dynamic sampling: replace groups whose rewards are all equal by newly sampled groups (`training.dynamic_sampling`).

Source: DAPO (arXiv 2503.14476, section 3.2). A group of equal rewards has no gradient, so it makes the batch's gradient
smaller and noisier. A group with different rewards is called *live*.

The game samples, scores and rewards further groups in rounds until each role has its share of live groups. If the
rounds or the problems run out, groups without a signal fill the rest, so the size and role shares of a batch never
change. A round depends only on the weights, the batch number and the results of earlier rounds, so a resumed run
repeats it bit by bit. Rewards are computed within one round. This does not affect rewards that compare solutions of a
problem, because no role gets the same problem in two rounds.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pvg.game.orders import ProverOrders
from pvg.records import Float32, Group, Role, Rollout
from pvg.telemetry.spans import span

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
