"""`GroupBuffer`: groups that wait for the trainer, none of them ever handed out staler than the budget.

    buffer = GroupBuffer(budget=2)
    buffer.put(group, version=7)              # 7: the trainer's version as it comes
    taken = buffer.take(32, version=8)        # 32 groups; None: there are not so many yet

The staleness of a rollout is the trainer's version when it is trained on, less the oldest version among its tokens. So
the time it was in flight and the time it waits here both count, and a group is as stale as the stalest of its rollouts.

The freshest groups are taken first, or with prefer="old" those that are nearest to the budget; any within it will do,
so nobody waits for better ones. What is over the budget is dropped and counted. Nothing here knows of time, tasks or
engines.

Invariants: what `take` hands out is within the budget; each group that was put is handed out once, dropped once, or
still waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pvg.records import Group

Prefer = Literal["fresh", "old"]


@dataclass(frozen=True, slots=True)
class Taken:
    """A group, and the trainer's version when it came: what it aged before that it aged in flight. `oldest` is the
    oldest version among its tokens, found once: every group that comes asks it of all that wait."""

    group: Group
    arrived: int
    oldest: int


@dataclass(slots=True)
class Drops:
    """Rollouts that were sampled and are too old to train on, by when that was found, and their completion tokens."""

    on_arrival: int = 0
    waiting: int = 0
    tokens: int = 0


class GroupBuffer:
    """`budget`: versions that a rollout may be behind."""

    def __init__(self, budget: int, prefer: Prefer = "fresh") -> None:
        self.drops = Drops()
        self._budget = budget
        self._sign = -1 if prefer == "fresh" else 1
        self._waiting: list[Taken] = []  # as they came

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, group: Group, version: int) -> None:
        """Raises ValueError for a group without rollouts: it has no version."""
        arrival = Taken(group, version, oldest(group))
        if self._within(arrival, version):
            self._waiting.append(arrival)
        else:
            self.drops.on_arrival += self._dropped(arrival)

    def expire(self, version: int) -> None:
        """Drop what is over the budget now. Versions only go up, so it would never be within it again."""
        kept = []
        for arrival in self._waiting:
            if self._within(arrival, version):
                kept.append(arrival)
            else:
                self.drops.waiting += self._dropped(arrival)
        self._waiting = kept

    def take(self, count: int, version: int) -> list[Taken] | None:
        """`count` groups within the budget, in the order they came; None when fewer wait. Of equally fresh ones, those
        that came first are taken."""
        self.expire(version)
        if len(self._waiting) < count:
            return None
        by_age = sorted(range(len(self._waiting)), key=lambda place: self._sign * self._waiting[place].oldest)  # stable
        chosen = set(by_age[:count])
        taken = [arrival for place, arrival in enumerate(self._waiting) if place in chosen]
        self._waiting = [arrival for place, arrival in enumerate(self._waiting) if place not in chosen]
        return taken

    def _within(self, arrival: Taken, version: int) -> bool:
        return version - arrival.oldest <= self._budget

    def _dropped(self, arrival: Taken) -> int:
        self.drops.tokens += sum(len(rollout.completion_ids) for rollout in arrival.group.rollouts)
        return len(arrival.group.rollouts)


def oldest(group: Group) -> int:
    """The oldest policy version among the tokens of a group."""
    return min(rollout.version for rollout in group.rollouts)
