"""What a measure says of one run: a number, or that it is larger than a number.

    Value(0.84)                        # a share
    Value(200, censored=True)          # steps-to-exploit: not found within 200 steps

A censored value is no number and no missing value: it is known to be above `number`. So it has a place in an order and
none in a mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Value:
    """`censored`: known only to be above `number`."""

    number: float
    censored: bool = False


def numbers(values: Sequence[Value]) -> list[float]:
    """The numbers of values that are all known. Raises ValueError where one is censored."""
    if any(value.censored for value in values):
        raise ValueError("a censored value is no number")
    return [value.number for value in values]


def capped(values: Sequence[Value], cap: float | None) -> list[float]:
    """Numbers that have the order of the values: whatever is not known to be below `cap` is a tie at `cap`."""
    if cap is None:
        return numbers(values)
    return [cap if value.censored else min(value.number, cap) for value in values]


def cap_of(values: Sequence[Value]) -> float | None:
    """The number up to which all the values can be ordered: the least at which one is censored; None: none is."""
    return min((value.number for value in values if value.censored), default=None)
