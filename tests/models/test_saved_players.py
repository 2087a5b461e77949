"""Players of finished runs as models of other runs: `run:NAME[/round-N][/prover|/verifier]`."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from game.kill_drill import TINY_PROVER, small_experiment

import pvg
from pvg.config.base import Player, RunId, parse_run_id
from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.config.training import Models, ModelSection
from pvg.errors import ConfigurationError, StateError, UsageError
from pvg.export.finished import FinishedRound
from pvg.export.folders import export_player
from pvg.models import open_model
from pvg.models.adapters import with_adapter
from pvg.models.language_model import LowRankAdapter
from pvg.models.sources import open_without_weights
from pvg.planning.memory import read_shape
from pvg.servers.command import make_folder
from pvg.store.checkpoints import read_checkpoint, write_checkpoint
from pvg.store.run_players import adapter_name, find_player, pinned_players, pinned_players_as

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SMALL = {"verifier.steps": 2, "training.steps": 2, "game.rounds": 1, "game.mint_problems": 16, "game.test.problems": 4}
LORA = {"training.adapters.rank": 2, "verifier.adapters.rank": 2, "verifier.head": "scalar"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three finished runs in runs/: `base` trains all weights in two rounds, `lora` adapters in one, and `apart`
    adapters on weights in bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        made = tmp_path_factory.mktemp("players")
        patch.chdir(made)
        Path("small.toml").write_text(small_experiment().to_toml())
        shutil.copytree(TINY_PROVER, made / "llama")
        pvg.play("small.toml", {**SMALL, "game.rounds": 2}, name="base")
        models = {f"models.{player}.source": str(made / "llama") for player in ("prover", "verifier")}
        pvg.play("small.toml", {**SMALL, **LORA, **models}, name="lora")
        small_steps = {"models.dtype": "bfloat16", "training.learning_rate": 1e-5, "verifier.learning_rate": 1e-5}
        pvg.play("small.toml", {**SMALL, **LORA, **models, **small_steps}, name="apart")
        yield made


def test_a_player_has_a_tokenizer_without_its_weights(folder: Path) -> None:
    """As `pvg train --dry-run` opens it."""
    section = ModelSection(source="run:base/round-1/prover")
    found = open_without_weights(section)
    with open_model(section, CPU) as model:
        assert found.tokenizer.fingerprint == model.tokenizer.fingerprint
        assert (found.name, found.max_length) == (model.name, model.max_length)
    with pytest.raises(UsageError, match="no run"):
        open_without_weights(ModelSection(source="run:nowhere"))


def with_models(prover: str, **changes: object) -> Experiment:
    plain = small_experiment().plain()
    plain["models"] |= {"prover": {"source": prover}}
    return build_experiment(plain | changes)


def saved_weights(run: str, name: str) -> dict[str, torch.Tensor]:
    return read_checkpoint(Path("runs") / run / "weights", name)[0]


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("run:mine", RunId("mine")),
        ("run:mine/round-002/verifier", RunId("mine", 2, "verifier")),
        ("run:mine/verifier", RunId("mine", None, "verifier")),
        ("run:mine/warmup", RunId("mine", "warmup")),
        ("run:/a/b c/mine/round-0/prover@0123456789abcdef", RunId("/a/b c/mine", 0, "prover", "0123456789abcdef")),
        ("run:verifier", RunId("verifier")),
    ],
)
def test_a_source_names_a_run_a_round_and_a_player(source: str, wanted: RunId) -> None:
    assert parse_run_id(source) == wanted
    assert parse_run_id(str(wanted)) == wanted


def test_a_source_without_a_player_means_the_one_whose_model_it_is() -> None:
    models = Models(prover=ModelSection(source="run:mine"), verifier=ModelSection(source="run:mine/round-1"))
    assert (models.prover.source, models.verifier.source) == ("run:mine/prover", "run:mine/round-1/verifier")
    warm = Models(verifier=ModelSection(source="run:mine/warmup"))
    assert warm.verifier.source == "run:mine/warmup/prover"
    other = Models(prover=ModelSection(source="run:mine/verifier"))
    assert other.prover.source == "run:mine/verifier"


def test_the_prover_of_a_round_is_the_prover_of_another_run(folder: Path) -> None:
    for source, name in (("run:base", "round-001-prover"), ("run:base/round-0", "round-000-prover")):
        with open_model(ModelSection(source=source), CPU) as model:
            wanted = saved_weights("base", name)
            found = model.weights()
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], wanted[key]) for key in wanted)
            assert model.name == f"base-{name}"
    with open_model(ModelSection(source="run:runs/base"), CPU, "bfloat16") as model:
        assert model.dtype == torch.bfloat16


def test_a_verifier_is_its_language_model_with_merged_adapters(folder: Path) -> None:
    finished = FinishedRound.open(pvg.Run("runs/lora").directory)
    verifier, _ = finished.read_verifier(CPU)
    try:
        with verifier.trained_model() as wanted, open_model(ModelSection(source="run:lora/verifier"), CPU) as found:
            assert found.weights().keys() == wanted.weights().keys()
            assert all(torch.equal(found.weights()[name], tensor) for name, tensor in wanted.weights().items())
            with open_model(finished.experiment.models.verifier, CPU) as start:
                trained = found.weights()
                assert any(not torch.equal(tensor, trained[name]) for name, tensor in start.weights().items())
    finally:
        verifier.close()


def of_adapters(player: str) -> dict[str, torch.Tensor]:
    """The weights of a player of `apart`, its start and its adapters added up in float32."""
    finished = FinishedRound.open(pvg.Run("runs/apart").directory)
    if player == "verifier":
        verifier, _ = finished.read_verifier(CPU)
        adapter, start = verifier._language_model.adapter(), verifier.start_model()
    else:
        tensors, meta = finished.read_weights(adapter_name(finished.prover_name))
        adapter = LowRankAdapter(tensors, meta["config"])
        start = open_model(finished.experiment.models.prover, CPU, "bfloat16")
    return {name: weight.float() for name, weight in with_adapter(start.copy(torch.float32).weights(), adapter).items()}


@pytest.mark.parametrize("player", ["prover", "verifier"])
def test_small_updates_of_adapters_on_bfloat16_weights_reach_who_opens_the_player(
    player: Player, folder: Path, tmp_path: Path
) -> None:
    """Added up in bfloat16, most of them would be lost."""
    wanted, finished = of_adapters(player), FinishedRound.open(pvg.Run("runs/apart").directory)
    facts = export_player(finished, player, tmp_path / "exported", merge=True)
    section = ModelSection(source=f"run:apart/{player}")
    with open_model(section, CPU) as model:
        found = model.weights()
        assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(wanted, torch.float32)
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in wanted.values())
    if player == "prover":
        assert facts["dtype"] == "float32"
        with open_model(ModelSection(source=str(tmp_path / "exported")), CPU) as model:
            assert all(torch.equal(model.weights()[name], tensor) for name, tensor in wanted.items())
    with pytest.raises(ConfigurationError, match="small updates") as caught:
        open_model(section, CPU, "bfloat16")
    assert "models.dtype" in caught.value.remedy


def test_a_run_trains_from_the_players_of_another_run(folder: Path) -> None:
    settings = {**SMALL, "models.prover.source": "run:base/round-0", "models.verifier.source": "run:base"}
    run = pvg.play("small.toml", settings, name="next")
    models = run.experiment.models
    assert models.prover.source == find_player(parse_run_id("run:base/round-0/prover")).source
    assert models.prover.source.startswith(f"run:{folder}/runs/base/round-0/prover@")
    assert models.verifier.source.startswith(f"run:{folder}/runs/base/round-1/verifier@")
    assert read_shape(models.prover.source, print).name == "base-round-000-prover"
    again = pvg.play("small.toml", {**SMALL, **LORA, "models.prover.source": "run:next"}, name="after")
    facts = export_player(FinishedRound.open(again.directory), "prover", folder / "exported", merge=True)
    assert facts["base"].startswith("run:next/round-0/prover@")
    assert str(folder) not in (folder / "exported" / "README.md").read_text()
    with pytest.raises(UsageError, match="Add --merge"):
        export_player(FinishedRound.open(again.directory), "prover", folder / "adapters")
    (folder / "runs/next").rename(folder / "runs/elsewhere")
    assert FinishedRound.open(again.directory).round == 0  # its verifier comes from elsewhere
    with pytest.raises(UsageError, match="no longer"):
        FinishedRound.open(again.directory, player="prover")


def test_a_server_gets_a_folder_with_the_player(folder: Path) -> None:
    made = make_folder("generator", with_models("run:base").models.prover, folder / "served")
    with open_model(ModelSection(source=str(made)), CPU) as served:
        wanted = saved_weights("base", "round-001-prover")
        assert all(torch.equal(served.weights()[name], wanted[name]) for name in wanted)


def pinned(experiment: Experiment) -> Experiment:
    return experiment.with_sources(pinned_players(experiment.sources()))


def test_a_changed_run_is_refused_and_a_moved_one_can_be_named_again(folder: Path) -> None:
    shutil.copytree("runs/base", "runs/copy")
    chosen = with_models("run:copy/round-0")
    fixed = pinned(chosen)
    assert pinned_players_as(chosen.sources(), fixed.sources()) == fixed.sources()
    shutil.move("runs/copy", "runs/moved")
    with pytest.raises(UsageError, match=r"the run is no longer in .*runs/copy") as caught:
        open_model(fixed.models.prover, CPU)
    command = caught.value.remedy.partition(": ")[2].partition(". pvg train")[0]
    link = shlex.split(command.replace("/NEW/PATH", "moved"))
    subprocess.run(link, check=True)
    open_model(fixed.models.prover, CPU).close()
    Path(link[-1]).unlink()
    moved = pinned(with_models("run:moved/round-0"))
    assert moved.hash() == fixed.hash()
    assert moved.hash() != pinned(with_models("run:moved/round-1")).hash()
    tensors, meta = read_checkpoint(Path("runs/moved/weights"), "round-000-prover")
    shutil.rmtree("runs/moved/weights/round-000-prover")
    write_checkpoint(Path("runs/moved/weights"), "round-000-prover", {n: t + 1 for n, t in tensors.items()}, meta)
    with pytest.raises(StateError, match="have changed: their digest is"):
        open_model(moved.models.prover, CPU)


def test_a_resumed_run_keeps_the_weights_of_its_start(folder: Path) -> None:
    """The source names no round. The other run has a newer one when this run is resumed."""
    shutil.copytree("runs/base", "runs/growing")
    start = pinned(with_models("run:growing/round-0"))
    resumed = pinned_players_as(with_models("run:growing").sources(), start.sources())
    assert resumed["models.prover.source"] == start.models.prover.source
