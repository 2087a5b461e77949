"""`GroupBuffer`: finished groups that wait for the trainer. No group that it returns is over the staleness budget.

    buffer = GroupBuffer(budget=2)
    buffer.put(group, version=7)              # 7: the trainer's version when the group arrives
    taken = buffer.take({Role.HELPFUL: 16, Role.SNEAKY: 16}, version=8)   # None: too few groups of a role wait

The staleness of a rollout is the trainer's version when it is trained on, less the oldest version among its tokens. So
time in flight and time in the buffer both count. A group is as stale as the stalest of its rollouts.

`take` chooses within each role: the freshest groups first, or with prefer="old" those nearest to the budget. It never
takes more of one role because another role is late: a role that writes short solutions would fill the batches. Groups
over the budget are dropped and counted. The buffer knows nothing of time, tasks or engines.

Invariants: every group that `take` returns is within the budget; a batch has exactly the role counts that were asked
for; each group that was put is handed out once, dropped once, or still waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pvg.records import Group, Role

Prefer = Literal["fresh", "old"]


@dataclass(frozen=True, slots=True)
class Taken:
    """A group, and the trainer's version when it arrived: before that, the group aged in flight. `oldest` is the oldest
    version among its tokens. It is computed once, because every arrival compares all groups that wait."""

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

    @property
    def by_role(self) -> Counter[Role]:
        """How many groups of each role wait."""
        return Counter(arrival.group.role for arrival in self._waiting)

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

    def take(self, wanted: Mapping[Role, int], version: int) -> list[Taken] | None:
        """`wanted` groups of each role, all within the budget, in the order they arrived; None when a role has fewer.
        Of equally fresh groups, those that arrived first are taken."""
        self.expire(version)
        waiting = self.by_role
        if any(waiting[role] < count for role, count in wanted.items()):
            return None
        left = Counter(wanted)
        chosen = set()
        for place in sorted(range(len(self._waiting)), key=lambda place: self._sign * self._waiting[place].oldest):
            role = self._waiting[place].group.role  # the sort is stable: equally fresh groups stay in their order
            if left[role] > 0:
                left[role] -= 1
                chosen.add(place)
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
