"""Closed-form bounds of a batch's time, beside the discrete-event model.

With R rollouts of mean length L, n rows at once, and d(r) the seconds of a decoding step of a worker with r rows:

    trainer   = L R train_token_s + other_s + update_s
    sampling  = R (L + request steps) d(full) / n + pause_s      (all rows busy all the time)
    longest   = the longest rollout, alone in its worker

A pipeline's batch takes at least max(trainer, sampling), unless it drops long rollouts and so trains on shorter ones.
It takes longer if lengths vary, or if few batches are ahead. A batch in turns takes at least trainer + max(sampling,
longest), and for a greedy order of independent work at most trainer + sampling + longest (Graham 1969). The bounds use
means: one batch may be below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pvg.planning.world import World
from pvg.records import Role


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Seconds of a batch. `least_s`: a lower bound of its mean time. `most_s`: an upper bound without failures; None
    for a pipeline, where drops have no closed form. `balance`: workers at which sampling takes as long as training."""

    trainer_s: float
    sampling_s: float
    longest_s: float
    least_s: float
    most_s: float | None
    balance: float

    @property
    def limit(self) -> str:
        """Which of the two takes longer."""
        return "sampling" if self.sampling_s > self.trainer_s else "training"


def bounds_of(world: World) -> StepBounds:
    training_s = world.training_s(world.mean_length * world.rollouts)
    trainer_s = training_s + world.other_s + world.update_s
    request_steps = world.request_s / world.decoding_s(1)
    steps = world.rollouts * (world.mean_length + request_steps)
    rows = world.rows
    full = min(world.slots, math.ceil(rows / world.workers))
    work_s = steps * world.decoding_s(full)
    sampling_s = work_s / rows
    longest_s = world.longest * world.decoding_s(1) + world.request_s
    if world.ahead is not None:
        sampling_s += world.pause_s
        least_s, most_s = max(trainer_s, sampling_s), None
    else:
        # A deadline only shortens the longest rollouts, so it keeps the upper bound.
        least_s = trainer_s + (sampling_s if world.cut else max(sampling_s, _longest_of_batch(world)))
        most_s = trainer_s + sampling_s + world.longest * world.decoding_s(full) + world.request_s
    available_s = trainer_s - (world.pause_s if world.ahead else 0.0)
    per_worker = steps * world.decoding_s(world.slots) / world.slots
    balance = per_worker / available_s if available_s > 0 else math.inf
    return StepBounds(trainer_s, sampling_s, longest_s, least_s, most_s, balance)


def _longest_of_batch(world: World) -> float:
    """The expected seconds of a batch's longest rollout, alone in its worker. With F_r the distribution of a role's
    lengths, the longest of k_r rollouts of each role has the distribution prod_r F_r^k_r. A batch has one of two
    numbers of sneaky groups, because a share is rounded at random to whole groups."""
    exact = world.groups * world.sneaky_share
    up = exact - math.floor(exact)
    values = np.unique(np.concatenate([world.lengths[role] for role in world.roles]))
    below = {role: np.searchsorted(np.sort(pool), values, "right") / len(pool) for role, pool in world.lengths.items()}
    chances = np.zeros(len(values))
    for sneaky, share in ((math.floor(exact), 1 - up), (math.ceil(exact), up)):
        counts = {Role.SNEAKY: sneaky, Role.HELPFUL: world.groups - sneaky}
        product = np.ones(len(values))
        for role in world.roles:
            product *= below[role] ** (counts[role] * world.group_size)
        chances += share * product
    expected = float(values @ np.diff(chances, prepend=0.0))
    return expected * world.decoding_s(1) + world.request_s
