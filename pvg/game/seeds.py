"""Random numbers that are functions of where the game stands, so that a resumed run draws what it would have drawn."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def seed_for(seed: int, *place: int | str) -> int:
    """A 63-bit seed for one place of the game, such as (round, "train_prover", step)."""
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_for(seed: int, *place: int | str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed_for(seed, *place)))


def draw_cyclic(count: int, start: int, size: int, seed: int) -> list[int]:
    """`size` positions of an endless sequence of shuffles of range(count), from position `start` on.

    Every item comes once per epoch; stateless, so that step k draws the same items whether or not steps 0..k-1
    were drawn in this process.
    """
    chosen = []
    epoch, permutation_N = -1, np.empty(0, dtype=np.int64)
    for position in range(start, start + size):
        if position // count != epoch:
            epoch = position // count
            permutation_N = generator_for(seed, "epoch", epoch).permutation(count)
        chosen.append(int(permutation_N[position % count]))
    return chosen


def draw_weighted(weights_P: NDArray[np.float64], size: int, generator: np.random.Generator) -> list[int]:
    """`size` positions, each drawn with a probability proportional to its weight; none twice while there are others."""
    shares_P = weights_P / weights_P.sum()
    again = size > len(weights_P)
    return [int(position) for position in generator.choice(len(weights_P), size, replace=again, p=shares_P)]
