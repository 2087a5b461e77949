"""Rounds whose verifier is an ensemble: what is trained, saved, opened again, told, resumed and refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kill_drill import differences, fingerprint, read_manifests, small_experiment
from small_games import played, recorded, state_of

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.errors import ConfigurationError
from pvg.game.players import Players
from pvg.game.verifier_phase import read_verifier
from pvg.models.heads import VerifierEnsemble
from pvg.records import Role
from pvg.store.checkpoints import read_checkpoint
from pvg.store.pairs import is_held_out
from pvg.store.run_directory import RunDirectory
from pvg.store.state import JsonLinesReader
from pvg.tasks import open_task
from pvg.telemetry.catalogue import metric as catalogued
from pvg.verifier.calibration import auc

pytestmark = pytest.mark.slow

MEMBERS = [f"round-000-verifier-member-{number}" for number in range(3)]


def ensemble_experiment(prover_steps: int = 2, **verifier: Any) -> Experiment:
    plain = small_experiment().plain()
    plain["game"] |= {"rounds": 1, "mint_problems": 40}
    plain["training"] |= {"steps": prover_steps}
    plain["game"]["test"] |= {"problems": 4}
    plain["verifier"] |= {"ensemble": {"kind": "min", "size": 3}, "steps": 5, "held_out": 0.3, **verifier}
    plain["store"] = {**plain["store"], "commit_every": 2}
    return build_experiment(plain)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    outcome, run = played(ensemble_experiment(), tmp_path_factory.mktemp("whole"))
    assert outcome.status == "complete"
    return run


def test_an_ensemble_saves_its_members_and_what_makes_them_one(whole: RunDirectory) -> None:
    assert state_of(whole)["weights"] == [*MEMBERS, "round-000-verifier", "round-000-prover"]
    tensors, meta = read_checkpoint(whole.weights, "round-000-verifier")
    assert (meta["members"], meta["aggregation"]) == (MEMBERS, "min")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {"slopes_K": (3,), "offsets_K": (3,)}
    members = [read_checkpoint(whole.weights, name)[0] for name in MEMBERS]
    for name in members[0]:
        assert not torch.equal(members[0][name], members[1][name])
        assert not torch.equal(members[1][name], members[2][name])
    (manifest,) = [m for m in read_manifests(whole) if m.phase == "train_verifier"]
    assert (manifest.inputs["weights"], manifest.outputs["weights"]) == ([], [*MEMBERS, "round-000-verifier"])


def test_member_0_is_the_verifier_of_a_run_without_an_ensemble(whole: RunDirectory, tmp_path: Path) -> None:
    _, single = played(ensemble_experiment(0, ensemble="none"), tmp_path)
    assert state_of(single)["weights"] == ["round-000-verifier", "round-000-prover"]
    expected, meta = read_checkpoint(single.weights, "round-000-verifier")
    assert meta.keys() == {"round", "version", "threshold"}
    found, _ = read_checkpoint(whole.weights, MEMBERS[0])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_steps_and_calibration_are_told(whole: RunDirectory) -> None:
    rows = list(JsonLinesReader(whole.metrics))
    steps = [row for row in rows if row["kind"] == "step" and row["phase"] == "train_verifier"]
    assert [row["step"] for row in steps] == list(range(1, 16))
    assert {row["of"] for row in steps} == {15}
    assert [row["metrics"]["member"] for row in steps] == [0.0] * 5 + [1.0] * 5 + [2.0] * 5
    (phase,) = [row for row in rows if row["kind"] == "phase" and row["phase"] == "train_verifier"]
    metrics = phase["metrics"]
    assert metrics["disagreement"] > 0.0
    assert metrics["member_auc_worst"] <= metrics["member_auc_best"]
    assert [
        name for name in (f"train_verifier/{name}" for name in [*metrics, *steps[0]["metrics"]]) if not catalogued(name)
    ] == []


def test_whoever_opens_the_round_gets_the_whole_ensemble(whole: RunDirectory) -> None:
    """Version, threshold and AUC are those of the aggregated scores that it gives."""
    experiment = ensemble_experiment()
    _, meta = read_checkpoint(whole.weights, "round-000-verifier")

    async def judged() -> tuple[str, float, np.ndarray, np.ndarray]:
        players = Players(experiment, open_task(experiment.task))
        try:
            read = lambda name: read_checkpoint(whole.weights, name)  # noqa: E731
            verifier, threshold = await players.compute(
                lambda: read_verifier(players.open_verifier, read, "round-000-verifier")
            )
            assert isinstance(verifier, VerifierEnsemble)
            scores_N = await players.scorer(verifier).score(held_out)
            version = verifier.version()
            verifier.close()
            return version, threshold, scores_N, np.array([r.grade.correct for r in held_out])
        finally:
            await players.close()

    everything = recorded(whole)
    held_out = [r for r in everything if "mint" in r.id and is_held_out(r.problem_id, 0.3)]
    version, threshold, scores_N, correct_N = asyncio.run(judged())
    assert (version, threshold) == (meta["version"], meta["threshold"])
    helpful_N = np.array([r.role is Role.HELPFUL for r in held_out])
    solutions = scores_N[correct_N & helpful_N]
    assert 0 < len(solutions) < correct_N.sum()
    gains = {
        level: (solutions >= level).mean() - (scores_N[~correct_N] >= level).mean() for level in solutions.tolist()
    }
    assert gains[threshold] == max(gains.values())
    (phase,) = [
        row for row in JsonLinesReader(whole.metrics) if row["kind"] == "phase" and row["phase"] == "train_verifier"
    ]
    assert phase["metrics"]["verifier_auc"] == auc(scores_N[correct_N], scores_N[~correct_N])
    played_with = [r.verifier_version for r in everything if "mint" not in r.id]
    assert set(played_with) == {version}


def test_an_ensemble_of_scalar_heads_plays_to_the_end(tmp_path: Path) -> None:
    outcome, run = played(ensemble_experiment(1, steps=1, ensemble="mean", head="scalar"), tmp_path)
    assert outcome.status == "complete"
    assert len(state_of(run)["weights"]) == 5


def test_stopped_within_members_it_ends_like_the_uninterrupted_run(whole: RunDirectory, tmp_path: Path) -> None:
    # After 8 steps, which is 3 into member 1, and after 6 more, in member 2. The beginning of a phase is an event too.
    for number, steps in enumerate((8, 6)):
        played(ensemble_experiment(), tmp_path, stop_at=("train_verifier", 1 + steps), resume=number > 0)
        state = state_of(RunDirectory.open("drill", tmp_path))
        assert (state["step"], state["progress"]["weights"]) == (8 + 6 * number, MEMBERS[: 1 + number])
    played(ensemble_experiment(), tmp_path, resume=True)
    assert differences(fingerprint(tmp_path), fingerprint(whole.path.parent)) == []
    stopped, undisturbed = (
        [m.outputs["weights"] for m in read_manifests(run) if m.phase == "train_verifier"]
        for run in (RunDirectory.open("drill", tmp_path), whole)
    )
    assert stopped == undisturbed


def test_what_no_ensemble_can_do_is_refused() -> None:
    plain = small_experiment().plain()

    def settings(**verifier: Any) -> dict[str, Any]:
        return {**plain, "verifier": {**plain["verifier"], **verifier}}

    serving = {"serving": {"verifier_servers": ["http://127.0.0.1:1"]}}
    with pytest.raises(ConfigurationError, match=r"verifier\.ensemble cannot be served"):
        build_experiment({**settings(ensemble="mean", engine="vllm"), **serving})
    with pytest.raises(ConfigurationError, match="the median of two scores is their mean"):
        build_experiment(settings(ensemble={"kind": "median", "size": 2}))
    numbers = build_experiment(settings(ensemble="mean")).arithmetic()
    assert numbers.verifier_pairs_per_round == 3 * 7 * 4
    assert numbers.optimizer_steps == 2 * (3 * 7 + 7)
