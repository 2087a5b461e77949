"""Bounds of a batch's time in closed form.

With R rollouts of mean length L, n rows at once, and d(r) the seconds of a decoding step of a worker with r rows:

    trainer   = L R train_token_s + other_s + update_s
    sampling  = R (L + request steps) / n decoding steps of d(mean rows of a busy worker): all rows are always busy
    longest   = the batch's longest rollout, alone in its worker
    overlap   = max(trainer, sampling)                  the best case if sampling runs ahead of training
    in turns  = trainer + max(sampling, longest)        the best case if they take turns

A real batch takes longer: rows wait for the longest rollouts, and rollouts that became stale are sampled again. All
bounds are about means. They do not hold if a deadline cuts long rollouts, because a batch then trains on shorter ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from pvg.errors import ConfigurationError

QUANTILES = 2048  # lengths in the pool of a log-normal distribution


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What one batch asks for. Times in seconds, lengths in tokens.

    `longest`: the expected length of the longest of the `rollouts`. `workers` processes or servers decode at most
    `slots` rollouts each, and `concurrency` requests are in flight at most. A decoding step takes `token_s` + `row_s` x
    rows. `request_s`: of a request besides its tokens. `ahead`: batches that sampling may be ahead; 0: in turns.
    """

    rollouts: int
    mean_length: float
    longest: float
    workers: int
    slots: int
    concurrency: int
    token_s: float
    row_s: float
    request_s: float
    train_token_s: float
    other_s: float
    update_s: float
    ahead: int = 0

    @property
    def rows(self) -> int:
        """The most rollouts that are decoded at once."""
        return min(self.workers * self.slots, self.concurrency, self.rollouts * (1 + self.ahead))

    def decoding_s(self, rows: float) -> float:
        """Seconds of a decoding step of a worker with `rows` rows."""
        return self.token_s + self.row_s * rows


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Seconds of a batch; the module says what each is. `balance`: workers, each with all its rows busy, at which
    sampling takes as long as training; infinite if the trainer takes no time."""

    trainer_s: float
    sampling_s: float
    longest_s: float
    overlap_s: float
    turns_s: float
    balance: float

    @property
    def limit(self) -> str:
        """Which of the two takes longer."""
        return "sampling" if self.sampling_s > self.trainer_s else "training"


def bounds_of(work: BatchWork) -> StepBounds:
    trainer_s = work.train_token_s * work.mean_length * work.rollouts + work.other_s + work.update_s
    steps = work.rollouts * (work.mean_length + work.request_s / work.decoding_s(1))
    sampling_s = steps / work.rows * work.decoding_s(max(1.0, work.rows / work.workers))
    longest_s = work.longest * work.decoding_s(1) + work.request_s
    of_one_worker_s = steps * work.decoding_s(work.slots) / work.slots
    return StepBounds(
        trainer_s,
        sampling_s,
        longest_s,
        max(trainer_s, sampling_s),
        trainer_s + max(sampling_s, longest_s),
        of_one_worker_s / trainer_s if trainer_s else math.inf,
    )


def expected_longest(lengths: NDArray[np.int64], count: int) -> float:
    """The expected longest of `count` draws from the pool `lengths`."""
    values = np.sort(lengths)
    chances = (np.arange(1, len(values) + 1) / len(values)) ** count
    return float(values @ np.diff(chances, prepend=0.0))


def lognormal_lengths(mean: float, sigma: float, longest: int) -> NDArray[np.int64]:
    """A pool of lengths whose distribution is log-normal, cut off at `longest`. `sigma`: the standard deviation of the
    logarithm. `mean`: the mean after the cut.

    The pool has the quantiles (i + 1/2) / n of the distribution, so it has no sampling noise. Raises ConfigurationError
    for a mean that these lengths cannot have.
    """
    if not 1 <= mean <= longest:
        raise ConfigurationError(
            f"The mean length is {mean:g}, but must be between 1 and the longest, {longest}.",
            "Change mean_tokens, or rollout.max_tokens.",
        )
    if not 0 <= sigma <= 4:
        raise ConfigurationError(f"sigma is {sigma:g}, but must be between 0 and 4.")
    normal = NormalDist()
    scores = np.array([normal.inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES)])
    low, high = 0.0, math.log(longest) + 4 * sigma + 1  # of the median's logarithm
    for _ in range(60):
        middle = (low + high) / 2
        if np.clip(np.exp(middle + sigma * scores), 1, longest).mean() < mean:
            low = middle
        else:
            high = middle
    return np.clip(np.rint(np.exp(low + sigma * scores)), 1, longest).astype(np.int64)
