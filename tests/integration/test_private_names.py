"""Every name of vLLM that pvg uses and vLLM does not promise exists in the version at hand: also of parts that no CPU
runs. The sources are read, not imported, so those of a build for GPUs do as well (PVG_VLLM_PYTHON)."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from vllm_servers import CHECKOUT, PACKAGE, vllm_python

QUESTION = "import importlib.util; print(importlib.util.find_spec('vllm').origin)"
VERSION = "import vllm.version; print(vllm.version.__version__)"
# Where pvg gets an object without importing its class: the class, and what pvg uses of it with which parameters.
USED = {
    "v1.engine.async_llm:AsyncLLM": {
        "pause_generation": ["mode", "clear_cache"],
        "resume_generation": [],
        "is_paused": [],
        "get_weight_version": [],
        "update_weight_version": [],
        "collective_rpc": ["method", "args"],
        "sleep": ["level", "mode"],
        "wake_up": [],
    },
    "entrypoints.scale_out.token_in_token_out.serving:ServingTokens": {
        "serve_tokens_full_generator": ["request", "result_generator", "request_id"],
        "serve_tokens_stream_generator": ["request", "result_generator", "request_id"],
    },
    "entrypoints.generate.base.serving:GenerateBaseServing": {"_raise_if_error": ["finish_reason", "request_id"]},
    "entrypoints.openai.models.serving:OpenAIServingModels": {"load_lora_adapter": [], "unload_lora_adapter": []},
    "v1.worker.gpu_model_runner:GPUModelRunner": {"reload_weights": ["weights_iterator"], "get_model": []},
    "v1.worker.gpu.model_runner:GPUModelRunner": {"reload_weights": ["weights_iterator"], "get_model": []},
    "v1.worker.gpu_worker:Worker": {"sleep": ["level"], "wake_up": [], "init_device": []},
    "model_executor.model_loader.reload.types:LayerReloadingInfo": {"can_load": []},
}
FIELDS = {
    "outputs:CompletionOutput": {"token_ids", "logprobs", "finish_reason", "weight_versions", "routed_experts"},
    "outputs:WeightVersionSpan": {"start", "version"},
    "logprobs:Logprob": {"logprob"},
    "sampling_params:SamplingParams": {"extra_args", "logprobs", "prompt_logprobs"},
    "model_executor.model_loader.reload.types:LayerReloadingInfo": {"load_numel", "loaded_weights"},
    "config.model:ModelConfig": {"enable_sleep_mode", "logprobs_mode", "max_model_len"},
}


@cache
def package() -> Path:
    done = subprocess.run([vllm_python(), "-P", "-c", QUESTION], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()).parent


@cache
def module(name: str) -> ast.Module:
    path = package().joinpath(*name.split("."))
    file = path.with_suffix(".py")
    return ast.parse((file if file.is_file() else path / "__init__.py").read_text())


def class_of(place: str) -> ast.ClassDef:
    name, _, kind = place.partition(":")
    return next(node for node in module(name).body if isinstance(node, ast.ClassDef) and node.name == kind)


def names(place: str) -> set[str]:
    """What a module has at its top, also in lazy tables of its package."""
    found: set[str] = set()
    for node in ast.walk(module(place)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def imported() -> set[tuple[str, str]]:
    """(Module of vLLM, name) of every import in pvg."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found |= {((node.module or "").partition(".")[2], alias.name) for alias in node.names}
    return found


def test_the_version_is_one_that_is_allowed() -> None:
    extra = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    done = subprocess.run([vllm_python(), "-P", "-c", VERSION], capture_output=True, text=True, check=True)
    assert Requirement(extra[0]).specifier.contains(done.stdout.split()[-1])


def test_every_imported_name_exists() -> None:
    wanted = imported()
    assert len(wanted) >= 10
    missing = [(place, name) for place, name in wanted if name not in (names(place) if place else names("__init__"))]
    assert missing == []


@pytest.mark.parametrize("place", USED)
def test_every_method_takes_what_it_is_given(place: str) -> None:
    methods = {n.name: n for n in class_of(place).body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    for method, parameters in USED[place].items():
        given = methods[method].args
        known = [argument.arg for argument in (*given.args, *given.kwonlyargs)]
        assert set(parameters) <= set(known), method


@pytest.mark.parametrize("place", FIELDS)
def test_every_field_exists(place: str) -> None:
    text = ast.unparse(class_of(place))
    assert [field for field in FIELDS[place] if f"{field}:" not in text and f"self.{field}" not in text] == []
