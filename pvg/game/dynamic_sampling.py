"""Dynamic sampling: groups whose rewards are all the same are left out of a batch, and others sampled in their place.

Source: DAPO (arXiv 2503.14476, section 3.2). Such a group has no gradient, and each of them makes the batch's smaller
and noisier. Roles are filled up one by one, so that the batch keeps their shares. All functions are pure.
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
    """bool [G]: whether a group holds more than one reward value. `rewards_N` are those of the groups of `sizes_G`
    rollouts, one group after the other."""
    parts = np.split(rewards_N, np.cumsum(sizes_G)[:-1]) if len(sizes_G) else []
    return np.array([len(part) > 0 and bool(part.min() < part.max()) for part in parts], dtype=bool)


def refill_counts(wanted: Mapping[Role, int], seen: Mapping[Role, int], live: Mapping[Role, int]) -> dict[Role, int]:
    """How many further groups of each role to sample, so that about as many as are missing will be live.

    `wanted` live groups; `seen` were sampled so far and `live` of these are. The share of live ones is taken to be
    (live + 1) / (seen + 1): never 0, and soon the one that was seen. At most as many as the batch wants of the role.
    Roles that are complete are left out.
    """
    counts: dict[Role, int] = {}
    for role, count in wanted.items():
        missing = count - live.get(role, 0)
        if missing > 0:
            expected = -(-missing * (seen.get(role, 0) + 1) // (live.get(role, 0) + 1))
            counts[role] = min(expected, count)
    return counts


def chosen_groups(roles_G: Sequence[Role], live_G: Bools, wanted: Mapping[Role, int]) -> list[int]:
    """The places of the groups to train on, rising: of each role the first `wanted` that are live; where there are too
    few, the first of the others fill the batch up."""
    chosen: list[int] = []
    for role, count in wanted.items():
        places = [place for place, of in enumerate(roles_G) if of is role]
        places.sort(key=lambda place: not live_G[place])  # stable
        chosen += places[:count]
    return sorted(chosen)


# Dynamic sampling in the game: a batch is filled up with groups whose rewards differ (`training.dynamic_sampling`).
#
# Rounds of further groups are sampled, scored and paid until each role has its share of live ones, or the rounds or
# the problems are used up: then groups without a signal fill the batch up, as they would have without all this. So a
# batch has the size that it always has. What is played in a round depends on the weights, on the batch's number and
# on what the rounds before it brought, and on nothing else: a resumed run repeats it bit by bit. Rewards are those of
# a round by itself; none that compares solutions of a problem misses any, for no problem is asked again in the same
# role.


@dataclass(frozen=True, slots=True)
class Played:
    """Groups that were sampled, scored and paid. `trained_M`: the rows, of the N rollouts, that are trained on;
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

    def with_more(self, more: Played) -> Played:
        """All rows are trained on."""
        alike = [part.similarity_N for part in (self, more) if part.similarity_N is not None]
        return Played(
            [*self.groups, *more.groups],
            np.concatenate([self.scores_N, more.scores_N]),
            np.concatenate([self.rewards_N, more.rewards_N]),
            np.concatenate([self.aligned_N, more.aligned_N]),
            np.arange(len(self.rewards_N) + len(more.rewards_N)),
            np.concatenate(alike) if alike else None,
        )

    def restricted(self, places: Sequence[int]) -> Played:
        """Trained on are the groups at `places` alone."""
        sizes_G = np.array([len(group.rollouts) for group in self.groups])
        kept_N = np.repeat(np.isin(np.arange(len(sizes_G)), places), sizes_G)
        return replace(self, trained_M=np.flatnonzero(kept_N))


async def refilled(
    played: Played, number: int, orders: ProverOrders, play: Callable[[Sequence[Group]], Awaitable[Played]]
) -> tuple[Played, float, dict[str, float]]:
    """All that was sampled for batch `number`, `played` first, and which of it to train on; the seconds spent on
    sampling the rest, and metrics."""
    session = orders.session
    wanted = Counter(group.role for group in played.groups)
    ordered, seconds, rounds = orders.batch(number), 0.0, 0
    while rounds < session.experiment.training.dynamic_sampling:
        seen = Counter(group.role for group in played.groups)
        live = Counter(group.role for group, is_live in zip(played.groups, played.live_G, strict=True) if is_live)
        more = orders.refill(number, rounds, refill_counts(wanted, seen, live), ordered)
        if not more:
            break
        rounds += 1
        ordered += more
        started = time.perf_counter()
        with span("rollout"):
            groups = await orders.sample(more, number)
        seconds += time.perf_counter() - started
        played = played.with_more(await play(groups))
    live_G = played.live_G
    places = chosen_groups([group.role for group in played.groups], live_G, wanted)
    missing = len(places) - int(live_G[places].sum())
    if missing:
        session.ledger.log.event("rollout", event="short", step=number, groups=missing, rounds=rounds)
    return (
        played.restricted(places),
        seconds,
        {
            "refills": float(rounds),
            "groups_sampled": float(len(played.groups)),
            "groups_surplus": float(live_G.sum() - live_G[places].sum()),
            "groups_missing": float(missing),
        },
    )
