"""Seeds from places in the game, so that a resumed run draws the same random numbers as an uninterrupted one."""

from __future__ import annotations

import hashlib

import numpy as np


def seed_for(seed: int, *place: int | str) -> int:
    """A 63-bit seed for one place of the game, such as (round, "train_prover", step)."""
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_for(seed: int, *place: int | str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed_for(seed, *place)))


def draw_cyclic(count: int, start: int, size: int, seed: int) -> list[int]:
    """`size` positions from an endless sequence of shuffles of range(count), starting at position `start`.

    Every item appears once per epoch. The function is stateless: step k draws the same items whether or not this
    process drew steps 0..k-1.
    """
    chosen = []
    epoch, permutation_N = -1, np.empty(0, dtype=np.int64)
    for position in range(start, start + size):
        if position // count != epoch:
            epoch = position // count
            permutation_N = generator_for(seed, "epoch", epoch).permutation(count)
        chosen.append(int(permutation_N[position % count]))
    return chosen
