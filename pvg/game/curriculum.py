"""`Curriculum`: which problems the prover is asked, by how often it has succeeded at them (`training.curriculum`).

    curriculum = curriculum_of(experiment)                 # None: problems come in the order of their shuffle
    chosen = curriculum.draw(ids, Role.SNEAKY, 16, generator)
    metrics = curriculum.observe(rollouts, aligned_N)      # after the batch: what came of it

A success is a role-aligned solution: a helpful one that is correct, a sneaky one that is well-formed and wrong
(`Outcomes.aligned_N`). So the rates are shares whatever the reward is, and each role has its own: a problem too easy to
be worth a helpful solution may be the hardest to be wrong about.

Everything that was sampled is learnt, what was not trained on too (training.dynamic_sampling): rates of what was kept
alone would all be near one half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pvg.game.seeds import draw_weighted
from pvg.records import Role, Rollout
from pvg.sections import Training
from pvg.training.curriculum import buckets_of, draw_from_buckets, known_rates, uncertainty_weights
from pvg.training.values import ValueTracker

if TYPE_CHECKING:
    from pvg.experiment import Experiment


def curriculum_of(experiment: Experiment) -> Curriculum | None:
    return None if experiment.training.curriculum == "none" else Curriculum(experiment.training)


class Curriculum:
    def __init__(self, settings: Training) -> None:
        self._settings = settings
        self._rates = ValueTracker(settings.curriculum_half_life)

    def draw(self, problems: Sequence[str], role: Role, count: int, generator: np.random.Generator) -> list[int]:
        """`count` positions in `problems` (ids) for `role`; none twice while there are others."""
        rates_P = self._of([(problem, role) for problem in problems])
        if self._settings.curriculum == "buckets":
            buckets_P = buckets_of(rates_P, self._settings.curriculum_edges)
            return draw_from_buckets(buckets_P, self._settings.curriculum_shares, count, generator)
        return draw_weighted(uncertainty_weights(rates_P), count, generator)

    def observe(self, rollouts: Sequence[Rollout], aligned_N: NDArray[np.bool_]) -> dict[str, float]:
        """Learn which of a batch's rollouts were role-aligned; what the curriculum knew of them before, as metrics."""
        keys = [(rollout.problem_id, rollout.role) for rollout in rollouts]
        versions_N = np.array([rollout.version for rollout in rollouts], dtype=np.int32)
        rates_N = known_rates(self._of(keys))
        unseen_N = np.array([not self._rates.has_seen(key) for key in keys])
        self._rates.observe(keys, aligned_N.astype(np.float64), versions_N)
        edges = self._settings.curriculum_edges
        return {
            "success_tracked": float(rates_N.mean()),
            "success_error": float(np.abs(rates_N - aligned_N).mean()),
            "success_unseen": float(unseen_N.mean()),
            "success_hard": float((rates_N < edges[0]).mean()),
            "success_easy": float((rates_N >= edges[-1]).mean()),
        }

    def _of(self, keys: Sequence[tuple[str, Role]]) -> NDArray[np.float64]:
        return np.array([self._rates.value(key) for key in keys], dtype=np.float64)

    # --- resuming ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """As JSON data, from which every bit comes back."""
        return self._rates.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._rates.load_state(state)
