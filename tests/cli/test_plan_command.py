"""`pvg plan` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calling import pvg

pytestmark = pytest.mark.slow  # each plan counts activations

MODEL = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
EXPERIMENT = """
name = "served"
[models]
prover = {{ source = "{model}" }}
verifier = {{ source = "{model}" }}
[rollout]
engine = "vllm"
prefetch = "fresh"
max_tokens = 1024
concurrency = 64
[serving]
max_num_seqs = 64
[training]
micro_batch_tokens = 4096
"""
SLOW_SAMPLING = ("-i", "token_s=0.05", "-i", "row_s=0", "-i", "train_token_s=1e-4", "-i", "other_s=0")


@pytest.fixture
def served(empty_folder: Path) -> str:
    folder = empty_folder / "eight"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    file = empty_folder / "served.toml"
    file.write_text(EXPERIMENT.format(model=folder))
    return str(file)


def test_the_plan_of_the_default_experiment() -> None:
    called = pvg("plan")
    assert called.code == 0
    for text in ("the whole game", "mean_tokens", "step time", "best overlap", "trained weights", "KV cache"):
        assert text in called.out


def test_it_says_how_many_workers_would_balance_training(served: str) -> None:
    document = pvg("plan", served, *SLOW_SAMPLING, "--json").document
    (advice,) = [line for line in document["advice"] if "The trainer waits" in line]
    number = str(int(advice.split(". ")[1].split()[0]))
    balanced = pvg("plan", served, *SLOW_SAMPLING, "--json", "--workers", number, "-s", "rollout.concurrency=9999")
    assert balanced.document["step_s"] < 0.8 * document["step_s"]
    assert not any("The trainer waits" in line for line in balanced.document["advice"])


def test_memory_against_a_gpu(served: str) -> None:
    called = pvg("plan", served, "--gpu-gb", "80", "--json")
    stages = {stage["stage"]: stage for stage in called.document["memory"]}
    prover = stages["train the prover"]
    assert prover["parts"]["optimizer"] == 8 * 8_030_261_248
    assert not prover["fits"]
    assert any("'train the prover' needs" in line and "training.adapters" in line for line in called.document["advice"])
    assert "does not fit" in pvg("plan", served).out
    assert all(
        stage["fits"] for stage in pvg("plan", served, "--gpu-gb", "1000", "--gpus", "2", "--json").document["memory"]
    )


def test_in_turns_it_tries_prefetch(served: str) -> None:
    called = pvg("plan", served, "-s", "rollout.prefetch=none", *SLOW_SAMPLING, "--json")
    bounds = called.document["bounds"]
    assert called.document["step_s"] == bounds["turns_s"] > bounds["overlap_s"]
    assert any("rollout.prefetch = 'fresh'" in line for line in called.document["advice"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h1000"], "Did you mean 'h100'?"),
        (["-i", "tokens_s=1"], "Did you mean 'token_s'?"),
        (["-s", "models.prover.source=nowhere"], "There is no model directory"),
        (["-s", "models.device=cuda:7"], "models.device = 'cuda:7'"),
    ],
)
def test_mistakes_are_one_line_with_a_remedy(arguments: list[str], message: str) -> None:
    called = pvg("plan", *arguments)
    assert called.code in (2, 3)
    assert message in called.err
    assert called.err.startswith("error: ")


def test_a_config_that_is_not_json_is_refused(served: str) -> None:
    Path("eight/config.json").write_text("{")
    assert "not a valid JSON file" in pvg("plan", served).err
    Path("eight/config.json").write_text("{}")
    assert "model_type" in pvg("plan", served).err


def test_train_refuses_before_the_first_sample_what_cannot_fit(served: str) -> None:
    settings = ("-s", "rollout.engine=torch", "-s", "rollout.prefetch=none")
    for flag in ((), ("--dry-run",)):
        called = pvg("train", served, *settings, *flag)
        assert called.code == 2
        assert "more than the machine has" in called.err
        assert "--force" in called.err
    assert not Path("runs").exists()
    assert "model.safetensors" in pvg("train", served, *settings, "--force").err  # the next thing that it needs


def test_a_single_gpu_is_shared_with_the_server(served: str) -> None:
    shares = {"serving.gpu_memory_utilization=0.45": {1: 0.55, 2: 1.0}, "serving.gpu_memory_utilization=0.9": {1: 0.1}}
    for setting, by_gpus in shares.items():
        for gpus, share in by_gpus.items():
            words = ("--gpu", "h100", "--gpus", str(gpus), "-s", "training.adapters.rank=8", "-s", setting, "--json")
            (training, *_) = pvg("plan", served, *words).document["memory"]
            assert training["fits"] == (training["total"] <= share * 80e9)
