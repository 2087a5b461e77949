"""How a cost grows: the exponent p of cost = c x^p, fitted to samples taken at several sizes x.

    grown = upper_range([64, 128, 256, 512, 1024])          # [256, 512, 1024]
    exponent_of(grown, samples)                             # Contrast(value=1.02, low=0.98, high=1.06)

p is the slope of a least-squares line through the logs of the medians. Small sizes mostly cost what any size costs, so
the fit is to the upper part of the range. The interval knows the spread of the samples, not how well a power law fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pvg.bench.statistics import Contrast, contrast_of_medians


def upper_range(sizes: Sequence[float]) -> list[float]:
    """The sizes from the geometric middle of the range on. Raises ValueError with fewer than two sizes."""
    if len(set(sizes)) < 2:
        raise ValueError(f"how a cost grows cannot be told from the sizes {list(sizes)}")
    middle = math.sqrt(min(sizes) * max(sizes))
    return sorted(size for size in sizes if size >= middle * (1 - 1e-9))


def exponent_of(sizes: Sequence[float], samples: Sequence[Sequence[float]]) -> Contrast:
    """p, with its interval at 95 %; `samples[i]` were taken at `sizes[i]`. A single exact value per size (a count of
    work) has an infinite interval: its value is all there is.

    Raises ValueError for fewer than two sizes, and for sizes or samples that are not above 0.
    """
    if len(set(sizes)) < 2 or min(sizes) <= 0:
        raise ValueError(f"no exponent can be fitted to the sizes {list(sizes)}")
    logs = [math.log(size) for size in sizes]
    mean = sum(logs) / len(logs)
    square = sum((log - mean) ** 2 for log in logs)
    return contrast_of_medians(samples, [(log - mean) / square for log in logs])
