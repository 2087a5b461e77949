"""Credit assignment: rewards to advantages, as pure functions of arrays without loops over groups.

Invariant: a group is the set of rows with one group id *and* one role. No group statistic mixes roles.

Formulas: the table of docs/learning.md (arXiv: GRPO 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, GSPO 2507.18071,
CISPO 2506.13585, RLOO 2402.14740, REINFORCE++ 2501.03262, SPO 2509.13232, SPIRAL's RAE 2506.24119). Standard deviations
are those of the population (divided by n). Losses without groups have baselines per problem and role (`ValueTracker`,
spo) or per role (`RoleBaseline`, rae)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pvg.errors import ConfigurationError, TrainingDivergedError
from pvg.records import Float32, Int32, Role

Float64 = NDArray[np.float64]
Key = tuple[str, Role]  # a problem's id and a role

RHO_LEAST, RHO_MOST = 0.875, 0.96  # remember the last 8 to 25 rollouts of a problem
PRIOR = 1.0 / (1.0 - RHO_LEAST)  # weight of the prior in rollouts: the shortest memory
LEVEL_DECAY = 0.95
HALF_LIFE = 100.0  # versions: within the steps of one round, the policy changes what it can solve


class ValueTracker:
    """v, the expected reward of each (problem, role). `half_life`: in versions of the policy.

    Source: Single-stream Policy Optimization (arXiv 2509.13232). For rewards in [0, 1] its tracker is a Beta whose
    counts decay. With n = alpha + beta this is

        v <- v + (R - v) / (rho n + 1),   n <- rho n + 1

    which is also a moving average for rewards of any sign. rho = 2^(-D / half_life), clamped. D is how far the policy
    has moved since the problem's last rollout: in pvg, the number of versions published since. A problem without
    rollouts in a role starts at the role's level, a moving average over batches, with the weight of `PRIOR` rollouts.
    """

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        self._half_life = half_life
        self._levels: dict[Role, float] = {}
        self._seen: dict[Role, dict[str, tuple[float, float, int]]] = {role: {} for role in Role}  # v, n, version

    def value(self, key: Key) -> float:
        """v of a problem in a role; NaN without any rollout of the role."""
        problem, role = key
        seen = self._seen[role].get(problem)
        return self._levels.get(role, math.nan) if seen is None else seen[0]

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


def means_of_others(rewards_N: Float64) -> Float64:
    """float64 [N]: the mean of all other rows. Exactly the row's own reward if all are equal or the row is alone, so
    that no rounding error becomes an advantage."""
    count = len(rewards_N)
    if count < 2 or rewards_N.min() == rewards_N.max():
        return rewards_N.copy()
    others_N: Float64 = (rewards_N.sum() - rewards_N) / (count - 1)
    return others_N


class RoleBaseline:
    """b, the average reward of each role, or in self-play of each seat.

    Source: role-conditioned advantage estimation (SPIRAL, arXiv 2506.24119): A = R - b_role, then
    b_role <- d b_role + (1 - d) R. Here R is the mean over the role's rows of a batch. An average that starts at 0
    stays too close to 0 for about 20 batches, so it is divided by its total weight, 1 - d^n after n batches. In a
    role's first batch, a row's baseline is the mean of the role's *other* rows; a single row has an advantage of 0."""

    def __init__(self) -> None:
        self._averages: dict[str, tuple[float, float]] = {}  # total, weight

    def value(self, role: str) -> float:
        """b of the role; NaN before its first batch."""
        total, weight = self._averages.get(role, (0.0, 0.0))
        return total / weight if weight > 0.0 else math.nan

    def observe(self, roles: Sequence[str], rewards_N: Float32 | Float64) -> Float64:
        """float64 [N]: the baseline of each row before these rewards (first batch: see the class); then learns each
        role's mean."""
        paid_N = np.asarray(rewards_N, dtype=np.float64)
        baselines_N = np.zeros(len(paid_N))
        for role in dict.fromkeys(roles):
            rows_N = np.array([of == role for of in roles], dtype=bool)
            known = role in self._averages
            baselines_N[rows_N] = self.value(role) if known else means_of_others(paid_N[rows_N])
            total, weight = self._averages.get(role, (0.0, 0.0))
            mean = float(paid_N[rows_N].mean())
            self._averages[role] = DECAY * total + (1.0 - DECAY) * mean, DECAY * weight + (1.0 - DECAY)
        return baselines_N

    def state(self) -> dict[str, Any]:
        """JSON data that restores the averages bit by bit."""
        return {str(role): list(average) for role, average in self._averages.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._averages = {role: (total, weight) for role, (total, weight) in state.items()}


EPSILON = 1e-6  # added to a standard deviation before dividing by it; value of the GRPO paper


@dataclass(frozen=True, slots=True)
class RewardGroups:
    """Rewards with their groups, the input of credit assignment: `group_N` in 0..G-1, `counts_G` rows per group. The
    rows of a group share a problem and a role."""

    rewards_N: Float64
    group_N: NDArray[np.int64]
    counts_G: NDArray[np.int64]

    def centred(self) -> Float64:
        """R - mean of the group [N]; exactly 0 in a group of equal rewards, even if its mean was rounded."""
        means_G = np.bincount(self.group_N, weights=self.rewards_N) / self.counts_G
        centred_N: Float64 = self.rewards_N - means_G[self.group_N]
        centred_N[~self.signal()] = 0.0
        return centred_N

    def deviations(self) -> Float64:
        """The population standard deviation of each row's group [N]."""
        variances_G = np.bincount(self.group_N, weights=self.centred() ** 2) / self.counts_G
        deviations_N: Float64 = np.sqrt(variances_G)[self.group_N]
        return deviations_N

    def signal(self) -> NDArray[np.bool_]:
        """Whether each row's group has more than one reward value [N]."""
        return self.signal_of_groups()[self.group_N]

    def signal_of_groups(self) -> NDArray[np.bool_]:
        """Whether each group has more than one reward value [G]."""
        low_G = np.full(len(self.counts_G), np.inf)
        high_G = np.full(len(self.counts_G), -np.inf)
        np.minimum.at(low_G, self.group_N, self.rewards_N)
        np.maximum.at(high_G, self.group_N, self.rewards_N)
        found_G: NDArray[np.bool_] = high_G > low_G
        return found_G


Credit = Callable[[RewardGroups], Float64]  # rewards in groups -> advantages float64 [N]


def advantages(
    loss: str,
    rewards_N: NDArray[Any],
    group_ids_N: NDArray[Any],
    role_ids_N: NDArray[Any],
    *,
    credit: Credit | None = None,
) -> Float32:
    """Advantages float32 [N] of policy loss `loss`. `credit`: the credit function of a user's loss.

    Raises TrainingDivergedError, naming the row, for a NaN or infinite reward. Raises ConfigurationError for an unknown
    loss, and for spo and rae, which need `tracked_advantages` and `baseline_advantages`.
    """
    if credit is None and loss not in CREDIT:
        raise ConfigurationError(f"There is no loss {loss!r}.", f"Known: {', '.join(CREDIT)}.")
    assign = CREDIT[loss] if credit is None else credit
    return assign(_grouped(rewards_N, group_ids_N, role_ids_N)).astype(np.float32)


def tracked_advantages(
    rewards_N: NDArray[Any], values_N: NDArray[Any], tokens_N: NDArray[Any], role_ids_N: NDArray[Any]
) -> Float32:
    """spo: R - v, whitened over the batch; float32 [N]. Each row counts by its completion tokens `tokens_N`, as it does
    in a mean over tokens. `values_N`: v before these rewards.

    Each role is centred on its own mean; the deviation is that of the whole batch, so the roles share only a scale.
    Raises TrainingDivergedError, naming the row, for a NaN or infinite reward.
    """
    one_group_N = np.zeros(len(role_ids_N), dtype=np.int64)
    _grouped(rewards_N, one_group_N, role_ids_N)  # raises for rewards that are not finite
    roles = _grouped(np.asarray(rewards_N, dtype=np.float64) - values_N, one_group_N, role_ids_N)
    weights_N = np.maximum(np.asarray(tokens_N, dtype=np.float64), 1.0)
    sums_G = np.bincount(roles.group_N, weights=weights_N * roles.rewards_N)
    means_G = sums_G / np.bincount(roles.group_N, weights=weights_N)
    centred_N = roles.rewards_N - means_G[roles.group_N]
    centred_N[~roles.signal()] = 0.0
    if not centred_N.size:
        return centred_N.astype(np.float32)
    deviation = np.sqrt(np.average(centred_N**2, weights=weights_N))
    whitened_N: Float32 = (centred_N / (deviation + EPSILON)).astype(np.float32)
    return whitened_N


def baseline_advantages(rewards_N: NDArray[Any], baselines_N: NDArray[Any], role_ids_N: NDArray[Any]) -> Float32:
    """rae: R - b in the unit of the reward; float32 [N]. `baselines_N`: b before these rewards.

    Raises TrainingDivergedError, naming the row, for a NaN or infinite reward.
    """
    found = _grouped(rewards_N, np.zeros(len(role_ids_N), dtype=np.int64), role_ids_N)
    advantages_N: Float32 = (found.rewards_N - baselines_N).astype(np.float32)
    return advantages_N


def zero_signal_groups(rewards_N: NDArray[Any], group_ids_N: NDArray[Any], role_ids_N: NDArray[Any]) -> float:
    """The share of groups with equal rewards, which have no gradient; 0 without groups."""
    signal_G = _grouped(rewards_N, group_ids_N, role_ids_N).signal_of_groups()
    return float(1.0 - signal_G.mean()) if signal_G.size else 0.0


def normalised(groups: RewardGroups) -> Float64:
    """(R - mean) / (std + 1e-6)."""
    normalised_N: Float64 = groups.centred() / (groups.deviations() + EPSILON)
    return normalised_N


def leave_one_out(groups: RewardGroups) -> Float64:
    """R - mean of the others = (R - mean) n / (n - 1); 0 in a group of one."""
    counts_N = groups.counts_G[groups.group_N]
    left_out_N: Float64 = groups.centred() * counts_N / np.maximum(counts_N - 1, 1)
    return left_out_N


def whitened(groups: RewardGroups) -> Float64:
    """R - mean of the group, divided by the standard deviation of this difference over the whole batch (+ 1e-6).

    Its mean over the batch and over each role is 0 already. Both roles share the scale, but no baseline.
    """
    centred_N = groups.centred()
    if not centred_N.size:
        return centred_N
    whitened_N: Float64 = centred_N / (np.sqrt(np.mean(centred_N**2)) + EPSILON)
    return whitened_N


CREDIT: dict[str, Credit] = {
    "grpo": normalised,
    "dr_grpo": RewardGroups.centred,
    "dapo": normalised,
    "gspo": normalised,
    "cispo": normalised,
    "rloo": leave_one_out,
    "reinforce_pp": whitened,
}


def _grouped(rewards_N: NDArray[Any], group_ids_N: NDArray[Any], role_ids_N: NDArray[Any]) -> RewardGroups:
    rewards_N = np.asarray(rewards_N, dtype=np.float64)
    if not rewards_N.shape == np.shape(group_ids_N) == np.shape(role_ids_N) or rewards_N.ndim != 1:
        raise ValueError(
            f"rewards {rewards_N.shape}, groups {np.shape(group_ids_N)} and roles {np.shape(role_ids_N)} must be [N]"
        )
    broken = np.flatnonzero(~np.isfinite(rewards_N))
    if broken.size:
        row = int(broken[0])
        raise TrainingDivergedError(
            f"The reward of row {row} (group {group_ids_N[row]}, role {role_ids_N[row]}) is {rewards_N[row]}; "
            f"{broken.size} of {len(rewards_N)} rewards are not finite.",
            "Check the verifier's scores of these rollouts; the last commit is intact.",
        )
    roles, role_N = np.unique(role_ids_N, return_inverse=True)
    keys_N = np.asarray(group_ids_N, dtype=np.int64) * len(roles) + role_N
    _, group_N, counts_G = np.unique(keys_N, return_inverse=True, return_counts=True)
    return RewardGroups(rewards_N, group_N, counts_G)
