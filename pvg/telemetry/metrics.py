"""Metrics of a step, gathered over its micro-batches: what merges exactly is kept (totals, weights, maxima)."""

from __future__ import annotations


class Metrics:
    """Weighted means, sums and maxima by name. Merging two is the same as having gathered both in one.

    A name belongs to one kind; `result` raises ValueError where it was used for two.
    """

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}

    def add_mean(self, name: str, total: float, weight: float) -> None:
        """`total` is the sum of what is averaged, `weight` how many (or how much) it sums over."""
        self._totals[name] = self._totals.get(name, 0.0) + total
        self._weights[name] = self._weights.get(name, 0.0) + weight

    def add_sum(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value

    def add_max(self, name: str, value: float) -> None:
        self._maxima[name] = max(self._maxima.get(name, value), value)

    def merge(self, other: Metrics) -> None:
        """Add what `other` gathered."""
        for name, total in other._totals.items():
            self.add_mean(name, total, other._weights[name])
        for name, value in other._sums.items():
            self.add_sum(name, value)
        for name, value in other._maxima.items():
            self.add_max(name, value)

    def result(self) -> dict[str, float]:
        """Name -> value. A mean over nothing (weight 0) is left out: it has no value."""
        means = {name: total / self._weights[name] for name, total in self._totals.items() if self._weights[name]}
        kinds = (self._totals, self._sums, self._maxima)
        if len(set().union(*kinds)) != sum(map(len, kinds)):
            raise ValueError("a metric's name is used for two kinds of metric")
        return means | self._sums | self._maxima
