"""Streams of numbers in bounded memory: quantiles, the relation of two quantities, the worst few.

- `Sketch`: n, sum and maximum exactly; quantiles exactly up to EXACT_VALUES values, then within RELATIVE_ERROR.
- `Relation`: pairs of (load, value), all of them up to PAIRS, from then on an even sample; rank correlation, and
  medians of the idler and the busier half.
- `Worst`: the few largest values with the line they come from.

Runs of `pvg diagnose` on the same log say the same: the sample is drawn with a fixed seed.
"""

from __future__ import annotations

import heapq
import math
import random
from array import array
from dataclasses import dataclass
from itertools import count

import numpy as np

from pvg.reporting.diagnosis.lines import Event

EXACT_VALUES = 4096  # 32 kB a sketch: the updates and steps of most runs
RELATIVE_ERROR = 0.01  # of a quantile beyond that; nobody acts on less
SMALLEST, LARGEST = 1e-6, 1e15  # milliseconds: a nanosecond, and 30,000 years; at most 2,420 bins between them
PAIRS = 2048  # the standard error of a rank correlation is then 0.02
WORST = 3  # lines of evidence per quantity

_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA = math.log(_GAMMA)


class Sketch:
    """Quantiles of non-negative numbers (Masson, Rim and Lee, DDSketch, 2019: bins of equal ratio)."""

    def __init__(self) -> None:
        self.n = 0
        self.total = 0.0
        self.largest = 0.0
        self._values: array[float] | None = array("d")
        self._bins: dict[int, int] = {}  # bin i holds (gamma^(i-1), gamma^i]

    @property
    def exact(self) -> bool:
        return self._values is not None

    def add(self, value: float) -> None:
        self.n += 1
        self.total += value
        self.largest = max(self.largest, value)
        if self._values is None:
            self._count(value)
            return
        self._values.append(value)
        if len(self._values) > EXACT_VALUES:
            for kept in self._values:
                self._count(kept)
            self._values = None

    def quantile(self, share: float) -> float:
        """The value below which `share` of all lie, interpolated while exact. Raises ValueError without values."""
        if not self.n:
            raise ValueError("A sketch of nothing has no quantiles.")
        if self._values is not None:
            return float(np.quantile(np.frombuffer(self._values), share))
        rank, seen = share * (self.n - 1), 0
        for place in sorted(self._bins):
            seen += self._bins[place]
            if seen > rank:
                return min(_middle(place), self.largest)
        return self.largest

    def excess_over(self, level: float) -> float:
        """The sum of what lies above `level`."""
        if self._values is not None:
            return sum(value - level for value in self._values if value > level)
        return sum(number * max(0.0, _middle(place) - level) for place, number in self._bins.items())

    def _count(self, value: float) -> None:
        clamped = min(max(value, SMALLEST), LARGEST)
        place = math.ceil(math.log(clamped) / _LOG_GAMMA)
        self._bins[place] = self._bins.get(place, 0) + 1


def _middle(place: int) -> float:
    """The value of a bin that is at most RELATIVE_ERROR away from all in it."""
    return 2 * _GAMMA**place / (_GAMMA + 1)


@dataclass(frozen=True, slots=True)
class Related:
    """How a quantity goes with the load: Spearman's rank correlation, and medians of both halves of the load."""

    n: int
    correlation: float
    idle_load: float
    busy_load: float
    idle: float
    busy: float


class Relation:
    def __init__(self) -> None:
        self.n = 0
        self._pairs: list[tuple[float, float]] = []
        self._random = random.Random(0)

    def add(self, load: float, value: float) -> None:
        """Keep the pair, or let it replace another: every pair so far is kept with the same probability."""
        self.n += 1
        if len(self._pairs) < PAIRS:
            self._pairs.append((load, value))
        elif (place := self._random.randrange(self.n)) < PAIRS:
            self._pairs[place] = (load, value)

    def related(self, least: int) -> Related | None:
        """None with fewer than `least` pairs, or where the load never changed."""
        if self.n < least or not self._pairs:
            return None
        loads, values = np.array(self._pairs).T
        border = float(np.median(loads))
        busy = loads > border if border < loads.max() else loads >= border
        if busy.all():
            return None
        return Related(
            n=self.n,
            correlation=spearman(loads, values),
            idle_load=float(np.median(loads[~busy])),
            busy_load=float(np.median(loads[busy])),
            idle=float(np.median(values[~busy])),
            busy=float(np.median(values[busy])),
        )


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of the ranks of two [n] arrays, equal values sharing their mean rank; 0 where one is constant."""
    ranks_a, ranks_b = _ranks(a), _ranks(b)
    if ranks_a.std() == 0 or ranks_b.std() == 0:
        return 0.0
    return float(np.corrcoef(ranks_a, ranks_b)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, number = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(number) - (number - 1) / 2)[place]


class Worst:
    """The lines with the largest values, largest first; the earlier of equals."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Event]] = []
        self._order = count(0, -1)

    def add(self, value: float, event: Event) -> None:
        entry = (value, next(self._order), event)
        if len(self._heap) < WORST:
            heapq.heappush(self._heap, entry)
        elif entry > self._heap[0]:
            heapq.heapreplace(self._heap, entry)

    def events(self) -> list[Event]:
        return [event for _, _, event in sorted(self._heap, reverse=True)]
