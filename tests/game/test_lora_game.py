"""Rounds whose prover is trained through low-rank adapters: what is saved, published, resumed and refused."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kill_drill import differences, fingerprint, small_experiment

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.game.players import Players
from pvg.game.run import GameOutcome, play
from pvg.models import open_model
from pvg.models.language_model import LowRankAdapter
from pvg.store.checkpoints import read_checkpoint
from pvg.store.run_directory import RunDirectory
from pvg.store.state import FileStateStore, read_json_lines
from pvg.telemetry.events import PhaseInfo, Progress, SilentObserver

RANK = 4


def lora_experiment(rank: int = RANK, **training: Any) -> Experiment:
    plain = small_experiment().plain()
    adapters = {"rank": rank, "alpha": 8.0}
    plain["training"] |= {"adapters": adapters, "learning_rate": 5e-3, **training}
    return build_experiment(plain)


class StopAfter(SilentObserver):
    """Sets `stop` at prover step number `step`, counted over the rounds."""

    def __init__(self, stop: asyncio.Event, step: int) -> None:
        self._stop, self._left, self._phase = stop, step, ""

    def phase_started(self, info: PhaseInfo) -> None:
        self._phase = info.phase

    def progressed(self, progress: Progress) -> None:
        self._left -= self._phase == "train_prover"
        if self._left == 0 and self._phase == "train_prover":
            self._stop.set()


def played(experiment: Experiment, root: Path, *, stop_after: int = 0, resume: bool = False) -> GameOutcome:
    async def work() -> GameOutcome:
        stop = asyncio.Event()
        return await play(experiment, run, observer=StopAfter(stop, stop_after), stop=stop, resume=resume)

    run = RunDirectory.open("drill", root) if resume else RunDirectory.create(root, "drill", experiment)
    with run.lock():
        return asyncio.run(work())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two rounds."""
    root = tmp_path_factory.mktemp("whole")
    assert played(lora_experiment(), root).status == "complete"
    return root


def test_a_round_saves_the_merged_weights_and_the_adapter_that_makes_them(whole: Path) -> None:
    run = RunDirectory.open("drill", whole)
    state = FileStateStore(run.state).load().state
    assert state is not None
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
    assert played(experiment, tmp_path / "previous").status == "complete"
    assert played(experiment, tmp_path / "stopped", stop_after=4 + 2).status == "interrupted"
    assert played(experiment, tmp_path / "stopped", resume=True).status == "complete"
    assert differences(fingerprint(tmp_path / "stopped"), fingerprint(tmp_path / "previous")) == []
    firsts = {root: first_kl(root / "drill" / "metrics.jsonl") for root in (whole, tmp_path / "previous")}
    assert firsts[whole] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert firsts[tmp_path / "previous"][0] == pytest.approx(0.0, abs=1e-6)
    assert firsts[tmp_path / "previous"][1] > 1e-5


def first_kl(metrics: Path) -> list[float]:
    """The KL to the base prover at the first prover step of each round."""
    steps = [row for row in read_json_lines(metrics) if row["kind"] == "step" and row["phase"] == "train_prover"]
    return [row["metrics"]["kl"] for row in steps if row["step"] == 1]


def test_stopped_in_the_prover_phase_it_ends_like_the_uninterrupted_run(whole: Path, tmp_path: Path) -> None:
    assert played(lora_experiment(), tmp_path, stop_after=4).status == "interrupted"
    run = RunDirectory.open("drill", tmp_path)
    state = FileStateStore(run.state).load().state
    assert state is not None
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


def test_adapters_learn_under_checkpointed_layers(tmp_path: Path) -> None:
    plain = lora_experiment(gradient_checkpointing=True, steps=2).plain()
    plain["game"]["rounds"] = 1
    assert played(build_experiment(plain), tmp_path).status == "complete"


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
