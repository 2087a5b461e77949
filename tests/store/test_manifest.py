"""Manifests: one file per finished phase."""

from __future__ import annotations

import math
from pathlib import Path

import orjson
from store_samples import rollout

from pvg.config.experiment import Experiment
from pvg.game.ledger import Manifest, write_manifest
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards


def read(path: Path) -> Manifest:
    return Manifest(**orjson.loads(path.read_bytes()))


def test_each_phase_has_a_manifest_with_all_that_was_given(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first", Experiment())
    info = RolloutShards(run.path).write(0, "mint-00000", [rollout(0)])
    for round_, phase in ((0, "mint"), (0, "train_verifier"), (1, "mint"), (0, "train_prover")):
        path = write_manifest(
            *(run, round_, phase, {"seed": 1}, {"shards": [info.plain()]}, "abc", "0.1.0"),
            {"loss": 0.5, "kl": math.nan},
            {"rss_bytes": 5e8},
        )
        assert path == run.manifest / f"round-{round_:03d}-{phase}.json"
    found = sorted((read(path) for path in run.manifest.iterdir()), key=lambda manifest: manifest.finished)
    assert [(m.round, m.phase) for m in found] == [
        (0, "mint"),
        (0, "train_verifier"),
        (1, "mint"),
        (0, "train_prover"),
    ]
    assert found[0].outputs == {"shards": [info.plain()]}
    assert (found[0].inputs, found[0].config_hash, found[0].code_version) == ({"seed": 1}, "abc", "0.1.0")
    assert found[0].peak_memory == {"rss_bytes": 5e8}
    assert found[0].metrics == {"loss": 0.5, "kl": None}


def test_a_phase_finished_again_has_one_manifest(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first", Experiment())
    for loss in (1.0, 2.0):
        write_manifest(run, 0, "mint", {}, {}, "abc", "0.1.0", {"loss": loss}, {})
    assert [read(path).metrics for path in run.manifest.iterdir()] == [{"loss": 2.0}]
