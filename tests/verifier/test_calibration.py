"""What held-out solutions say of an ensemble: scales by hand, and what they must not change."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_verifiers import random_texts, rollout, verifier

from pvg.errors import TrainingDivergedError
from pvg.models.heads import AGGREGATIONS, ScoreScales, VerifierEnsemble
from pvg.verifier.calibration import common_scales, disagreement, member_scores
from pvg.verifier.data import VerifierTemplate
from pvg.verifier.scorer import VerifierScorer


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


def test_member_scores_are_those_of_each_member_alone(executor: Executor) -> None:
    members = [verifier("scalar", seed) for seed in (1, 2)]
    template = VerifierTemplate(members[0].tokenizer, "tag", "scalar")
    # Each text is of another solution than the ids, which count where the prover has the verifier's tokenizer.
    texts = random_texts(14, seed=1)
    rollouts = [replace(rollout(of_ids), text=text) for of_ids, text in zip(texts[:7], texts[7:], strict=True)]
    ensemble = VerifierEnsemble(members, "mean", ScoreScales.none(2))
    for prover in (members[0].tokenizer.fingerprint, None):
        how = {"token_budget": 64, "executor": executor, "prover_fingerprint": prover}
        found_KN = asyncio.run(member_scores(ensemble, template, rollouts, **how))
        assert found_KN.dtype == np.float32
        for member, found_N in zip(members, found_KN, strict=True):
            alone = VerifierScorer(member, template, "version", cache_entries=9, **how)
            assert found_N.tolist() == asyncio.run(alone.score(rollouts)).tolist()
    with torch.no_grad():
        members[1].bias.fill_(torch.inf)
    with pytest.raises(TrainingDivergedError, match=f"Member 1 .* {rollouts[0].id} inf"):
        asyncio.run(member_scores(ensemble, template, rollouts, **how))
