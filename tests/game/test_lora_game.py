"""Rounds whose prover is trained through low-rank adapters: what is saved, published, resumed and refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kill_drill import differences, fingerprint, small_experiment
from small_games import completed, first_kl, played, state_of

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.game.players import Players
from pvg.models import open_model
from pvg.models.language_model import LowRankAdapter
from pvg.store.checkpoints import read_checkpoint
from pvg.store.run_directory import RunDirectory

pytestmark = pytest.mark.slow

RANK = 4


def lora_experiment(rank: int = RANK, **training: Any) -> Experiment:
    plain = small_experiment().plain()
    adapters = {"rank": rank, "alpha": 8.0}
    plain["training"] |= {"adapters": adapters, "learning_rate": 5e-3, **training}
    return build_experiment(plain)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two rounds."""
    root = tmp_path_factory.mktemp("whole")
    completed(lora_experiment(), root)
    return root


def test_a_round_saves_the_merged_weights_and_the_adapter_that_makes_them(whole: Path) -> None:
    run = RunDirectory.open("drill", whole)
    state = state_of(run)
    kinds = ("prover", "prover-adapter", "verifier")
    assert sorted(state["weights"]) == sorted(f"round-00{r}-{kind}" for r in (0, 1) for kind in kinds)
    merged, _ = read_checkpoint(run.weights, "round-000-prover")
    adapter, meta = read_checkpoint(run.weights, "round-000-prover-adapter")
    with open_model(small_experiment().models.prover, torch.device("cpu")) as base:
        start = base.weights()
        assert merged.keys() == start.keys()
        changed = {name for name, tensor in merged.items() if not torch.equal(tensor, start[name])}
        assert changed == {name for name in merged if name.endswith("_proj.weight")}
        for name in changed:
            stem = "base_model.model." + name.removesuffix(".weight")
            product = adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"]
            assert torch.allclose(merged[name], start[name] + 8.0 / RANK * product, atol=1e-6)
    assert (meta["round"], meta["steps"], meta["config"]["r"]) == (0, 7, RANK)


def test_the_rounds_have_adapters_of_their_own(whole: Path) -> None:
    weights = RunDirectory.open("drill", whole).weights
    first, second = (read_checkpoint(weights, f"round-00{r}-prover-adapter")[0] for r in (0, 1))
    assert not any(torch.equal(first[name], second[name]) for name in first)


def test_the_adapters_of_a_round_go_on_from_the_previous_ones(whole: Path, tmp_path: Path) -> None:
    plain = lora_experiment(steps=4).plain()
    plain["game"]["start"] = "previous"
    experiment = build_experiment(plain)
    previous = completed(experiment, tmp_path / "previous")
    outcome, _ = played(experiment, tmp_path / "stopped", stop_at=("train_prover", 5 + 3))  # beginnings are events too
    assert outcome.status == "interrupted"
    played(experiment, tmp_path / "stopped", resume=True)
    assert differences(fingerprint(tmp_path / "stopped"), fingerprint(tmp_path / "previous")) == []
    assert first_kl(RunDirectory.open("drill", whole)) == pytest.approx([0.0, 0.0], abs=1e-6)
    assert first_kl(previous)[0] == pytest.approx(0.0, abs=1e-6)
    assert first_kl(previous)[1] > 1e-5


def test_stopped_in_the_prover_phase_it_ends_like_the_uninterrupted_run(whole: Path, tmp_path: Path) -> None:
    outcome, run = played(lora_experiment(), tmp_path, stop_at=("train_prover", 5))
    assert outcome.status == "interrupted"
    state = state_of(run)
    tensors, _ = read_checkpoint(run.checkpoints, state["checkpoint"])
    assert {name for name in tensors if name.startswith("model.") and ".lora_" not in name} == set()
    assert sum(name.startswith("model.") for name in tensors) > 0
    played(lora_experiment(), tmp_path, resume=True)
    assert differences(fingerprint(tmp_path), fingerprint(whole)) == []


def test_every_version_of_a_trained_prover_is_published_with_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, LowRankAdapter | None]] = []
    publish = Players.publish

    async def noting(players: Players, tensors: Any, version: int, adapter: LowRankAdapter | None = None) -> Any:
        base = players.base.weights()
        seen.append((all(torch.equal(tensor, base[name]) for name, tensor in tensors.items()), adapter))
        return await publish(players, tensors, version, adapter)

    monkeypatch.setattr(Players, "publish", noting)
    played(lora_experiment(steps=2), tmp_path)
    own = {"base": [], "learner": []}  # type: ignore[var-annotated]
    for is_base, adapter in seen:
        own["learner" if adapter else "base"].append((is_base, adapter))
    # The base is sampled in both mints and evaluated in round 0, always without an adapter.
    assert [is_base for is_base, _ in own["base"]] == [True] * 3
    # Per round: the start (which is the base still), two steps, the evaluation; and in round 1 its mint.
    assert [is_base for is_base, _ in own["learner"]] == [True, False, False, False, False, True, False, False, False]
    minted, evaluated = own["learner"][4][1], own["learner"][3][1]
    assert minted.config == evaluated.config
    assert all(torch.equal(tensor, evaluated.tensors[name]) for name, tensor in minted.tensors.items())


def test_what_adapters_cannot_do_is_refused_before_anything_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=r"adapters\.rank = 1000 is larger than"):
        played(lora_experiment(rank=1000), tmp_path / "rank")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingRequirementError, match=r"training\.adapters"):
        played(lora_experiment(), tmp_path / "peft")
    for root in ("rank", "peft"):
        assert not (tmp_path / root / "drill" / "state.json").exists()
