"""Quantiles, ranks and samples against numpy and against what is known of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvg.reporting.diagnosis.log_events import Event
from pvg.reporting.diagnosis.tally import (
    EXACT_VALUES,
    LARGEST,
    PAIRS,
    RELATIVE_ERROR,
    SMALLEST,
    LoadRelation,
    Sketch,
    WorstEvents,
    spearman,
)

SHARES = (0.0, 0.01, 0.5, 0.95, 0.99, 1.0)


@pytest.mark.parametrize("count", [1, 2, 1000, EXACT_VALUES])
def test_few_values_are_exact(count: int) -> None:
    values = np.random.default_rng(0).exponential(50.0, count)
    sketch = Sketch()
    for value in values:
        sketch.add(float(value))
    assert sketch.exact
    assert [sketch.quantile(share) for share in SHARES] == pytest.approx(np.quantile(values, SHARES).tolist())


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e9])
def test_many_values_are_within_the_error(scale: float) -> None:
    values = scale * np.random.default_rng(1).lognormal(2.0, 2.0, 30_000)
    sketch = Sketch()
    for value in values:
        sketch.add(float(value))
    assert not sketch.exact
    for share in SHARES:
        true = np.quantile(values, share, method="lower")
        assert sketch.quantile(share) == pytest.approx(true, rel=1.01 * RELATIVE_ERROR)
    assert sketch.largest == values.max()
    assert sketch.total == pytest.approx(values.sum())
    middle = float(np.median(values))
    true_excess = float(np.maximum(values - middle, 0).sum())
    assert sketch.excess_over(middle) == pytest.approx(true_excess, rel=0.03)


def test_a_sketch_is_bounded_whatever_comes() -> None:
    sketch = Sketch()
    for number in range(50_000):
        sketch.add(10 ** (number % 400 / 10 - 15))
    sketch.add(0.0)
    assert len(sketch._bins) <= math.log(LARGEST / SMALLEST) / math.log1p(2 * RELATIVE_ERROR) + 2
    assert sketch.quantile(0.0) < 2 * SMALLEST


def test_nothing_has_no_quantile() -> None:
    with pytest.raises(ValueError, match="without values"):
        Sketch().quantile(0.5)


def test_ranks_share_their_mean_among_equals() -> None:
    # by hand: ranks (1, 2.5, 2.5, 4) and (4, 3, 2, 1): covariance -1.125 over deviations of sqrt(1.125) and sqrt(1.25)
    assert spearman(np.array([1.0, 5.0, 5.0, 9.0]), np.array([4.0, 3.0, 2.0, 1.0])) == pytest.approx(
        -1.125 / math.sqrt(1.125 * 1.25)
    )
    assert spearman(np.array([1.0, 1.0, 1.0]), np.array([3.0, 2.0, 1.0])) == 0.0


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1e6)), min_size=3, max_size=60))
def test_a_monotone_change_of_the_values_changes_no_rank_correlation(pairs: list[tuple[int, float]]) -> None:
    loads, values = np.array(pairs, float).T
    assert spearman(loads, values) == pytest.approx(spearman(np.exp(loads), 3 * values))
    assert spearman(loads, values) == pytest.approx(-spearman(loads, -values))
    assert -1.0 - 1e-9 <= spearman(loads, values) <= 1.0 + 1e-9


def test_a_relation_splits_at_the_median_of_the_load() -> None:
    relation = LoadRelation()
    for load, value in ((0, 1.0), (0, 2.0), (0, 3.0), (8, 10.0), (9, 30.0)):
        relation.add(load, value)
    related = relation.related(5)
    assert related is not None
    assert (related.idle_load, related.busy_load, related.idle, related.busy) == (0.0, 8.5, 2.0, 20.0)
    assert relation.related(6) is None


def test_a_load_that_never_changes_tells_nothing() -> None:
    relation = LoadRelation()
    for value in range(100):
        relation.add(7.0, float(value))
    assert relation.related(20) is None


def test_a_long_relation_keeps_an_even_sample() -> None:
    relation = LoadRelation()
    for number in range(20 * PAIRS):
        relation.add(float(number), float(number))
    assert len(relation._pairs) == PAIRS
    related = relation.related(20)
    assert related is not None
    assert related.correlation == pytest.approx(1.0)
    # the median of an even sample of 0..n lies near n/4 in the idler half: within five standard errors
    assert related.idle_load == pytest.approx(5 * PAIRS, rel=0.1)


def test_the_worst_are_the_largest_and_the_earlier_of_equals() -> None:
    worst = WorstEvents()
    for line, value in enumerate([1.0, 7.0, 3.0, 7.0, 2.0, 7.0, 7.0], start=1):
        worst.add(value, Event("ckpt", "write.done", 0.0, {}, "", 0, line))
    assert [event.line for event in worst.events()] == [2, 4, 6]
