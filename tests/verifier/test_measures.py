import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvg.verifier.calibration import (
    acceptance_threshold,
    accepted_by_halves,
    auc,
    balanced_accuracy,
    balanced_lead,
    matthews,
    separating_threshold,
)

SCORES = st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.5, 0.5, 3.0]) | st.floats(-1e30, 1e30), max_size=30).map(np.array)


def test_auc_by_hand():
    # Of the 6 pairs, (3, 1) (3, 2) (2, 1) are won, (2, 2) ties, (0, 1) (0, 2) are lost: 3.5 / 6.
    assert auc(np.array([3.0, 2.0, 0.0]), np.array([1.0, 2.0])) == pytest.approx(3.5 / 6)
    assert auc(np.array([1.0]), np.array([0.0])) == 1.0
    assert auc(np.array([0.0]), np.array([1.0])) == 0.0
    assert auc(np.zeros(5), np.zeros(7)) == 0.5
    for pos, neg in (([1.0, math.nan], [0.0]), ([1.0], [0.0, math.nan])):
        with pytest.raises(ValueError, match="NaN"):
            auc(np.array(pos), np.array(neg))


@given(pos=SCORES, neg=SCORES)
def test_auc_is_the_share_of_pairs_won(pos, neg):
    if not pos.size or not neg.size:
        assert math.isnan(auc(pos, neg))
        return
    won = sum((p > n) + 0.5 * (p == n) for p in pos for n in neg)
    assert auc(pos, neg) == pytest.approx(won / (len(pos) * len(neg)), abs=1e-12)
    assert auc(pos, neg) + auc(neg, pos) == pytest.approx(1.0, abs=1e-12)


def test_the_threshold_by_hand():
    scores = np.array([0.1, 0.9, 0.5, 0.7, 0.3])
    assert acceptance_threshold(scores, 0.6) == 0.5
    assert acceptance_threshold(scores, 0.61) == 0.3
    assert acceptance_threshold(scores, 1.0) == 0.1
    assert acceptance_threshold(scores, 0.01) == 0.9
    # 0.07 x 100 rounds to 7.000000000000001: still seven solutions, not eight.
    assert acceptance_threshold(np.arange(100.0), 0.07) == 93.0
    assert math.isnan(acceptance_threshold(np.array([]), 0.9))
    for share in (0.0, 1.01):
        with pytest.raises(ValueError, match="share must be"):
            acceptance_threshold(scores, share)


@given(scores=SCORES.filter(len), share=st.floats(0.01, 1.0))
def test_at_least_the_share_is_accepted_and_no_higher_threshold_would_do(scores, share):
    threshold = acceptance_threshold(scores, share)
    assert threshold in scores
    assert np.mean(scores >= threshold) >= share - 1e-9
    higher = scores[scores > threshold]
    if higher.size:
        assert np.mean(scores >= higher.min()) < share


def test_the_threshold_that_separates_by_hand():
    right, wrong = np.array([0.0, 2.0, 3.0, 4.0]), np.array([-1.0, 0.5, 1.0, 3.5])
    assert separating_threshold(right, wrong) == 2.0  # 3 of 4 reach it, and 1 of 4 wrong ones
    assert separating_threshold(right, np.array([])) == 0.0
    assert math.isnan(separating_threshold(np.array([]), wrong))


@given(right=SCORES.filter(len), wrong=SCORES.filter(len))
def test_no_score_separates_better_than_the_threshold(right, wrong):
    def gain(level):
        return np.mean(right >= level) - np.mean(wrong >= level)

    threshold = separating_threshold(right, wrong)
    assert threshold in right
    assert gain(threshold) >= max(gain(level) for level in np.concatenate([right, wrong])) - 1e-12


def test_the_matthews_correlation_by_hand_and_as_a_correlation():
    accepted_N = np.array([True] * 6 + [False] * 4)
    correct_N = np.array(
        [True] * 4 + [False] * 2 + [True] + [False] * 3
    )  # 4 hits, 2 false alarms, 1 miss, 3 rejections
    assert matthews(accepted_N, correct_N) == pytest.approx((4 * 3 - 2 * 1) / np.sqrt(6 * 5 * 5 * 4))
    assert matthews(correct_N, ~correct_N) == pytest.approx(-1.0)
    assert np.isnan(matthews(np.ones(3, bool), np.array([True, False, True])))
    assert np.isnan(matthews(np.zeros(0, bool), np.zeros(0, bool)))
    random_2N = np.random.default_rng(0).random((2, 50)) < 0.3
    assert matthews(*random_2N) == pytest.approx(np.corrcoef(random_2N)[0, 1])


def test_a_threshold_comes_from_the_other_half_of_the_problems():
    problems_N = np.array([7, 7, 9, 9])
    correct_N = np.array([True, False, True, False])
    scores_N = np.array([3.0, 2.0, 1.0, 0.0])  # ranked well within both problems, on another level in each
    accepted = accepted_by_halves(scores_N, correct_N, problems_N)
    assert accepted is not None
    assert accepted.tolist() == [True, True, False, False]
    assert balanced_accuracy(accepted, correct_N) == 0.5
    assert accepted_by_halves(scores_N, np.array([True, True, True, False]), problems_N) is None


def test_the_lead_of_a_classifier_by_hand_and_its_interval_by_problem():
    # Of two correct and two wrong solutions, the first classifier mistakes a correct one, the second one of each kind.
    correct_N, problems_N = np.array([True, True, False, False]), np.array([0, 1, 0, 1])
    first_N, second_N = np.array([True, False, False, False]), np.array([True, False, True, False])
    assert balanced_accuracy(first_N, correct_N) == 0.75
    lead, low, high = balanced_lead(first_N, second_N, correct_N, problems_N)
    # The difference is 1 for the wrong solution of problem 0 and 0 for that of problem 1: errors of 1/8 and -1/8.
    assert lead == 0.25
    assert (high - lead, lead - low) == pytest.approx((1.96 * math.sqrt(2 * 2 / 64),) * 2)
    # Solutions of one problem are not independent: as many solutions of fewer problems give a wider interval.
    rng = np.random.default_rng(0)
    correct_N = np.tile([True, False], 200)
    first_N, second_N = (np.repeat(rng.random(100) < 0.6, 4) == correct_N for _ in range(2))
    by_problem, alone = (balanced_lead(first_N, second_N, correct_N, n) for n in (np.arange(400) // 4, np.arange(400)))
    assert by_problem[2] - by_problem[1] > 1.5 * (alone[2] - alone[1])
