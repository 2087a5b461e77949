"""`World`: everything that the planner's prediction of a step depends on. Times are in seconds, lengths in tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pvg.errors import ConfigurationError
from pvg.records import Role

Lengths = NDArray[np.int64]

QUANTILES = 2048  # lengths in the pool of a log-normal distribution


@dataclass(frozen=True, slots=True)
class AheadLimits:
    """Sampling ahead of the trainer, as in pvg.config.rollout.SamplingAhead: `batches` ahead of the next one, at most
    `budget` versions behind. `prefer`: which waiting groups a batch takes first."""

    batches: int = 1
    budget: int = 2
    prefer: Literal["fresh", "old"] = "fresh"


@dataclass(frozen=True, slots=True)
class Cut:
    """A deadline (pvg.rollout.gathering.Deadline): after `seconds`, a group, or with `whole_batch` a batch, goes on
    with the rollouts that it has, but with at least `least`."""

    seconds: float
    least: int
    whole_batch: bool = False


@dataclass(frozen=True, slots=True)
class World:
    """A batch is `groups` groups of `group_size` rollouts, of which the share `sneaky_share` of groups is sneaky. After
    a batch the trainer publishes new weights.

    - `lengths`: for each role, lengths of completions, from which the model draws with equal probability.
    - `workers`: processes or servers that sample. Each decodes at most `slots` rollouts at once.
    - `concurrency`: the most requests in flight.
    - A decoding step takes `token_s` + `row_s` x rows, and gives each row one token. A request first takes `request_s`
      as long as it would be alone in its worker (the prompt, and the time on the way).
    - Training takes `train_token_s` per completion token. `other_s` of a batch is other work of the trainer.
    - `update_s`: the trainer waits so long for a weight update. In the last `pause_s` of it no worker decodes.
    - `score_s`: between a group's last rollout and its arrival in the buffer.
    - `mtbf_s`: mean time between failures of one worker; infinite: none fails. A worker is away for `restart_s` and
      then gets the weights in `update_s`. Its requests start again on other workers.
    - `ahead`: None if sampling and training take turns.
    """

    groups: int
    group_size: int
    lengths: Mapping[Role, Lengths]
    workers: int
    slots: int
    concurrency: int
    token_s: float
    train_token_s: float
    sneaky_share: float = 0.5
    row_s: float = 0.0
    request_s: float = 0.0
    other_s: float = 0.0
    update_s: float = 0.0
    pause_s: float = 0.0
    score_s: float = 0.0
    mtbf_s: float = math.inf
    restart_s: float = 0.0
    ahead: AheadLimits | None = None
    cut: Cut | None = None

    def __post_init__(self) -> None:
        """Raises ConfigurationError for a value that no world has."""
        for name in ("groups", "group_size", "workers", "slots", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        for name in ("token_s", "mtbf_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name):g}, but must be above 0.")
        for name in ("train_token_s", "row_s", "request_s", "other_s", "update_s", "pause_s", "score_s", "restart_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} is {getattr(self, name):g}, but must be finite and not below 0.")
        if self.pause_s > self.update_s:
            raise ConfigurationError(
                f"pause_s is {self.pause_s:g}, longer than the update of {self.update_s:g} s (update_s).",
                "Workers pause within the update: lower pause_s, or raise update_s.",
            )
        if not 0 <= self.sneaky_share <= 1:
            raise ConfigurationError(f"sneaky_share is {self.sneaky_share:g}, but must be between 0 and 1.")
        for role in self.roles:
            pool = self.lengths.get(role)
            if pool is None or not len(pool) or pool.min() < 1:
                raise ConfigurationError(f"There are no lengths of {role.value} completions of at least 1 token.")

    @property
    def roles(self) -> list[Role]:
        """The roles that occur."""
        share = {Role.HELPFUL: 1 - self.sneaky_share, Role.SNEAKY: self.sneaky_share}
        return [role for role in Role if share[role] > 0]

    @property
    def rollouts(self) -> int:
        """Rollouts of a batch."""
        return self.groups * self.group_size

    @property
    def mean_length(self) -> float:
        """Mean completion of a batch, in tokens."""
        means = {role: float(self.lengths[role].mean()) for role in self.roles}
        share = {Role.HELPFUL: 1 - self.sneaky_share, Role.SNEAKY: self.sneaky_share}
        return sum(share[role] * mean for role, mean in means.items())

    @property
    def longest(self) -> int:
        return max(int(self.lengths[role].max()) for role in self.roles)

    @property
    def room(self) -> int:
        """The most rollouts in flight or waiting."""
        return self.rollouts * (1 + (self.ahead.batches if self.ahead else 0))

    @property
    def rows(self) -> int:
        """The most rollouts that are decoded at once."""
        return min(self.workers * self.slots, self.concurrency, self.room)

    def decoding_s(self, rows: float) -> float:
        """Seconds of a decoding step of a worker with `rows` rows."""
        return self.token_s + self.row_s * rows

    def training_s(self, tokens: float) -> float:
        """Seconds of training on `tokens` completion tokens."""
        return self.train_token_s * tokens


def lognormal_lengths(mean: float, sigma: float, longest: int) -> Lengths:
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
    from statistics import NormalDist

    normal = NormalDist()
    scores = np.array([normal.inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES)])
    low, high = 0.0, math.log(longest) + 4 * sigma + 1  # of the median's logarithm
    for _ in range(60):
        middle = (low + high) / 2
        if np.clip(np.exp(middle + sigma * scores), 1, longest).mean() < mean:
            low = middle
        else:
            high = middle
    pool: Lengths = np.clip(np.rint(np.exp(low + sigma * scores)), 1, longest).astype(np.int64)
    return pool
