"""The curriculum: it chooses problems by how often the prover has succeeded at them (`training.curriculum`).

    curriculum = curriculum_of(experiment)                 # None: problems come in shuffled order
    chosen = curriculum.draw(ids, Role.SNEAKY, 16, generator)
    metrics = curriculum.observe(rollouts, aligned_N)      # after the batch

A success is a role-aligned solution (`BatchOutcomes.aligned_N`): a correct helpful one, or a well-formed and
wrong sneaky one. So rates do not depend on the reward. Each role has its own rates, because a problem that is easy
for the helpful role may be hard for the sneaky role. Rates also count rollouts that dynamic sampling did not train
on; otherwise all rates would be near 1/2.

With `v` the tracked success rate of a problem in a role (pvg.training.credit), there are two kinds:

- *prioritised*: draws problems with probability proportional to sqrt(v (1 - v)) + 0.05. The first term is the standard
  deviation of one outcome, which measures how much a group can teach (Single-stream Policy Optimization, arXiv
  2509.13232).
- *buckets*: `edges` cut the success rates into buckets, and each batch takes fixed shares of the buckets. Within a
  bucket all problems have the same probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pvg.config.training import BucketCurriculum, PrioritisedCurriculum
from pvg.records import Role, Rollout
from pvg.seeds import draw_weighted
from pvg.training.credit import ValueTracker

if TYPE_CHECKING:
    from pvg.config.experiment import Experiment

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

LEAST_WEIGHT = 0.05  # keeps the probability of every problem above 0
ROUNDING = 1e-6  # well above the rounding errors of a short sum, well below any meaningful share
UNKNOWN = 0.5  # the rate of a problem that a role has not tried yet


def known_rates(rates_P: Float64) -> Float64:
    """float64 [P] in [0, 1]; NaN (unknown) becomes 1/2."""
    known_P: Float64 = np.clip(np.nan_to_num(rates_P, nan=UNKNOWN), 0.0, 1.0)
    return known_P


def uncertainty_weights(rates_P: Float64) -> Float64:
    """float64 [P]: sqrt(v (1 - v)) + 0.05, largest where the outcome is least certain."""
    known_P = known_rates(rates_P)
    weights_P: Float64 = np.sqrt(known_P * (1.0 - known_P)) + LEAST_WEIGHT
    return weights_P


def buckets_of(rates_P: Float64, edges: Sequence[float]) -> Int64:
    """int64 [P]: the bucket of each problem. Bucket b holds edges[b - 1] <= v < edges[b]; the first starts at 0, the
    last ends at 1."""
    return np.searchsorted(np.asarray(edges, dtype=np.float64), known_rates(rates_P), side="right").astype(np.int64)


def bucket_counts(sizes_B: Int64, shares_B: Float64, count: int, offset: float) -> Int64:
    """int64 [B]: how many of `count` draws without replacement come from each bucket. They sum to `count`.

    A bucket gives its share, but no more than its size. The other buckets fill the rest, in proportion to their shares
    (to their sizes if those shares are all 0). One `offset` in [0, 1) rounds all fractions systematically: each count
    is its exact value rounded down or up, and its mean over uniform offsets is exact.

    Raises ValueError if `count` exceeds the total size of the buckets.
    """
    if count > sizes_B.sum():
        raise ValueError(f"cannot draw {count} of {sizes_B.sum()} problems without replacement")
    exact_B = _filled(sizes_B.astype(np.float64), np.asarray(shares_B, dtype=np.float64), float(count))
    # A bucket of 5 with an exact count of 4.999999999 is full. Without this rounding, another bucket could get its
    # fifth problem.
    exact_B = _whole_where_near(exact_B)
    whole_B = np.floor(exact_B).astype(np.int64)
    ends_B = _whole_where_near(np.cumsum(exact_B - whole_B))
    marks_B = np.floor(ends_B + offset).astype(np.int64)
    counts_B: Int64 = whole_B + np.diff(marks_B, prepend=0)
    return counts_B


def _whole_where_near(values_B: Float64) -> Float64:
    """float64 [B]: values within rounding error of a whole number become that number."""
    nearest_B = np.rint(values_B)
    found_B: Float64 = np.where(np.abs(values_B - nearest_B) < ROUNDING, nearest_B, values_B)
    return found_B


def _filled(sizes_B: Float64, shares_B: Float64, count: float) -> Float64:
    """float64 [B]: `count` split by shares. A bucket that would exceed its size gives its size; the others share the
    rest."""
    exact_B = np.zeros(len(sizes_B))
    open_B = sizes_B > 0.0
    while count > 0.0 and open_B.any():
        weights_B = np.where(open_B, shares_B, 0.0)
        if weights_B.sum() == 0.0:
            weights_B = np.where(open_B, sizes_B, 0.0)
        wanted_B = count * weights_B / weights_B.sum()
        full_B = open_B & (wanted_B >= sizes_B)
        if not full_B.any():
            return np.where(open_B, wanted_B, exact_B)
        exact_B[full_B] = sizes_B[full_B]
        count -= float(sizes_B[full_B].sum())
        open_B &= ~full_B
    return exact_B


def draw_from_buckets(
    buckets_P: Int64, shares_B: Sequence[float], count: int, generator: np.random.Generator
) -> list[int]:
    """`count` positions in random order, with the buckets in their shares. No position repeats before all positions
    were drawn once."""
    chosen: list[int] = []
    everything = np.arange(len(buckets_P))
    while count - len(chosen) >= len(buckets_P):
        chosen += generator.permutation(everything).tolist()
    sizes_B = np.bincount(buckets_P, minlength=len(shares_B)).astype(np.int64)
    counts_B = bucket_counts(sizes_B, np.asarray(shares_B), count - len(chosen), generator.random())
    rest: list[int] = []
    for bucket, of_bucket in enumerate(counts_B.tolist()):
        rest += generator.choice(everything[buckets_P == bucket], of_bucket, replace=False).tolist()
    shuffled: list[int] = generator.permutation(np.array(rest, dtype=np.int64)).tolist()
    return chosen + shuffled


def curriculum_of(experiment: Experiment) -> Curriculum | None:
    settings = experiment.training.curriculum
    return None if settings.kind == "none" else Curriculum(settings)


class Curriculum:
    def __init__(self, settings: BucketCurriculum | PrioritisedCurriculum) -> None:
        self._settings = settings
        self._rates = ValueTracker()

    def draw(self, problems: Sequence[str], role: Role, count: int, generator: np.random.Generator) -> list[int]:
        """`count` positions in `problems` (ids) for `role`; none repeats before all were drawn once."""
        rates_P = self._of([(problem, role) for problem in problems])
        if self._settings.kind == "buckets":
            buckets_P = buckets_of(rates_P, self._settings.edges)
            return draw_from_buckets(buckets_P, self._settings.shares, count, generator)
        return draw_weighted(uncertainty_weights(rates_P), count, generator)

    def observe(self, rollouts: Sequence[Rollout], aligned_N: NDArray[np.bool_]) -> dict[str, float]:
        """Learn which rollouts of a batch were role-aligned. Returns metrics of the rates before this update."""
        keys = [(rollout.problem_id, rollout.role) for rollout in rollouts]
        versions_N = np.array([rollout.version for rollout in rollouts], dtype=np.int32)
        rates_N = known_rates(self._of(keys))
        unseen_N = np.array([not self._rates.has_seen(key) for key in keys])
        self._rates.observe(keys, aligned_N.astype(np.float64), versions_N)
        edges = self._settings.edges
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
        """JSON data that restores the rates bit by bit."""
        return self._rates.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._rates.load_state(state)
