"""The numbers of the tables against counts made by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from made_groups import made_group

from pvg.game.round_evaluation import example_rows
from pvg.game.statistics import (
    RolloutColumns,
    fooled_rate_at,
    play_metrics,
    sample_metrics,
    sampling_metrics,
    verifier_auc,
)
from pvg.game.verifier_phase import calibration
from pvg.records import Checks, Grade, Role
from pvg.rollout.engine import EngineStats
from pvg.store.shards import columns_in_memory
from pvg.verifier.calibration import auc

ROLLOUT = replace(made_group("p", [[0]], tokens=2).rollouts[0], text="t")


def rollout(role, correct, well_formed=True, finish="stop"):
    return replace(ROLLOUT, role=role, grade=Grade(correct=correct, well_formed=well_formed), finish_reason=finish)


H, S = Role.HELPFUL, Role.SNEAKY
SAMPLE = [
    (rollout(H, True), 2.0),
    (rollout(H, True), -1.0),
    (rollout(H, False), -3.0),
    (rollout(S, True), 1.0),
    (rollout(S, False), 0.5),
    (rollout(S, False), -0.5),
    (rollout(S, False, well_formed=False, finish="length"), -9.0),
]


def columns(sample=SAMPLE):
    return RolloutColumns([r for r, _ in sample], np.array([score for _, score in sample], dtype=np.float32))


def test_play_metrics_by_hand():
    found = play_metrics(columns(), threshold=0.0)
    assert found["helpful_accuracy"] == pytest.approx(2 / 3)
    assert found["sneaky_error_rate"] == pytest.approx(2 / 4)  # the malformed one is no flaw
    assert found["fooled_rate"] == pytest.approx(1 / 2)  # 0.5 is accepted, -0.5 is not
    assert found["accepted_helpful"] == pytest.approx(1 / 2)
    assert found["score_helpful_correct"] == pytest.approx(0.5)
    assert found["score_sneaky_incorrect"] == pytest.approx(0.0)
    assert found["score_gap"] == pytest.approx(0.5)
    assert found["malformed"] == pytest.approx(1 / 7)
    assert found["truncated"] == pytest.approx(1 / 7)


def test_the_flaws_of_half_of_the_problems_are_judged_by_the_solutions_of_the_other_half():
    def of(problem, role, score):
        return replace(rollout(role, role is H), problem_id=problem), score

    solutions = [of("p", H, 1.0), of("p", H, 2.0), of("q", H, 5.0), of("q", H, 6.0)]
    flaws = [of("p", S, 5.9), of("p", S, 6.0), of("q", S, 1.9), of("q", S, 2.0), of("q", S, 0.0)]
    # Half of the solutions of q reach 6.0, and half of those of p reach 2.0.
    assert fooled_rate_at(columns(solutions + flaws), 0.5) == pytest.approx(2 / 5)
    assert fooled_rate_at(columns(solutions + flaws), 1.0) == pytest.approx(4 / 5)
    assert math.isnan(fooled_rate_at(columns(solutions[:2] + flaws), 0.5))  # no solution of q
    assert math.isnan(fooled_rate_at(columns(solutions), 0.5))  # no flaw


def test_correct_sneaky_solutions_do_not_lower_the_threshold():
    correct_N = np.array([True] * 10 + [True] * 5 + [False] * 3)
    helpful_N = np.array([True] * 10 + [False] * 5 + [True, False, False])
    scores_N = np.array([*range(10), *[-50.0] * 5, 8.5, -60.0, -60.0], dtype=np.float32)
    found = calibration(correct_N, helpful_N, scores_N)
    assert found["threshold"] == 0.0  # all 10 correct helpful solutions reach it, and 1 of the 3 wrong ones
    assert found["verifier_auc"] == auc(scores_N[correct_N], scores_N[~correct_N])  # of both roles
    without = calibration(correct_N, np.zeros(18, dtype=bool), scores_N)
    assert without["threshold"] == -50.0  # the lowest of 15 correct solutions, since none is helpful


def test_repeated_rollouts_have_the_prompt_and_the_tokens_of_an_earlier_one():
    longer = replace(ROLLOUT, completion_ids=np.array([2, 3, 4], dtype=np.int32))
    other_prompt = replace(ROLLOUT, prompt_ids=np.array([5], dtype=np.int32))
    found = sampling_metrics([ROLLOUT, longer, ROLLOUT, other_prompt, ROLLOUT], EngineStats(), 1.0)
    assert found["repeated"] == pytest.approx(2 / 5)


def test_the_table_of_examples_has_flaws_by_score_then_the_least_believed_correct_ones():
    rows = example_rows([each for each, _ in SAMPLE], columns())
    assert [(row["role"], row["correct"], row["score"]) for row in rows] == [
        ("sneaky", False, 0.5),
        ("sneaky", False, -0.5),
        ("helpful", True, -1.0),
        ("helpful", True, 2.0),
    ]
    assert {row["solution"] for row in rows} == {"t"}


def test_auc_counts_malformed_solutions_as_incorrect():
    # correct: 2, -1, 1; incorrect: -3, 0.5, -0.5, -9. Pairs won: 2 beats 4, -1 beats 2, 1 beats 4: 10 of 12.
    assert verifier_auc(columns()) == pytest.approx(10 / 12)


def test_what_there_is_nothing_of_is_nan_and_not_zero():
    found = play_metrics(columns(SAMPLE[:3]), threshold=0.0)
    assert math.isnan(found["fooled_rate"])
    assert math.isnan(found["sneaky_error_rate"])
    assert math.isnan(found["score_gap"])
    assert math.isnan(sample_metrics(columns_in_memory([r for r, _ in SAMPLE[:3]]), 1.0)["sneaky_error_rate"])
    assert sample_metrics(columns_in_memory([r for r, _ in SAMPLE]), 2.0)["tokens_per_s"] == pytest.approx(7 * 2 / 2.0)


def test_what_execution_has_shown_by_hand():
    grades = [
        (H, Grade(True, True, checks=Checks(1.0, 1.0, False))),
        (H, Grade(False, True, checks=Checks(1.0, 0.5, False))),
        (S, Grade(False, True, checks=Checks(1.0, 0.75, True))),
        (S, Grade(False, True, checks=Checks(1.0, 0.75, False))),  # wrong by accident: no flaw
        (S, Grade(False, True, checks=Checks(0.5, 0.25, False))),
        (S, Grade(True, True, checks=Checks(1.0, 1.0, False))),
    ]
    rollouts = [replace(ROLLOUT, role=role, grade=grade) for role, grade in grades]
    assert [r.proven for r in rollouts] == [True, True, True, False, False, True]
    assert [r.is_flaw for r in rollouts] == [False, False, True, False, False, False]
    sample = RolloutColumns(rollouts, np.arange(6, dtype=np.float32))
    np.testing.assert_allclose(sample.tests_N, [1.0, 0.5, 1.0, 0.5, 0.25, 0.5])
    for found in (play_metrics(sample, threshold=1.5), sample_metrics(columns_in_memory(rollouts), 1.0)):
        assert found["tests_passed"] == pytest.approx(0.75)
        assert found["sneaky_visible_rate"] == pytest.approx(3 / 4)
        assert found["certified_rate"] == found["sneaky_error_rate"] == pytest.approx(1 / 4)
        assert found["malformed"] == 0.0
    assert play_metrics(sample, threshold=1.5)["fooled_rate"] == 1.0  # of the one flaw, which scored 2
    assert columns().tests_N is None
    assert "tests_passed" not in play_metrics(columns(), threshold=0.0)
