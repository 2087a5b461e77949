"""Baselines for losses without groups: per problem and role (`ValueTracker`, spo) and per role (`RoleBaseline`, rae).

Invariant: the roles share nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pvg.records import Float32, Int32, Role

Float64 = NDArray[np.float64]
Key = tuple[str, Role]  # a problem's id and a role

RHO_LEAST, RHO_MOST = 0.875, 0.96  # remember the last 8 to 25 rollouts of a problem
PRIOR = 1.0 / (1.0 - RHO_LEAST)  # weight of the prior in rollouts: the shortest memory
LEVEL_DECAY = 0.95


class ValueTracker:
    """v, the expected reward of each (problem, role). `half_life`: in versions of the policy.

        tracker = ValueTracker(half_life=100.0)
        values_N = tracker.observe(keys, rewards_N, versions_N)     # v before these rewards; then it learns them

    Source: Single-stream Policy Optimization (arXiv 2509.13232). For rewards in [0, 1] its tracker is a Beta whose
    counts decay: alpha <- rho alpha + R, beta <- rho beta + 1 - R, v = alpha / (alpha + beta). With n = alpha + beta
    this is

        v <- v + (R - v) / (rho n + 1),   n <- rho n + 1

    which is also a moving average for rewards of any sign. rho = 2^(-D / half_life), clamped. D is how far the policy
    has moved since the problem's last rollout: the paper uses a KL divergence, which costs another forward pass; pvg
    uses the number of versions published since.

    A problem without rollouts in a role starts at the role's level with the weight of `PRIOR` rollouts. The level is a
    moving average over batches, read before its update. The curriculum (pvg.game.curriculum) tracks success rates with
    this class.
    """

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._levels: dict[Role, float] = {}
        self._seen: dict[Role, dict[str, tuple[float, float, int]]] = {role: {} for role in Role}  # v, n, version

    def value(self, key: Key) -> float:
        """v of a problem in a role; NaN without any rollout of the role."""
        problem, role = key
        seen = self._seen[role].get(problem)
        return self._levels.get(role, math.nan) if seen is None else seen[0]

    def has_seen(self, key: Key) -> bool:
        """Whether the problem has a rollout in the role."""
        problem, role = key
        return problem in self._seen[role]

    def observe(self, keys: Sequence[Key], rewards_N: Float32 | Float64, versions_N: Int32) -> Float64:
        """float64 [N]: v of each row before these rewards; then learns the rewards in row order.

        In a role's first batch, v is the batch mean. This is no baseline for these rows (`tracked_advantages` subtracts
        the role's mean anyway), but a start value for later ones.
        """
        means = _means(keys, rewards_N)
        for role, mean in means.items():
            self._levels.setdefault(role, mean)
        values_N = np.array([self.value(key) for key in keys], dtype=np.float64)
        for key, reward, version in zip(keys, rewards_N.tolist(), versions_N.tolist(), strict=True):
            self._learn(key, reward, version)
        for role, mean in means.items():
            self._levels[role] += (1.0 - LEVEL_DECAY) * (mean - self._levels[role])
        return values_N

    def _learn(self, key: Key, reward: float, version: int) -> None:
        problem, role = key
        value, count, last = self._seen[role].get(problem, (self._levels[role], PRIOR, version))
        moved = max(0, version - last)
        rho = min(max(2.0 ** (-moved / self._half_life), RHO_LEAST), RHO_MOST)
        count = rho * count + 1.0
        self._seen[role][problem] = (value + (reward - value) / count, count, max(version, last))

    # --- resuming ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON data that restores the values bit by bit."""
        return {
            "levels": {role.value: level for role, level in self._levels.items()},
            "seen": {role.value: {p: list(entry) for p, entry in of.items()} for role, of in self._seen.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._levels = {Role(role): level for role, level in state["levels"].items()}
        self._seen = {
            role: {p: (value, count, version) for p, (value, count, version) in state["seen"][role.value].items()}
            for role in Role
        }


def _means(keys: Sequence[Key], rewards_N: Float32 | Float64) -> dict[Role, float]:
    found: dict[Role, float] = {}
    for role in Role:
        rows_N = np.array([key[1] is role for key in keys], dtype=bool)
        if rows_N.any():
            found[role] = float(np.asarray(rewards_N, dtype=np.float64)[rows_N].mean())
    return found


DECAY = 0.95  # SPIRAL's value; remembers about 20 batches


def corrected_mean(total: float, weight: float) -> float:
    """The moving average total / weight, both from `updated`; NaN before the first value."""
    return total / weight if weight > 0.0 else float("nan")


def updated(total: float, weight: float, value: float, decay: float = DECAY) -> tuple[float, float]:
    """total <- d total + (1 - d) value, weight <- d weight + (1 - d), which is 1 - d^n after n values from (0, 0)."""
    return decay * total + (1.0 - decay) * value, decay * weight + (1.0 - decay)


def means_of_others(rewards_N: Float64) -> Float64:
    """float64 [N]: the mean of all other rows. Exactly the row's own reward if all are equal or the row is alone, so
    that no rounding error becomes an advantage."""
    count = len(rewards_N)
    if count < 2 or rewards_N.min() == rewards_N.max():
        return rewards_N.copy()
    others_N: Float64 = (rewards_N.sum() - rewards_N) / (count - 1)
    return others_N


class RoleBaseline:
    """b, the average reward of each role.

        baseline = RoleBaseline()
        baselines_N = baseline.observe(roles, rewards_N)            # b before these rewards; then it learns them
        advantages_N = credit.baseline_advantages(rewards_N, baselines_N, role_ids_N)

    Source: role-conditioned advantage estimation (SPIRAL, arXiv 2506.24119): A = R - b_role, then
    b_role <- d b_role + (1 - d) R. SPIRAL's R is the reward of one game. Here it is the mean over the role's rows of a
    batch, so that advantages do not depend on the order of rows.

    An average that starts at 0 stays too close to 0 for about 20 batches. With rewards of one sign, all advantages
    would then have that sign. So

    - the average is divided by its total weight, 1 - d^n after n batches (Adam's correction, arXiv 1412.6980);
    - in a role's first batch, a row's baseline is the mean of the role's *other* rows (RLOO, arXiv 2402.14740). It does
      not depend on the row's own reward, so it adds no bias. A single row has an advantage of 0.
    """

    def __init__(self, decay: float = DECAY) -> None:
        self._decay = decay
        self._averages: dict[Role, tuple[float, float]] = {}  # total, weight

    def value(self, role: Role) -> float:
        """b of the role; NaN before its first batch."""
        return corrected_mean(*self._averages.get(role, (0.0, 0.0)))

    def observe(self, roles: Sequence[Role], rewards_N: Float32 | Float64) -> Float64:
        """float64 [N]: the baseline of each row before these rewards (first batch: see the class); then learns each
        role's mean."""
        paid_N = np.asarray(rewards_N, dtype=np.float64)
        baselines_N = np.zeros(len(paid_N))
        for role in Role:
            rows_N = np.array([of is role for of in roles], dtype=bool)
            if not rows_N.any():
                continue
            known = role in self._averages
            baselines_N[rows_N] = self.value(role) if known else means_of_others(paid_N[rows_N])
            before = self._averages.get(role, (0.0, 0.0))
            self._averages[role] = updated(*before, float(paid_N[rows_N].mean()), self._decay)
        return baselines_N

    # --- resuming ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON data that restores the averages bit by bit."""
        return {role.value: list(average) for role, average in self._averages.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._averages = {Role(role): (total, weight) for role, (total, weight) in state.items()}
