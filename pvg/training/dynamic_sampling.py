"""Dynamic sampling: groups whose rewards are all the same are left out of a batch, and others sampled in their place.

Source: DAPO (arXiv 2503.14476, section 3.2). Such a group has no gradient, and each of them makes the batch's smaller
and noisier. Roles are filled up one by one, so that the batch keeps their shares. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pvg.records import Float32, Role

Bools = NDArray[np.bool_]


def live_groups(rewards_N: Float32, sizes_G: Sequence[int]) -> Bools:
    """bool [G]: whether a group holds more than one reward value. `rewards_N` are those of the groups of `sizes_G`
    rollouts, one group after the other."""
    parts = np.split(rewards_N, np.cumsum(sizes_G)[:-1]) if len(sizes_G) else []
    return np.array([len(part) > 0 and bool(part.min() < part.max()) for part in parts], dtype=bool)


def refill_counts(wanted: Mapping[Role, int], seen: Mapping[Role, int], live: Mapping[Role, int]) -> dict[Role, int]:
    """How many further groups of each role to sample, so that about as many as are missing will be live.

    `wanted` live groups; `seen` were sampled so far and `live` of these are. The share of live ones is taken to be
    (live + 1) / (seen + 1): never 0, and soon the one that was seen. At most as many as the batch wants of the role.
    Roles that are complete are left out.
    """
    counts: dict[Role, int] = {}
    for role, count in wanted.items():
        missing = count - live.get(role, 0)
        if missing > 0:
            expected = -(-missing * (seen.get(role, 0) + 1) // (live.get(role, 0) + 1))
            counts[role] = min(expected, count)
    return counts


def chosen_groups(roles_G: Sequence[Role], live_G: Bools, wanted: Mapping[Role, int]) -> list[int]:
    """The places of the groups to train on, rising: of each role the first `wanted` that are live; where there are too
    few, the first of the others fill the batch up."""
    chosen: list[int] = []
    for role, count in wanted.items():
        places = [place for place, of in enumerate(roles_G) if of is role]
        places.sort(key=lambda place: not live_G[place])  # stable
        chosen += places[:count]
    return sorted(chosen)
