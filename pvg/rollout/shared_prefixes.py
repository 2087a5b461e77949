"""Parts of prompts that several prompts begin with, so that a prefill computes each part once.

    for level in shared_parts([a, b, c]):      # one after the other: a part needs those of the levels before it
        ...                                    # the parts of a level can be computed together

The prompts of a chat model begin with the same instructions, and those of the players of one game with the same
position. At most MOST_SHARED parts of a prompt are shared ones, since each level is a pass through the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pvg.records import Int32

LEAST_SHARED = 32  # tokens; an estimate: the separate pass for a few tokens costs more than it saves
MOST_SHARED = 2


@dataclass(frozen=True, slots=True)
class SharedPart:
    """The tokens `start:end`, which all `prompts` have, as all tokens before them. Prompts are numbers in a list."""

    prompts: tuple[int, ...]
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def shared_parts(prompts: Sequence[Int32]) -> list[list[SharedPart]]:
    """The parts of distinct prompts int32 [P], level by level. The parts of a prompt cover each of its tokens once.
    Without shared parts there is one level, in the order of the prompts."""
    # The bytes of numbers that are not negative have the order of the numbers, if the high byte is the first one.
    order = sorted(range(len(prompts)), key=lambda number: prompts[number].astype(">i4").tobytes())
    common = [_common(prompts[one], prompts[next_]) for one, next_ in pairwise(order)]
    levels: list[list[SharedPart]] = [[]]

    def add(low: int, high: int, start: int, end: int, level: int) -> None:
        if level == len(levels):
            levels.append([])
        if end > start:
            levels[level].append(SharedPart(tuple(sorted(order[low:high])), start, end))

    def split(low: int, high: int, start: int, level: int) -> None:
        """The parts of order[low:high], which share `start` tokens of earlier levels."""
        first = low
        for place in range(low, high):
            if place + 1 < high and level < MOST_SHARED and common[place] >= start + LEAST_SHARED:
                continue
            if first == place:
                add(first, place + 1, start, len(prompts[order[place]]), level)
            else:
                end = min(common[first:place])
                add(first, place + 1, start, end, level)
                split(first, place + 1, end, level + 1)
            first = place + 1

    split(0, len(order), 0, 0)
    return [sorted(level, key=lambda part: part.prompts[0]) for level in levels]


def _common(one: Int32, other: Int32) -> int:
    """The number of tokens with which both begin."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
