"""Micro-batches of like size: as few as a token budget allows, and no tiny one left over at the end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
# Budgets that are looked at between the smallest one and the full one.
STEPS = 16


def balanced_batches(
    split: Callable[[int], list[Rows]], positions: Callable[[Rows], int], budget: int, smallest: int
) -> list[Rows]:
    """As many batches as `split(budget)` has, of the smallest budget that makes no more of them, nor more positions in
    all. (Evenly cut rows of mixed length may hold more padding; then budgets between the two are tried.)

    `split` goes through rows in an order of its own and fills one batch after the other, so that a larger budget never
    makes more batches; `positions` of a batch, padding included; `smallest`: a budget that each row keeps within alone.
    """
    full = split(budget)
    if len(full) < 2:
        return full
    low, high = smallest, budget
    while low < high:
        middle = (low + high) // 2
        if len(split(middle)) > len(full):
            low = middle + 1
        else:
            high = middle
    most = sum(positions(rows) for rows in full)
    for step in range(STEPS):
        found = split(low + (budget - low) * step // STEPS)
        if sum(positions(rows) for rows in found) <= most:
            return found
    return full
