"""Manifests: one per finished phase, read back in order."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from store_samples import rollout

from pvg.config.experiment import Experiment
from pvg.store import DamagedFileError, RolloutShards, RunDirectory, read_manifests, write_manifest


def test_manifests_come_back_by_round_and_phase_order(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first", Experiment())
    info = RolloutShards(run.path).write(0, "mint-00000", [rollout(0)])
    for round_, phase in ((0, "mint"), (0, "train_verifier"), (1, "mint"), (0, "train_prover")):
        path = write_manifest(
            *(run, round_, phase, {"seed": 1}, {"shards": [info.plain()]}, "abc", "0.1.0"),
            {"loss": 0.5, "kl": math.nan},
            {"rss_bytes": 5e8},
        )
        assert path == run.manifest / f"round-{round_:03d}-{phase}.json"
    found = read_manifests(run)
    assert [(m.round, m.phase) for m in found] == [
        (0, "mint"),
        (0, "train_verifier"),
        (0, "train_prover"),
        (1, "mint"),
    ]
    assert found[0].outputs == {"shards": [info.plain()]}
    assert (found[0].inputs, found[0].config_hash, found[0].code_version) == ({"seed": 1}, "abc", "0.1.0")
    assert found[0].peak_memory == {"rss_bytes": 5e8}
    assert found[0].metrics == {"loss": 0.5, "kl": None}


def test_a_phase_finished_again_has_one_manifest(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first", Experiment())
    for loss in (1.0, 2.0):
        write_manifest(run, 0, "mint", {}, {}, "abc", "0.1.0", {"loss": loss}, {})
    assert [m.metrics for m in read_manifests(run)] == [{"loss": 2.0}]


@pytest.mark.parametrize("content", [b"{", b'{"round": 1}', b"[]"])
def test_a_damaged_manifest_is_named(tmp_path: Path, content: bytes) -> None:
    run = RunDirectory.create(tmp_path, "first", Experiment())
    (run.manifest / "round-000-mint.json").write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"round-000-mint\.json"):
        read_manifests(run)
