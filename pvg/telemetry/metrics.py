"""Gathers the metrics of a step over its micro-batches as totals, weights and maxima, which merge exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(eq=False)
class Metrics:
    """Weighted means, sums and maxima by name. Merging two equals gathering both in one.

    Each name belongs to one kind; `result` raises ValueError otherwise. Call `read` before they go to another process.
    """

    _totals: dict[str, float] = field(default_factory=dict)
    _weights: dict[str, float] = field(default_factory=dict)
    _sums: dict[str, float] = field(default_factory=dict)
    _maxima: dict[str, float] = field(default_factory=dict)
    _unread: list[tuple[Sequence[str], Tensor]] = field(default_factory=list)

    def add_mean(self, name: str, total: float, weight: float) -> None:
        """`total`: the sum of the values to average. `weight`: their number or total weight."""
        self._totals[name] = self._totals.get(name, 0.0) + total
        self._weights[name] = self._weights.get(name, 0.0) + weight

    def add_sum(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value

    def add_max(self, name: str, value: float) -> None:
        self._maxima[name] = max(self._maxima.get(name, value), value)

    def add_later(self, names: Sequence[str], values_M2: Tensor) -> None:
        """Add values that follow their kind ("mean", "sum" or "max") and name: float64 [M, 2] (total, weight) on any
        device. `read` reads all of a step in one transfer: one per micro-batch would make the device wait."""
        self._unread.append((names, values_M2))

    def merge(self, other: Metrics) -> None:
        self._unread += other._unread
        for name, total in other._totals.items():
            self.add_mean(name, total, other._weights[name])
        for name, value in other._sums.items():
            self.add_sum(name, value)
        for name, value in other._maxima.items():
            self.add_max(name, value)

    def read(self) -> None:
        """Read what `add_later` was given."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        import torch

        names = [name for own, _ in unread for name in own]
        values_M2 = torch.cat([own_M2 for _, own_M2 in unread]).tolist()
        for kind_and_name, (value, weight) in zip(names, values_M2, strict=True):
            kind, _, name = kind_and_name.partition(" ")
            match kind:
                case "mean":
                    self.add_mean(name, value, weight)
                case "sum":
                    self.add_sum(name, value)
                case _:
                    self.add_max(name, value)

    def result(self) -> dict[str, float]:
        """Name -> value. A mean with weight 0 is left out, because it has no value."""
        self.read()
        means = {name: total / self._weights[name] for name, total in self._totals.items() if self._weights[name]}
        kinds = (self._totals, self._sums, self._maxima)
        if len(set().union(*kinds)) != sum(map(len, kinds)):
            raise ValueError("a metric's name is used for two kinds of metric")
        return means | self._sums | self._maxima
