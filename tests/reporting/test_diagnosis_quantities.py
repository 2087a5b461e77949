"""Quantiles, ranks and samples against numpy and against what is known of them."""

from __future__ import annotations

import numpy as np
import pytest

from pvg.reporting.diagnosis.log_events import Event
from pvg.reporting.diagnosis.tally import LoadRelation, Quantity, WorstEvents

SHARES = (0.0, 0.01, 0.5, 0.95, 0.99, 1.0)


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_quantiles_and_sums_are_those_of_numpy(count: int) -> None:
    values = np.random.default_rng(0).exponential(50.0, count)
    quantity = Quantity()
    for value in values:
        quantity.add(float(value))
    middle = float(np.median(values))
    assert quantity.excess_over(middle) == pytest.approx(float(np.maximum(values - middle, 0).sum()))
    assert [quantity.quantile(share) for share in SHARES] == pytest.approx(np.quantile(values, SHARES).tolist())


def test_nothing_has_no_quantile() -> None:
    with pytest.raises(ValueError, match="without values"):
        Quantity().quantile(0.5)


def test_a_relation_splits_at_the_median_of_the_load() -> None:
    relation = LoadRelation()
    for load, value in ((0, 1.0), (0, 2.0), (0, 3.0), (8, 10.0), (9, 30.0)):
        relation.add(load, value)
    related = relation.related(5)
    assert related is not None
    assert (related.idle_load, related.busy_load, related.idle, related.busy) == (0.0, 8.5, 2.0, 20.0)
    # ranks (2, 2, 2, 4, 5) and (1, 2, 3, 4, 5): covariance 8 over deviations of sqrt(8) and sqrt(10)
    assert related.correlation == pytest.approx(8 / (8 * 10) ** 0.5)
    assert relation.related(6) is None


def test_a_load_that_never_changes_tells_nothing() -> None:
    relation = LoadRelation()
    for value in range(100):
        relation.add(7.0, float(value))
    assert relation.related(20) is None


def test_a_value_that_never_changes_has_no_correlation() -> None:
    relation = LoadRelation()
    for load in range(100):
        relation.add(float(load), 7.0)
    related = relation.related(20)
    assert related is not None
    assert related.correlation == 0.0


def test_the_worst_are_the_largest_and_the_earlier_of_equals() -> None:
    worst = WorstEvents()
    for line, value in enumerate([1.0, 7.0, 3.0, 7.0, 2.0, 7.0, 7.0], start=1):
        worst.add(value, Event("ckpt", "write.done", 0.0, {}, "", 0, line))
    assert [event.line for event in worst.events()] == [2, 4, 6]
