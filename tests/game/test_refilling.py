"""Filling a batch up, on groups made by hand: what is asked for, when it ends, and what is trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pvg.game.groups import Refill, ScoredGroups
from pvg.records import Group, Problem, Role

H, S = Role.HELPFUL, Role.SNEAKY
SIZE = 2


def group(role: Role, number: int) -> Group:
    return Group(Problem(f"p{number}", "1+1?", "2"), role, tuple(SimpleNamespace(group=number) for _ in range(SIZE)))  # type: ignore[misc]


class Orders:
    """Orders are (role, number); a group is live where `live` says so of its number. `pool`: refills that there are."""

    def __init__(self, roles: Sequence[Role], live: set[int], rounds: int, pool: int = 99) -> None:
        self.roles, self.live, self.pool = list(roles), live, pool
        self.asked: list[tuple[int, dict[Role, int]]] = []
        self.told: list[dict[str, Any]] = []
        log = SimpleNamespace(event=lambda kind, **what: self.told.append(what))
        self.refills = Refill(self, rounds)  # type: ignore[arg-type]
        observer = SimpleNamespace(noticed=lambda text: None)
        self.session = SimpleNamespace(ledger=SimpleNamespace(log=log), observer=observer)

    def batch(self, number: int) -> list[tuple[Role, int]]:
        return list(zip(self.roles, range(len(self.roles)), strict=True))

    def refill(
        self, number: int, attempt: int, counts: dict[Role, int], before: list[tuple[Role, int]]
    ) -> list[tuple[Role, int]]:
        self.asked.append((attempt, dict(counts)))
        roles = [role for role, count in counts.items() for _ in range(count)][: self.pool]
        self.pool -= len(roles)
        return [(role, len(before) + place) for place, role in enumerate(roles)]

    async def sample(self, orders: Sequence[tuple[Role, int]], number: int) -> list[Group]:
        return [group(role, number_) for role, number_ in orders]

    async def play(self, groups: Sequence[Group]) -> ScoredGroups:
        rewards = [[1.0, float(g.rollouts[0].group not in self.live)] for g in groups]
        rewards_N = np.array(rewards, dtype=np.float32).reshape(-1)
        rows = len(rewards_N)
        return ScoredGroups(groups, rewards_N, rewards_N, np.arange(rows))

    def run(self) -> tuple[ScoredGroups, dict[str, float]]:
        async def work() -> tuple[ScoredGroups, float, dict[str, float]]:
            first = await self.play(await self.sample(self.batch(7), 7))
            return await self.refills.fill(first, 7, self.play)

        played, _, metrics = asyncio.run(work())
        return played, metrics


def trained(played: ScoredGroups) -> list[tuple[Role, int]]:
    """The groups that are trained on, each of which must be whole."""
    numbers = [rollout.group for rollout in played.rollouts]
    kept = [numbers[row] for row in played.trained_M]
    assert kept == [number for number in sorted(set(kept)) for _ in range(SIZE)]
    return [(played.groups[number].role, number) for number in sorted(set(kept))]


def test_a_batch_with_a_signal_everywhere_asks_for_nothing() -> None:
    orders = Orders([H, S, H], {0, 1, 2}, rounds=4)
    played, metrics = orders.run()
    assert trained(played) == [(H, 0), (S, 1), (H, 2)]
    assert metrics == {"refills": 0.0, "groups_sampled": 3.0, "groups_surplus": 0.0, "groups_missing": 0.0}
    assert orders.told == []


def test_live_groups_replace_the_others_role_by_role() -> None:
    # Ordered 0 to 3; helpful 0 and 2 silent, sneaky 3 silent. Helpful lacks both of two: 2 x 3/1 = 6, but at most 2.
    # Sneaky lacks one of two: 1 x 3/2, rounded up. 5 and 6, 7 turn out live; then helpful lacks one still.
    orders = Orders([H, S, H, S], {1, 5, 6, 7, 8}, rounds=4)
    played, metrics = orders.run()
    assert orders.asked[0] == (0, {H: 2, S: 2})  # numbers 4, 5 (helpful) and 6, 7 (sneaky)
    assert orders.asked[1] == (1, {H: 2})  # one missing, one of four live: 5/2, at most 2
    # The second round's 8 is live: two of each role, the first that were.
    assert trained(played) == [(S, 1), (H, 5), (S, 6), (H, 8)]
    assert metrics == {"refills": 2.0, "groups_sampled": 10.0, "groups_surplus": 1.0, "groups_missing": 0.0}
    assert len(played.rewards_N) == 20  # all of it is there to be recorded


@pytest.mark.parametrize(("rounds", "pool", "made"), [(3, 99, 3), (9, 5, 3)])
def test_it_ends_with_the_rounds_or_the_problems_and_silent_groups_fill_up(rounds: int, pool: int, made: int) -> None:
    orders = Orders([H, H], {1}, rounds=rounds, pool=pool)
    played, metrics = orders.run()
    assert trained(played) == [(H, 0), (H, 1)]  # the first of the others
    assert metrics["groups_missing"] == 1.0
    assert metrics["refills"] == made
    assert [told["groups"] for told in orders.told] == [1]
