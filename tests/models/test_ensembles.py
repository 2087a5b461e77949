"""Verifiers that score as one: what is made of their scores, and what they share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_ensembles import inputs, member

from pvg.config.base import kinds_of
from pvg.config.training import EnsembleOfVerifiers
from pvg.models.heads import AGGREGATIONS, ScoreScales, VerifierEnsemble
from pvg.models.language_model import ModelClosedError

SCORES = torch.tensor([[1.0, -2.0, 0.5], [4.0, 0.0, 0.5], [-2.0, -1.0, 3.5], [3.0, 7.0, 0.5]], dtype=torch.float64)


def test_aggregations_by_hand() -> None:
    assert AGGREGATIONS["mean"](SCORES).tolist() == [1.5, 1.0, 1.25]
    assert AGGREGATIONS["min"](SCORES).tolist() == [-2.0, -2.0, 0.5]
    assert AGGREGATIONS["median"](SCORES).tolist() == [2.0, -0.5, 0.5]
    assert AGGREGATIONS["median"](SCORES[:3]).tolist() == [1.0, -1.0, 0.5]
    assert AGGREGATIONS.keys() == set(kinds_of(EnsembleOfVerifiers))


def test_an_ensemble_aggregates_its_members_on_the_common_scale() -> None:
    members, rows = [member("scalar", seed) for seed in (1, 2, 3)], inputs(7)
    scales = ScoreScales(np.array([1.0, 2.0, 0.5]), np.array([0.0, -1.0, 3.0]))
    with torch.no_grad():
        own_KB = torch.stack([one(*rows) for one in members]).double().numpy()
    mapped_KB = np.stack([own_KB[0], 2.0 * own_KB[1] - 1.0, 0.5 * own_KB[2] + 3.0])
    for name, expected_B in (
        ("mean", mapped_KB.mean(0)),
        ("median", np.median(mapped_KB, 0)),
        ("min", mapped_KB.min(0)),
    ):
        found_B = VerifierEnsemble(members, name, scales)(*rows)
        assert found_B.dtype == torch.float32
        assert not found_B.requires_grad
        np.testing.assert_allclose(found_B.numpy(), expected_B, rtol=1e-6)


def test_a_version_is_of_the_members_the_scales_and_the_aggregation() -> None:
    members = [member("scalar", seed) for seed in (1, 2)]
    moved = ScoreScales(np.array([1.0, 1.0]), np.array([0.0, 0.5]))
    versions = [
        VerifierEnsemble(members, "min", ScoreScales.none(2)).version(),
        VerifierEnsemble(members, "mean", ScoreScales.none(2)).version(),
        VerifierEnsemble(members[::-1], "min", ScoreScales.none(2)).version(),
        VerifierEnsemble(members, "min", moved).version(),
        VerifierEnsemble(members[:1], "min", ScoreScales.none(1)).version(),
        members[0].version(),
    ]
    assert len(set(versions)) == len(versions)
    again = [member("scalar", seed) for seed in (1, 2)]
    assert VerifierEnsemble(again, "min", ScoreScales.none(2)).version() == versions[0]


def test_members_share_the_frozen_start_of_the_implicit_head() -> None:
    first = member("implicit", 1)
    second = member("implicit", 2, like=first)
    starts = [list(one.start.parameters()) for one in (first, second)]
    assert all(a is b for a, b in zip(*starts, strict=True))
    rows = inputs(5)
    with torch.no_grad():
        assert torch.equal(second(*rows), member("implicit", 2)(*rows))
    first.close()
    with torch.no_grad():
        second(*rows)  # which is another owner of it
    with pytest.raises(ModelClosedError):
        _ = first.start
