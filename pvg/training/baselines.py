"""`ValueTracker`: what each problem is expected to pay in each role, where there is no group to tell (spo), and how
often it is solved (pvg.game.curriculum).

    tracker = ValueTracker(half_life=100.0)
    values_N = tracker.observe(keys, rewards_N, versions_N)     # v before these rewards; then they are learnt

Source: Single-stream Policy Optimization (arXiv 2509.13232). For rewards in [0, 1] its tracker is a Beta whose counts
fade: alpha <- rho alpha + R, beta <- rho beta + 1 - R, v = alpha / (alpha + beta). With n = alpha + beta that is

    v <- v + (R - v) / (rho n + 1),   n <- rho n + 1

and in this form it is also the moving average for rewards of any sign. rho = 2^(-D / half_life), clamped: D is how far
the policy has moved since it was last seen on the problem. The paper measures it as a KL divergence, which would take
another forward pass; here it is the number of versions published since.

A problem that was never seen in a role starts from the role's level, a moving average over batches that is read before
it is updated, with the weight of `PRIOR` rollouts. Invariant: the roles share nothing.
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
PRIOR = 1.0 / (1.0 - RHO_LEAST)  # rollouts: what is remembered at least
LEVEL_DECAY = 0.95


class ValueTracker:
    """v of each (problem, role). `half_life` counts versions of the policy."""

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._levels: dict[Role, float] = {}
        self._seen: dict[Role, dict[str, tuple[float, float, int]]] = {role: {} for role in Role}  # v, n, version

    def value(self, key: Key) -> float:
        """v of a problem in a role, NaN while nothing is known of the role."""
        problem, role = key
        seen = self._seen[role].get(problem)
        return self._levels.get(role, math.nan) if seen is None else seen[0]

    def has_seen(self, key: Key) -> bool:
        """Whether the problem was ever observed in the role."""
        problem, role = key
        return problem in self._seen[role]

    def observe(self, keys: Sequence[Key], rewards_N: Float32 | Float64, versions_N: Int32) -> Float64:
        """float64 [N]: v of each row before any of these rewards; then learn them, in the order of the rows.

        The first batch of a role has its own mean for a level: no baseline for its rows (`tracked_advantages` removes
        the role's mean anyway), but a start for their next visit.
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
        """As JSON data, from which every bit comes back."""
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
    """The mean reward of each role that is there."""
    found: dict[Role, float] = {}
    for role in Role:
        rows_N = np.array([key[1] is role for key in keys], dtype=bool)
        if rows_N.any():
            found[role] = float(np.asarray(rewards_N, dtype=np.float64)[rows_N].mean())
    return found


# `RoleBaseline`: what a role is paid on average, where there is neither a group nor a problem's history to tell
# (rae).
#
#     baseline = RoleBaseline()
#     baselines_N = baseline.observe(roles, rewards_N)            # b of before these rewards; then they are learnt
#     advantages_N = credit.baseline_advantages(rewards_N, baselines_N)
#
# Source: role-conditioned advantage estimation (SPIRAL, arXiv 2506.24119): A = R - b_role, b_role <- d b_role + (1 -
# d) R with d = 0.95, read before it is updated. There R is one game's; here it is the mean over the role's rows of a
# batch, so that no row's advantage depends on the order of the rows, and d = 0.95 remembers some 20 batches.
#
# The start. An average that begins at 0 is too near to 0 for its first 20 batches, and with rewards of one sign every
# advantage would have that sign. So
#
# - the average is divided by the weight of what is in it, 1 - d^n after n batches (Adam's correction, arXiv 1412.6980):
#   after one batch it is that batch's mean, not a twentieth of it;
# - in the first batch of a role, before which nothing is known, the baseline of a row is the mean of the *other* rows o
#   its role (RLOO's, arXiv 2402.14740). It does not depend on the row's own reward, so it adds no bias. A row that is
#   alone has an advantage of 0.
#
# Invariant: the roles share nothing.


DECAY = 0.95  # SPIRAL's


def corrected_mean(total: float, weight: float) -> float:
    """The moving average total / weight; `total` and `weight` are those of `updated`. NaN before the first value."""
    return total / weight if weight > 0.0 else float("nan")


def updated(total: float, weight: float, value: float, decay: float = DECAY) -> tuple[float, float]:
    """total <- d total + (1 - d) value, weight <- d weight + (1 - d), which is 1 - d^n after n values from (0, 0)."""
    return decay * total + (1.0 - decay) * value, decay * weight + (1.0 - decay)


def means_of_others(rewards_N: Float64) -> Float64:
    """float64 [N]: the mean of all rows but one's own. Where all are equal, and for a single row, it is exactly its
    own reward: what is left of it is nothing to learn from, not a rounding error."""
    count = len(rewards_N)
    if count < 2 or rewards_N.min() == rewards_N.max():
        return rewards_N.copy()
    others_N: Float64 = (rewards_N.sum() - rewards_N) / (count - 1)
    return others_N


class RoleBaseline:
    """b of each role."""

    def __init__(self, decay: float = DECAY) -> None:
        self._decay = decay
        self._averages: dict[Role, tuple[float, float]] = {}  # total, weight

    def value(self, role: Role) -> float:
        """b, NaN while nothing is known of the role."""
        return corrected_mean(*self._averages.get(role, (0.0, 0.0)))

    def observe(self, roles: Sequence[Role], rewards_N: Float32 | Float64) -> Float64:
        """float64 [N]: the baseline of each row before any of these rewards (see the module for a role's first batch);
        then learn their mean, role by role."""
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
        """As JSON data, from which every bit comes back."""
        return {role.value: list(average) for role, average in self._averages.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._averages = {Role(role): (total, weight) for role, (total, weight) in state.items()}
