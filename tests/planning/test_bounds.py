"""Bounds of a step, against numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pvg.errors import ConfigurationError
from pvg.planning.plan import BatchWork, bounds_of, expected_longest, lognormal_lengths

WORK = BatchWork(
    rollouts=8,
    mean_length=10.0,
    longest=20.0,
    workers=1,
    slots=4,
    concurrency=8,
    token_s=1.0,
    row_s=0.25,
    request_s=2.5,
    train_token_s=0.5,
    other_s=3.0,
    update_s=2.0,
)


def test_the_bounds_by_hand() -> None:
    found = bounds_of(WORK)
    assert found.trainer_s == 8 * 10 * 0.5 + 5
    assert found.sampling_s == 8 * (10 + 2) / 4 * 2  # a request is 2 steps of 1.25 s; 4 rows make a step 2 s long
    assert found.longest_s == 20 * 1.0 + 80 * 0.25 + 2.5  # its worker decodes all 80 tokens
    assert (found.overlap_s, found.turns_s) == (48.0, 45.0 + 48.0)
    assert found.limit == "sampling"
    assert found.balance == pytest.approx(48 / 45)
    assert bounds_of(replace(WORK, longest=100.0)).turns_s == 45 + 127.5  # in turns it waits for the longest rollout


def test_a_batch_whose_rows_all_have_a_place_takes_as_long_as_its_steps_one_by_one() -> None:
    lengths = np.array([3, 5, 8, 20])
    by_steps = sum(1.0 + 0.25 * (lengths > step).sum() for step in range(20))
    found = bounds_of(replace(WORK, rollouts=4, mean_length=lengths.mean(), request_s=0.0))
    assert found.longest_s == by_steps >= found.sampling_s


def test_a_single_gpu_gains_only_stragglers_and_samplers_that_score_relieve_the_trainer() -> None:
    assert bounds_of(replace(WORK, one_gpu=True)).overlap_s == 45 + 48
    found = bounds_of(replace(WORK, samplers_score=True))
    assert (found.trainer_s, found.sampling_s) == (45 - 3, 48 + 3)


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        ({}, 4),
        ({"workers": 9}, 8),
        ({"workers": 9, "ahead": 1}, 8),
        ({"workers": 3, "concurrency": 99, "ahead": 1}, 12),
    ],
)
def test_rows_are_limited_by_workers_requests_and_rollouts(change: dict[str, int], rows: int) -> None:
    assert replace(WORK, **change).rows == rows


def test_the_expected_longest_of_draws() -> None:
    assert expected_longest(np.array([1, 2]), 1) == 1.5
    assert expected_longest(np.array([2, 1]), 2) == 1.75  # 1 in one of four cases


@pytest.mark.parametrize("sigma", [0.0, 0.6, 2.0])
def test_lognormal_lengths_have_their_mean_after_the_cut(sigma: float) -> None:
    pool = lognormal_lengths(200, sigma, 1000)
    assert pool.mean() == pytest.approx(200, rel=0.01)
    assert pool.max() <= 1000


@pytest.mark.parametrize(("mean", "sigma"), [(0.5, 0.6), (1001, 0.6), (100, 5.0)])
def test_impossible_lengths_are_refused(mean: float, sigma: float) -> None:
    with pytest.raises(ConfigurationError):
        lognormal_lengths(mean, sigma, 1000)
