"""ROC and AUC against the library's AUC and against resamples that are drawn out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.verifier.calibration import auc
from pvg.verifier.intervals import MOST_POINTS, auc_of, draws, roc, wins

sides = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 4)), min_size=1, max_size=12)


def arrays(rows):
    return np.array([float(s) for s, _ in rows]), np.array([p for _, p in rows], dtype=np.int64)


@settings(max_examples=60, deadline=None)
@given(sides, sides)
def test_the_sum_of_wins_is_the_auc_and_a_resample_is_one_of_repeated_problems(positive, negative):
    (pos_N, at_N), (neg_M, at_M) = arrays(positive), arrays(negative)
    counts = wins(pos_N, at_N, neg_M, at_M, 5)
    weights_BP = draws(5, 6, seed=1)
    assert auc_of(counts, weights_BP).value == pytest.approx(auc(pos_N, neg_M), abs=1e-12)
    for weights_P in weights_BP:
        times = weights_P.astype(int)
        drawn = auc(np.repeat(pos_N, times[at_N]), np.repeat(neg_M, times[at_M]))
        pairs = weights_P @ np.outer(counts.positives_P, counts.negatives_P) @ weights_P
        if pairs:
            assert weights_P @ counts.wins_PP @ weights_P / pairs == pytest.approx(drawn, abs=1e-12)
        else:
            assert np.isnan(drawn)


@settings(max_examples=40, deadline=None)
@given(sides, sides)
def test_the_area_under_the_roc_is_the_auc(positive, negative):
    (pos_N, _), (neg_M, _) = arrays(positive), arrays(negative)
    points = np.array(roc(pos_N, neg_M))
    assert np.trapezoid(points[:, 1], points[:, 0]) == pytest.approx(auc(pos_N, neg_M), abs=1e-12)


def test_a_long_roc_is_thinned_and_keeps_its_ends():
    generator = np.random.default_rng(1)
    points = roc(generator.normal(size=500), generator.normal(size=500))
    assert len(points) == MOST_POINTS
    assert points[0] == (0.0, 0.0)
    assert points[-1] == (1.0, 1.0)
    assert points == sorted(points)
