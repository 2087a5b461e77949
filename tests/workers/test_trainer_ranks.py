"""A trainer on several real processes over gloo (`cluster.trainer_ranks`), against the trainer of one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rank_runs import PVG, played, running, train, trains, wait_until, weights
from ranked_trainings import SETTINGS, Job, trained
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import pvg
from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.config.operation import LocalCluster, NoCluster
from pvg.errors import ConfigurationError, StoppedAtStart
from pvg.models.embedded_training import modchain_tokenizer
from pvg.models.language_model import LanguageModel
from pvg.models.tokenizer import Tokenizer
from pvg.store.run_directory import RunDirectory
from pvg.workers import launch
from pvg.workers.choice import cluster_settings, with_workers
from pvg.workers.launch import Launch, start_ranks
from pvg.workers.ranks import noted_run
from pvg_cli.main import app


def saved_model(folder: Path, tied: bool) -> str:
    """A Llama with random weights as a Hugging Face directory. No size is a multiple of 2 x 3, so that ranks have parts
    of different sizes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=19,
        hidden_size=20,
        intermediate_size=50,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
    )
    with LanguageModel(LlamaForCausalLM(config), Tokenizer(modchain_tokenizer()), "tiny") as model:
        model.save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_model(tmp_path_factory.mktemp("tied"), True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_model(tmp_path_factory.mktemp("untied"), False)


def assert_same_steps(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert one.get("loss", 0.0) == pytest.approx(other.get("loss", 0.0), rel=0, abs=1e-6)
        for name, value in other.items():
            if name not in ("micro_batches", "padding"):  # the parts of ranks are smaller
                assert one[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0)


# --- the same training ------------------------------------------------------------------------------------------------

ADAPTERS = {"adapters": {"rank": 3}}
PADDED = {"shared_prompts": False, "gradient_checkpointing": True}
AUDITED = """
import sys
def seen(event, arguments):
    if event == "pickle.find_class":
        with open({log!r}, "a") as file:
            file.write(f"{{arguments}}\\n")
sys.addaudithook(seen)
"""


@pytest.mark.drill
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_train_as_one_process_does_each_keeps_its_part_and_nothing_is_unpickled(
    tied: str, untied: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.distributed has calls that exchange pickles. Ranks accept connections that prove nothing."""

    def jobs() -> list[Job]:
        kinds: list[tuple[str, dict[str, Any]]] = [
            (tied, {}),
            (untied, PADDED),
            (tied, ADAPTERS),
            (untied, {**ADAPTERS, **PADDED}),
            (tied, {"loss": "dapo", "kl": {"coefficient": 0.0}}),
        ]
        return [Job(model, "", [2, 3, 4, 5, "silent", 1], training) for model, training in kinds]

    alone = trained(tmp_path / "alone", 0, jobs())
    log = tmp_path / "seen"
    (tmp_path / "sitecustomize.py").write_text(AUDITED.format(log=str(log)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    together = trained(tmp_path / "together", ranks, jobs())
    assert not log.exists()
    subprocess.run([sys.executable, "-c", "import pickle, re; pickle.loads(pickle.dumps(re.compile))"], check=True)
    assert "compile" in log.read_text()  # the hook is there
    assert alone[0]["metrics"][0]["grad_norm"] > SETTINGS.gradient_clip  # the clip is tested too
    assert together[4]["metrics"][4] == {"skipped": 1.0}
    for found, expected in zip(together, alone, strict=True):
        assert_same_steps(found["metrics"], expected["metrics"])
        assert_close(found["state"][0], expected["state"][0])
        assert found["state"][1]["step"] == expected["state"][1]["step"] == 6
        assert found["addresses"] == {"127.0.0.1"}
        whole = 4 * 3 * sum(t.numel() for name, t in found["state"][0].items() if name.startswith("model."))
        # Rows cannot be cut, and AdamW counts the steps of every parameter.
        assert sum(found["held"]) == pytest.approx(whole, rel=0.05)
        assert max(found["held"]) < 1.3 * whole / ranks


@pytest.mark.drill
def test_bfloat16_and_a_gradient_that_is_not_finite_as_in_one_process(tied: str, tmp_path: Path) -> None:
    def jobs() -> list[Job]:
        without = {"kl": {"coefficient": 0.0}}
        return [
            Job(tied, "", [2, 3], precision="bfloat16"),
            Job(tied, "", [2, 3], ADAPTERS, precision="bfloat16"),
            Job(tied, "", [2, 3], ADAPTERS, precision="bfloat16", dtype="bfloat16"),
            Job(tied, "", [2], without),
            Job(tied, "", [2, "endless"], without),
        ]

    alone, together = trained(tmp_path / "alone", 0, jobs()), trained(tmp_path / "together", 2, jobs())
    for found, expected in zip(together[:3], alone[:3], strict=True):
        assert all(tensor.dtype == torch.float32 for tensor in found["state"][0].values())
        for one, other in zip(found["metrics"], expected["metrics"], strict=True):
            assert one["loss"] == pytest.approx(other["loss"], abs=0.02)
            assert one["entropy"] == pytest.approx(other["entropy"], rel=0.01)
    finite, endless = together[3:]
    assert "step 1: the gradient's norm is" in endless["error"]
    for name, tensor in finite["state"][0].items():
        assert torch.equal(endless["state"][0][name], tensor), name


@pytest.mark.drill
def test_a_checkpoint_of_any_number_of_ranks_continues_with_any_other(tied: str, tmp_path: Path) -> None:
    (whole,) = trained(tmp_path / "whole", 0, [Job(tied, "", [2, 3, 4, 5, 6, 7])])
    for ranks, others in ((2, (0, 2, 3)), (0, (2,))):
        (begun,) = trained(tmp_path / f"begun-{ranks}", ranks, [Job(tied, "", [2, 3, 4])])
        start = str(tmp_path / f"begun-{ranks}" / "0.pt")
        for other in others:
            jobs = [Job(tied, "", [], start=start), Job(tied, "", [5, 6, 7], start=start)]
            read, found = trained(tmp_path / f"{ranks}-{other}", other, jobs)
            assert read["state"][1] == begun["state"][1]
            assert read["state"][0].keys() == begun["state"][0].keys()
            for name, tensor in begun["state"][0].items():
                assert torch.equal(read["state"][0][name], tensor), name
            assert found["state"][1]["step"] == 6
            assert_close(found["state"][0], whole["state"][0])


KEPT = """
import os, sys, torch
from torch import distributed, nn
from transformers import LlamaConfig, LlamaForCausalLM
from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.models.compute import autocast
from pvg.training.losses import PolicyObjective
from pvg.workers import ranks

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=2)
module = LlamaForCausalLM(config).eval()
store = distributed.HashStore()
distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
if sys.argv[1] == "autocast alone":
    precision = "float32"
else:
    precision = "bfloat16"

class Summed(nn.Module):
    def forward(self, module, tokens):
        return module.model(tokens).last_hidden_state.float().sum()

root = ranks.sharded(module, Summed(), torch.device("cpu"), precision)
saved = []
with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
    with autocast("bfloat16", torch.device("cpu")):
        loss = root(torch.zeros(1, 4, dtype=torch.long))
shapes = {tuple(p.shape) for layer in module.model.layers for p in layer.parameters() if p.ndim == 2}
shapes |= {shape[::-1] for shape in shapes}
storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved if tuple(t.shape) in shapes}
print(sum(storages.values()))
loss.backward()
"""


@pytest.mark.drill
def test_bfloat16_passes_keep_no_gathered_weights_until_the_backward_pass() -> None:
    """Autocast alone keeps its bfloat16 copies of the weights of all layers."""

    def kept(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", KEPT, how], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    of_layers = 4 * 2 * (4 * 64 * 64 + 3 * 64 * 256)
    assert kept("autocast alone") == pytest.approx(of_layers, rel=0.1)
    assert kept("policy") == 0


# --- ranks that end ---------------------------------------------------------------------------------------------------


def ranks_run(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Let launchers start this shell script in place of pvg."""
    script = folder / "rank"
    script.write_text("\n".join(["#!/bin/sh", *lines]))
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))


def test_a_driver_may_take_its_time_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.05)
    ranks_run(tmp_path, monkeypatch, "[ $RANK = 1 ] || sleep 0.5")
    assert start_ranks(2, [], tmp_path / "run", pytest.fail) == 0


def test_a_signal_between_two_attempts_ends_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_run(tmp_path, monkeypatch, """case "$PVG_RANKS" in *'"lost": ""'*) kill -9 $$;; esac""")
    with pytest.raises(StoppedAtStart):
        start_ranks(2, [], tmp_path / "run", lambda text: os.kill(os.getpid(), signal.SIGINT))


def test_a_new_run_never_continues_one_with_its_name(tmp_path: Path) -> None:
    first = Launch(0, 2, 0, 2, store="store", run="run")
    assert (noted_run(first), noted_run(replace(first, lost="Rank 1 was killed"))) == ("", "run")
    RunDirectory.create(tmp_path, "run", Experiment())
    called = CliRunner().invoke(app, train(tmp_path, "--name", "run"))
    assert called.exit_code == 2
    assert "The run 'run' already exists" in called.stderr


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 1.0])
def test_ranks_end_with_a_launcher_that_is_killed_while_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running([*PVG, *train(tmp_path / "runs")]) as started:
        launcher = psutil.Process(started.launchers[0].pid)
        wait_until(lambda: len(launcher.children()) == 2, "both ranks have started")
        time.sleep(delay_s)
        launcher.kill()
        assert started.ended()[0] == [-signal.SIGKILL]
    assert not list(tmp_path.glob("pvg-ranks-*"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return played(tmp_path_factory.mktemp("undisturbed"))


def changed(folder: Path, *lines: str) -> dict[str, str]:
    """An environment in which Python runs these lines in every process of the launch."""
    code = ["import os, signal", "from pvg.workers import launch", "if launch.OWN in os.environ:"]
    code += ["    from pvg.workers import ranks", *(f"    {line}" for line in lines)]
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("\n".join(code))
    return {"PYTHONPATH": str(folder / "site")}


@pytest.mark.drill
@pytest.mark.parametrize(
    ("rank", "how", "why"),
    [
        (1, signal.SIGKILL, "Rank 1 was killed by SIGKILL."),
        (0, signal.SIGKILL, "Rank 0 was killed by SIGKILL."),
        (1, signal.SIGSTOP, "Rank 1 does not answer."),
    ],
)
def test_a_lost_rank_costs_a_line_and_the_steps_since_the_last_commit(
    rank: int, how: signal.Signals, why: str, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    environment = changed(tmp_path, "ranks.COLLECTIVE_S = 5.0") if how is signal.SIGSTOP else None
    root = tmp_path / "runs"
    with running([*PVG, *train(root, "--json")], env=environment) as started:
        trains(root / "modchain")
        started.rank(rank).send_signal(how)
        codes, documents, told = started.ended()
    assert codes == [0], told
    assert told.count(f"{why} All 2 ranks start again from the last commit.") == 1
    assert "error:" not in told
    assert json.loads(documents[0])["status"] == "complete"
    (root / "modchain").rename(root / "run")
    assert weights(root / "run") == undisturbed != {}
    assert f'event="rank lost" why="{why[:-1]}"' in (root / "run" / "events.log").read_text()


@pytest.mark.drill
def test_ctrl_c_stops_after_a_commit_and_other_numbers_of_ranks_continue_the_run(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    run = tmp_path / "run"
    with running([*PVG, *train(tmp_path, "--name", "run", "--json")]) as started:
        trains(run)
        started.launchers[0].send_signal(signal.SIGINT)
        codes, documents, told = started.ended()
    assert codes == [130], told
    assert json.loads(documents[0])["status"] == "interrupted"
    for number, cluster in enumerate(("cluster.trainer_ranks=2", "cluster.trainer_ranks=3", "cluster=none")):
        again = shutil.copytree(run, tmp_path / f"again-{number}")
        with running([*PVG, "train", "--resume", str(again), "-s", cluster, "--json"]) as started:
            codes, documents, told = started.ended()
        assert codes == [0], told
        assert json.loads(documents[0])["status"] == "complete"
        assert weights(again).keys() == undisturbed.keys()
        if not number:  # as many ranks give the same bits
            assert weights(again) == undisturbed


@pytest.mark.drill
def test_a_second_signal_and_the_death_of_the_launcher_end_all_processes_at_once(tmp_path: Path) -> None:
    for signals, code in (([signal.SIGTERM] * 2, 130), ([signal.SIGKILL], -signal.SIGKILL)):
        run = tmp_path / f"run-{len(signals)}"
        with running([*PVG, *train(tmp_path, "--name", run.name)]) as started:
            trains(run)
            for how in signals:
                started.launchers[0].send_signal(how)
            assert started.ended()[0] == [code]
        assert (run / "state.json").exists()


@pytest.mark.drill
def test_an_error_in_a_rank_ends_the_run_and_ranks_that_end_again_and_again_too(tmp_path: Path) -> None:
    failing = (
        "from pvg.errors import MissingRequirementError",
        "def fail(*_): raise MissingRequirementError('no memory', 'buy some')",
        "if os.environ['RANK'] == '1': ranks._Part.gradient = fail",
    )
    dying = ("if os.environ['RANK'] == '1': ranks._Part.gradient = lambda *_: os.kill(os.getpid(), signal.SIGKILL)",)
    for number, (lines, messages) in enumerate(
        (
            (failing, ["error: Rank 1: no memory\nbuy some\n"]),
            (
                (*dying,),
                [
                    "error: Rank 1 was killed by SIGKILL. Ranks were lost 6 times without a commit between them.",
                    "pvg train --resume",
                ],
            ),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with running([*PVG, *train(folder / "runs")], env=changed(folder, *lines)) as started:
            codes, _, told = started.ended()
        assert codes == [3], told
        for message in messages:
            assert told.count(message) == 1, told


# --- settings ---------------------------------------------------------------------------------------------------------

RANKS = {"kind": "local", "trainer_ranks": 2}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"router_replay": True}}, r"set training\.router_replay to false"),
        ({"models": {"device": "cuda:1"}}, r"set models\.device to 'cpu' or 'cuda'"),
        (
            {"cluster": {**RANKS, "workers": 2, "trainers": 1}, "rollout": {"prefetch": "fresh"}},
            r"leave out cluster\.trainers",
        ),
        ({"cluster": {"kind": "local", "workers": 0}}, "set cluster to 'none'"),
        ({"cluster": {"kind": "ray", "workers": 0}}, "set cluster to 'none'"),
        ({"cluster": {"kind": "ray", "trainer_ranks": 2}}, r"cluster\.trainer_ranks belongs to kind 'local'"),
    ],
)
def test_what_ranks_cannot_do_is_refused_in_one_line(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as raised:
        build_experiment({"cluster": RANKS, **sections})
    assert "\n" not in raised.value.message


def test_what_computes_on_the_cpu_beside_ranks_on_gpus_is_told() -> None:
    def told(**adapters: int) -> bool:
        chosen = {"cluster": RANKS, "rollout": {"logprobs": "recomputed"}, "models": {"device": "cuda"}}
        found = build_experiment({**chosen, "training": {"adapters": adapters}}).warnings()
        return any("rollout.logprobs = 'recomputed' computes on the CPU" in warning for warning in found)

    assert (told(), told(rank=4)) == (True, False)


def test_a_program_cannot_start_ranks_and_learns_it_before_the_game(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="which only pvg train and torchrun start"):
        pvg.play(
            "modchain", settings={"cluster.kind": "local", "cluster.trainer_ranks": 2, "store.root": str(tmp_path)}
        )
    assert not list(tmp_path.iterdir())


def test_ranks_need_no_workers_and_may_have_some() -> None:
    with_ranks = build_experiment({"cluster": RANKS})
    assert with_workers(with_ranks).cluster == LocalCluster(workers=0, trainer_ranks=2)
    both = build_experiment({"cluster": {**RANKS, "workers": 3}})
    assert with_workers(both).cluster == LocalCluster(workers=3, trainer_ranks=2)
    on_gpus = build_experiment({"cluster": RANKS, "models": {"device": "cuda"}})
    assert with_workers(on_gpus).cluster == LocalCluster(workers=0, trainer_ranks=2)


def test_a_run_resumes_with_another_number_of_ranks_or_with_none() -> None:
    begun = build_experiment({"cluster": {**RANKS, "workers": 0}})
    for cluster in ({**RANKS, "trainer_ranks": 3}, {"kind": "none"}):
        other = build_experiment({"cluster": cluster})
        assert other.hashed() == begun.hashed()
    assert with_workers(build_experiment({"cluster": {**RANKS, "trainer_ranks": 3}}), begun).cluster == LocalCluster(
        workers=0, trainer_ranks=3
    )
    assert with_workers(build_experiment({"cluster": "none"}), begun).cluster == NoCluster()
    assert with_workers(Experiment(), begun).cluster == begun.cluster
    assert cluster_settings("local", begun.cluster) == ["cluster=local", "cluster.trainer_ranks=2"]
