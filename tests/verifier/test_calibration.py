"""What held-out solutions say of an ensemble: scales by hand, and what they must not change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pvg.models.heads import AGGREGATIONS, ScoreScales
from pvg.verifier.calibration import common_scales, disagreement


def scaled(scores_KN: np.ndarray, scales: ScoreScales) -> np.ndarray:
    return scales.applied(torch.from_numpy(scores_KN)).numpy()


def test_scales_by_hand() -> None:
    # Means 2, 10, -1 and standard deviations 1, 4, 2: the medians are 2 and 2.
    scores_KN = np.array([[1.0, 3.0, 1.0, 3.0], [6.0, 14.0, 14.0, 6.0], [1.0, -3.0, 1.0, -3.0]])
    scales = common_scales(scores_KN)
    assert scales.slopes_K.tolist() == [2.0, 0.5, 1.0]
    assert scales.offsets_K.tolist() == [2.0 - 2.0 * 2.0, 2.0 - 0.5 * 10.0, 2.0 + 1.0]
    assert scaled(scores_KN, scales).tolist() == [[0, 4, 0, 4], [0, 4, 4, 0], [4, 0, 4, 0]]
    # Of each solution one member is 4 and two are 0, or the reverse: a standard deviation of 4 sqrt(2) / 3.
    assert disagreement(scaled(scores_KN, scales)) == pytest.approx(
        np.mean([np.std([0, 0, 4]), np.std([4, 4, 0]), np.std([0, 4, 4]), np.std([4, 0, 0])])
    )


@given(st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=40), st.integers(1, 6))
def test_equal_members_are_left_as_they_are(scores: list[float], count: int) -> None:
    scores_KN = np.tile(np.array(scores, dtype=np.float32), (count, 1))
    scales = common_scales(scores_KN)
    assert scales.slopes_K.tolist() == [1.0] * count
    assert scales.offsets_K.tolist() == [0.0] * count
    assert disagreement(scaled(scores_KN, scales)) == pytest.approx(0.0, abs=1e-12)


@given(
    st.integers(0, 1000),
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(-20, 20)), min_size=3, max_size=3),
    st.sampled_from(sorted(AGGREGATIONS)),
)
def test_no_members_scale_decides_who_is_right(seed: int, changes: list[tuple[float, float]], aggregation: str) -> None:
    """Bradley-Terry leaves a constant free, and the length of the training a slope: the order of the aggregated scores
    is that of the same members without both."""
    plain_KN = np.random.default_rng(seed).normal(size=(3, 20))
    plain_KN = (plain_KN - plain_KN.mean(1, keepdims=True)) / plain_KN.std(1, keepdims=True)
    changed_KN = np.stack([a * own_N + b for own_N, (a, b) in zip(plain_KN, changes, strict=True)])
    aggregate = AGGREGATIONS[aggregation]
    scales = common_scales(changed_KN)
    found_N = aggregate(scales.applied(torch.from_numpy(changed_KN))).numpy()
    spread, centre = np.median([a for a, _ in changes]), np.median([b for _, b in changes])
    expected_N = spread * aggregate(torch.from_numpy(plain_KN)).numpy() + centre
    np.testing.assert_allclose(found_N, expected_N, atol=1e-9)
