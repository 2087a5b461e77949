"""Closed-form bounds of a batch's time, beside the discrete-event model.

With R rollouts of mean length L, n rows at once, and d(r) the seconds of a decoding step of a worker with r rows:

    trainer   = L R train_token_s + other_s + update_s
    work      = R (L + request steps) / n     decoding steps, if all rows are busy all the time
    sampling  = work d(mean rows of a busy worker), in a pipeline + pause_s
    longest   = the longest rollout, alone in its worker

A pipeline's batch takes at least max(trainer, sampling). It takes longer if lengths vary, or if few batches are ahead.
A batch in turns takes at least trainer + max(sampling, longest) + score_s. The lower bounds do not hold if long
rollouts are dropped or cut: the batch then trains on shorter ones.

The upper bound of a batch in turns is that of a greedy order of independent work (Graham 1969): all rows are busy until
the last rollout begins, and this one takes at most the longest rollout's time in a full worker. If more requests are in
flight than the workers have rows, a request may wait in its worker while another worker has a free row. Then it waits
at most for the requests that its worker had before it. The bound takes the longest rollout for each of them, so it is
loose in this case. It holds without failures.

All bounds are about means: one batch may be outside.
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
    work = steps / rows
    sampling_s = work * world.decoding_s(max(1.0, rows / world.workers))
    longest_s = world.longest * world.decoding_s(1) + world.request_s
    if world.ahead is not None:
        sampling_s += world.pause_s
        least_s, most_s = max(trainer_s, sampling_s), None
    else:
        sampled_s = sampling_s if world.cut else max(sampling_s, _longest_of_batch(world))
        least_s = trainer_s + sampled_s + world.score_s
        # A deadline only shortens the longest rollouts, so it keeps the upper bound.
        last = (1 + _waits(world)) * (world.longest + request_steps)
        full = min(world.slots, math.ceil(rows / world.workers))
        most_s = trainer_s + (work + last) * world.decoding_s(full) + world.score_s
    available_s = trainer_s - (world.pause_s if world.ahead else 0.0)
    per_worker = steps * world.decoding_s(world.slots) / world.slots
    balance = per_worker / available_s if available_s > 0 else math.inf
    return StepBounds(trainer_s, sampling_s, longest_s, least_s, most_s, balance)


def _waits(world: World) -> float:
    """How many times the longest rollout's time a request may wait in its worker while another worker has a free row.
    Workers share requests evenly when these are sent, so a request finds at most `before` others in its worker."""
    before = (min(world.concurrency, world.rollouts) - 1) // world.workers
    return before / world.slots if world.workers > 1 and before >= world.slots else 0.0


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
