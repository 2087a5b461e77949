"""`RoleBaseline`: what a role is paid on average, where there is neither a group nor a problem's history to tell (rae).

    baseline = RoleBaseline()
    baselines_N = baseline.observe(roles, rewards_N)            # b of before these rewards; then they are learnt
    advantages_N = credit.baseline_advantages(rewards_N, baselines_N)

Source: role-conditioned advantage estimation (SPIRAL, arXiv 2506.24119): A = R - b_role, b_role <- d b_role + (1 - d) R
with d = 0.95, read before it is updated. There R is one game's; here it is the mean over the role's rows of a batch, so
that no row's advantage depends on the order of the rows, and d = 0.95 remembers some 20 batches.

The start. An average that begins at 0 is too near to 0 for its first 20 batches, and with rewards of one sign every
advantage would have that sign. So

- the average is divided by the weight of what is in it, 1 - d^n after n batches (Adam's correction, arXiv 1412.6980):
  after one batch it is that batch's mean, not a twentieth of it;
- in the first batch of a role, before which nothing is known, the baseline of a row is the mean of the *other* rows of
  its role (RLOO's, arXiv 2402.14740). It does not depend on the row's own reward, so it adds no bias. A row that is
  alone has an advantage of 0.

Invariant: the roles share nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pvg.records import Float32, Role

Float64 = NDArray[np.float64]

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
