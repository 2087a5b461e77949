"""Gathers the metrics of a step over its micro-batches as totals, weights and maxima, which merge exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


class Metrics:
    """Weighted means, sums and maxima by name. Merging two equals gathering both in one.

    Each name belongs to one kind; `result` raises ValueError otherwise.
    """

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._unread: list[tuple[Sequence[str], Tensor]] = []

    def add_mean(self, name: str, total: float, weight: float) -> None:
        """`total`: the sum of the values to average. `weight`: their number or total weight."""
        self._totals[name] = self._totals.get(name, 0.0) + total
        self._weights[name] = self._weights.get(name, 0.0) + weight

    def add_sum(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value

    def add_max(self, name: str, value: float) -> None:
        self._maxima[name] = max(self._maxima.get(name, value), value)

    def add_later(self, names: Sequence[str], values_M2: Tensor) -> None:
        """Add what `from_array` takes, float64 on any device. It is read when the metrics are needed, all of a step in
        one transfer: one per micro-batch would make the device wait."""
        self._unread.append((names, values_M2))

    def merge(self, other: Metrics) -> None:
        self._unread += other._unread
        for name, total in other._totals.items():
            self.add_mean(name, total, other._weights[name])
        for name, value in other._sums.items():
            self.add_sum(name, value)
        for name, value in other._maxima.items():
            self.add_max(name, value)

    def as_array(self) -> tuple[list[str], NDArray[np.float64]]:
        """For another process: names with their kind, and float64 [M, 2] (total, weight). `from_array` is the
        inverse."""
        self._read()
        named = {f"mean {name}": (total, self._weights[name]) for name, total in self._totals.items()}
        named |= {f"sum {name}": (value, 0.0) for name, value in self._sums.items()}
        named |= {f"max {name}": (value, 0.0) for name, value in self._maxima.items()}
        return list(named), np.array(list(named.values()), dtype=np.float64).reshape(-1, 2)

    @classmethod
    def from_array(cls, names: Sequence[str], values_M2: NDArray[np.float64]) -> Metrics:
        metrics = cls()
        metrics._add(names, values_M2.tolist())
        return metrics

    def _add(self, names: Sequence[str], values_M2: Sequence[tuple[float, float]]) -> None:
        for kind_and_name, (value, weight) in zip(names, values_M2, strict=True):
            kind, _, name = kind_and_name.partition(" ")
            match kind:
                case "mean":
                    self.add_mean(name, value, weight)
                case "sum":
                    self.add_sum(name, value)
                case _:
                    self.add_max(name, value)

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        if unread:
            import torch

            names = [name for own, _ in unread for name in own]
            self._add(names, torch.cat([values_M2 for _, values_M2 in unread]).tolist())

    def result(self) -> dict[str, float]:
        """Name -> value. A mean with weight 0 is left out, because it has no value."""
        self._read()
        means = {name: total / self._weights[name] for name, total in self._totals.items() if self._weights[name]}
        kinds = (self._totals, self._sums, self._maxima)
        if len(set().union(*kinds)) != sum(map(len, kinds)):
            raise ValueError("a metric's name is used for two kinds of metric")
        return means | self._sums | self._maxima
