"""Which problems a batch should hold, by how often the policy has succeeded at them. Pure functions of success rates.

`v` is the tracked share of successes of a problem in a role (pvg.training.baselines); what counts as a success is the
game's to say. Two ways to use it:

- *prioritised*: a problem is drawn with a probability proportional to sqrt(v (1 - v)) + 0.05, the deviation of one
  outcome, which is how much a group of them has to tell (Single-stream Policy Optimization, arXiv 2509.13232);
- *buckets*: success rates are cut at `edges`, and each batch takes its shares of the buckets, whatever they hold.
  Within a bucket all problems are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pvg.config.sections import BucketCurriculum, PrioritisedCurriculum
from pvg.game.seeds import draw_weighted
from pvg.records import Role, Rollout
from pvg.training.baselines import ValueTracker

if TYPE_CHECKING:
    from pvg.config.experiment import Experiment

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

LEAST_WEIGHT = 0.05  # so that no problem is never drawn again
ROUNDING = 1e-6  # far above what sums of a few fractions lose, far below what a share can mean
UNKNOWN = 0.5  # the rate of a problem in a role of which nothing is known


def known_rates(rates_P: Float64) -> Float64:
    """float64 [P] in [0, 1]; NaN (nothing is known) becomes 1/2."""
    known_P: Float64 = np.clip(np.nan_to_num(rates_P, nan=UNKNOWN), 0.0, 1.0)
    return known_P


def uncertainty_weights(rates_P: Float64) -> Float64:
    """float64 [P]: sqrt(v (1 - v)) + 0.05, most where the outcome is least certain."""
    known_P = known_rates(rates_P)
    weights_P: Float64 = np.sqrt(known_P * (1.0 - known_P)) + LEAST_WEIGHT
    return weights_P


def buckets_of(rates_P: Float64, edges: Sequence[float]) -> Int64:
    """int64 [P]: the bucket of each problem. Bucket b holds edges[b - 1] <= v < edges[b]; the first begins at 0, the
    last ends with 1."""
    return np.searchsorted(np.asarray(edges, dtype=np.float64), known_rates(rates_P), side="right").astype(np.int64)


def bucket_counts(sizes_B: Int64, shares_B: Float64, count: int, offset: float) -> Int64:
    """int64 [B]: how many of `count` draws without repetition each bucket gives. They sum to `count`.

    A bucket gives its share, but no more than it holds; what a bucket cannot give, the others give in proportion to
    their shares (where those are 0, in proportion to what they hold). Fractions are rounded systematically, by one
    `offset` in [0, 1): each count is its exact value rounded down or up, and over uniform offsets its mean is exact.

    Raises ValueError for more draws than all buckets hold.
    """
    if count > sizes_B.sum():
        raise ValueError(f"{count} draws from {sizes_B.sum()} problems")
    exact_B = _filled(sizes_B.astype(np.float64), np.asarray(shares_B, dtype=np.float64), float(count))
    # A bucket of 5 whose share comes to 4.999999999 is full: were that a fraction, another bucket could get its
    # problem.
    exact_B = _whole_where_near(exact_B)
    whole_B = np.floor(exact_B).astype(np.int64)
    ends_B = _whole_where_near(np.cumsum(exact_B - whole_B))
    marks_B = np.floor(ends_B + offset).astype(np.int64)
    counts_B: Int64 = whole_B + np.diff(marks_B, prepend=0)
    return counts_B


def _whole_where_near(values_B: Float64) -> Float64:
    """float64 [B]: whole numbers again, where the last bits have made something else of them."""
    nearest_B = np.rint(values_B)
    found_B: Float64 = np.where(np.abs(values_B - nearest_B) < ROUNDING, nearest_B, values_B)
    return found_B


def _filled(sizes_B: Float64, shares_B: Float64, count: float) -> Float64:
    """`count` dealt out by shares, no bucket over its size: fixed where it would be, and the rest dealt out again."""
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
    """`count` positions in random order, buckets in their shares, none twice while there are others: more than there
    are positions begin with all of them."""
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


# `Curriculum`: which problems the prover is asked, by how often it has succeeded at them (`training.curriculum`).
#
#     curriculum = curriculum_of(experiment)                 # None: problems come in the order of their shuffle
#     chosen = curriculum.draw(ids, Role.SNEAKY, 16, generator)
#     metrics = curriculum.observe(rollouts, aligned_N)      # after the batch: what came of it
#
# A success is a role-aligned solution: a helpful one that is correct, a sneaky one that is well-formed and wrong
# (`Outcomes.aligned_N`). So the rates are shares whatever the reward is, and each role has its own: a problem too
# easy to be worth a helpful solution may be the hardest to be wrong about.
#
# Everything that was sampled is learnt, what was not trained on too (training.dynamic_sampling): rates of what was
# kept alone would all be near one half.


def curriculum_of(experiment: Experiment) -> Curriculum | None:
    settings = experiment.training.curriculum
    return None if settings.kind == "none" else Curriculum(settings)


class Curriculum:
    def __init__(self, settings: BucketCurriculum | PrioritisedCurriculum) -> None:
        self._settings = settings
        self._rates = ValueTracker(settings.half_life)

    def draw(self, problems: Sequence[str], role: Role, count: int, generator: np.random.Generator) -> list[int]:
        """`count` positions in `problems` (ids) for `role`; none twice while there are others."""
        rates_P = self._of([(problem, role) for problem in problems])
        if self._settings.kind == "buckets":
            buckets_P = buckets_of(rates_P, self._settings.edges)
            return draw_from_buckets(buckets_P, self._settings.shares, count, generator)
        return draw_weighted(uncertainty_weights(rates_P), count, generator)

    def observe(self, rollouts: Sequence[Rollout], aligned_N: NDArray[np.bool_]) -> dict[str, float]:
        """Learn which of a batch's rollouts were role-aligned; what the curriculum knew of them before, as metrics."""
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
        """As JSON data, from which every bit comes back."""
        return self._rates.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._rates.load_state(state)
