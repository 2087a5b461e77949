"""Deadlines: when a set of rollouts stops waiting for its stragglers.

    deadline = Deadline(seconds=20.0, least=4, over="group")
    groups = await dispatcher.sample(orders, deadline=deadline, ...)

A set is one group, or the whole call where no statistics are taken over groups. Its clock starts when its first request
is handed to the engine. When its time is up, it is used with what has arrived; one that has fewer than `least` waits
until it has them, so that a deadline that is too short costs time and never a batch.

Invariant: only tasks that a watch has cut may end as cancelled without that being an error.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pvg.experiment import Experiment

Over = Literal["group", "batch"]


@dataclass(frozen=True, slots=True)
class Deadline:
    """A set of rollouts is cut `seconds` after its first request, or as soon after that as it has `least`.

    `over`: each group is a set of its own, or all groups of a call are one.
    """

    seconds: float
    least: int
    over: Over = "group"


def training_deadline(experiment: Experiment) -> Deadline | None:
    """That of the prover's training. spo and rae take no statistics of groups: all of their batch is one set;
    and so it is where groups that are not complete are carried over."""
    rollout = experiment.rollout
    if rollout.group_deadline_s is None:
        return None
    over: Over = "batch" if experiment.training.groupless or rollout.partial else "group"
    return Deadline(rollout.group_deadline_s, rollout.min_group, over)


def compares_within_groups(experiment: Experiment) -> bool:
    """Whether a rollout's advantage depends on others of its problem and role: by the loss, but for spo's and rae's,
    or by the reward. One of them alone would be paid for a comparison with itself."""
    return not experiment.training.groupless or experiment.game.reward in ("src", "decoupled")


class Watch:
    """Cuts one set of tasks: cancels those that are not done when its deadline has passed and it has enough."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._tasks: list[asyncio.Task[Any]] = []
        self._cut: set[asyncio.Task[Any]] = set()
        self._arrived: set[asyncio.Task[Any] | None] = set()
        self._finished = 0
        self._timer: asyncio.TimerHandle | None = None
        self._late = False

    def add(self, task: asyncio.Task[Any]) -> None:
        self._tasks.append(task)
        task.add_done_callback(self._ended)

    def begin(self) -> None:
        """The set's first request is about to be made; later calls change nothing."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._deadline.seconds, self._expire)

    def arrived(self) -> None:
        """The running task has its completion, which would be lost if it were cut while it is being graded."""
        self._arrived.add(asyncio.current_task())

    def stop(self) -> None:
        """Nothing is cut any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._late = False

    def was_cut(self, task: asyncio.Task[Any]) -> bool:
        """Whether `task` ended because this cancelled it. (One that finished all the same is finished.)"""
        return task in self._cut and task.cancelled()

    def _expire(self) -> None:
        self._late = True
        self._cut_if_enough()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._finished += 1
            self._cut_if_enough()

    def _cut_if_enough(self) -> None:
        if self._late and self._finished >= self._deadline.least:
            self._late = False  # once: a second cancellation would interrupt the cleaning up after the first
            self._cut = {task for task in self._tasks if not task.done() and task not in self._arrived}
            for task in self._cut:
                task.cancel()
