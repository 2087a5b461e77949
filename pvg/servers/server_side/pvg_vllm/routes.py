"""The routes below /pvg: server status, new weights, adapters.

A weight update pauses the engine between two steps, lets its workers load, sets the label as weight version, and
resumes. Requests in flight are kept. The update drops the whole prefix cache with the keys and values of old weights,
and requests in flight recompute theirs. So every token is sampled from exactly the weights of its label, regardless of
the client's salts.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .accepted_weights import BROKEN, ServedLabel, adapter_folder, check_order, check_session, weight_files
from .exchange import Refusal, tell

PROTOCOL = 1


@dataclass(frozen=True, slots=True)
class RouteCall:
    """One call: vLLM's application state, the request body, the client's trace id."""

    state: Any
    body: dict[str, Any]
    trace: str

    def text(self, key: str) -> str:
        """A string of the body. Raises a Refusal if it is missing or invalid."""
        value = self.body.get(key)
        if not isinstance(value, str) or not value or len(value) > 4096:
            raise Refusal(400, "bad_request", f"{key!r} must be a string.")
        return value

    def label(self) -> ServedLabel:
        """The label in the body. Raises a Refusal if it is invalid."""
        text = self.text("label")
        if (found := ServedLabel.parse(text)) is None:
            raise Refusal(422, "bad_label", f"{text!r} is not a label: SESSION/VERSION, where SESSION is <hex>-<tail>.")
        return found


Route = Callable[[RouteCall], Awaitable[dict[str, Any]]]


class Routes:
    """`root`: the folder with published weights. Serves one update at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._boot = os.environ.get("PVG_BOOT") or secrets.token_hex(8)  # lets the process that starts us recognize us
        self._updating = asyncio.Lock()
        self._newest_adapter: ServedLabel | None = None
        self._table: dict[str, tuple[str, Route]] = {
            "/pvg/info": ("GET", self.info),
            "/pvg/weights": ("POST", self.weights),
            "/pvg/adapters": ("POST", self.adapters),
            "/pvg/adapters/unload": ("POST", self.unload_adapter),
        }

    def find(self, method: str, path: str) -> Route:
        """The handler of a route. Raises a Refusal (404, 405)."""
        if path not in self._table:
            raise Refusal(404, "no_such_route", f"There is no {path}.")
        expected, route = self._table[path]
        if method != expected:
            raise Refusal(405, "wrong_method", f"{path} takes {expected}.")
        return route

    async def info(self, call: RouteCall) -> dict[str, Any]:
        """The server's status. Queries the engine, so there is no answer while the engine hangs."""
        engine = call.state.engine_client
        config = engine.vllm_config
        model, lora = config.model_config, config.lora_config
        return {
            "protocol": PROTOCOL,
            "boot": self._boot,
            "vllm": _vllm_version(),
            "model": call.state.openai_serving_models.base_model_paths[0].name,
            "shape": model_shape(model.hf_text_config),
            "runner": model.runner_type,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            "max_lora_rank": lora.max_lora_rank if lora is not None else 0,
            "label": await engine.get_weight_version(),
            "paused": await engine.is_paused(),
            "world_size": config.parallel_config.world_size_across_dp,
        }

    async def weights(self, call: RouteCall) -> dict[str, Any]:
        """Load published weights into the engine. Answers immediately if it has the label already, after it resumes an
        engine that an earlier call could not resume."""
        engine, label, name = call.state.engine_client, call.label(), call.text("name")
        async with self._updating:
            current = await engine.get_weight_version()
            if current == str(label):
                if await engine.is_paused():
                    await engine.resume_generation()
                return {"label": str(label), "pause_ms": 0.0, "load_ms": 0.0, "resume_ms": 0.0}
            check_order(current, label)
            files = await asyncio.to_thread(weight_files, self._root, name)
            tell("rpc.start", trace=call.trace, version=label.version)
            timing = await _update(engine, label, files)
            tell("rpc.done", trace=call.trace, version=label.version, rpc_ms=sum(timing.values()), **timing)
            return {"label": str(label), **timing}

    async def adapters(self, call: RouteCall) -> dict[str, Any]:
        """Load a published adapter in addition to others. Requests name it by its label. Pauses nothing."""
        models, label, name = call.state.openai_serving_models, call.label(), call.text("name")
        async with self._updating:
            if str(label) in models.lora_requests:
                return {"label": str(label), "load_ms": 0.0}
            if call.state.engine_client.vllm_config.lora_config is None:
                raise Refusal(422, "no_adapters", "The server was started without --enable-lora.")
            if self._newest_adapter is not None:
                check_session(self._newest_adapter, label)
            folder = await asyncio.to_thread(adapter_folder, self._root, name)
            tell("rpc.start", trace=call.trace, version=label.version)
            began = time.perf_counter()
            done = await models.load_lora_adapter(_adapter_request(str(label), str(folder)))
            load_ms = (time.perf_counter() - began) * 1e3
            if not isinstance(done, str):  # vLLM returns its errors
                raise Refusal(500, "load_failed", done.error.message)
            self._newest_adapter = label
            tell("rpc.done", trace=call.trace, version=label.version, rpc_ms=load_ms)
            return {"label": str(label), "load_ms": load_ms}

    async def unload_adapter(self, call: RouteCall) -> dict[str, Any]:
        """Accept no more requests for an adapter. Workers keep it while requests need it, and evict it when they need
        the space."""
        models, label = call.state.openai_serving_models, call.label()
        async with self._updating:
            if str(label) in models.lora_requests:
                await models.unload_lora_adapter(_adapter_removal(str(label)))
            return {"label": str(label)}


async def _update(engine: Any, label: ServedLabel, files: Sequence[Path]) -> dict[str, float]:
    """Milliseconds of each part. The engine always resumes, under a label that says what it has."""
    times = [time.perf_counter()]
    reached = BROKEN + str(label)
    try:
        await engine.pause_generation(mode="keep", clear_cache=True)
        times.append(time.perf_counter())
        try:
            failures = await engine.collective_rpc("pvg_load_weights", args=([str(file) for file in files],))
            if not any(failures):
                reached = str(label)
        finally:
            await engine.update_weight_version(reached)
        times.append(time.perf_counter())
    finally:
        await engine.resume_generation()
    times.append(time.perf_counter())
    if any(failures):
        reasons = sorted({failure for failure in failures if failure})
        raise Refusal(
            500, "load_failed", f"{label} was not loaded, and the engine's weights are broken: {'; '.join(reasons)}"
        )
    parts = ("pause_ms", "load_ms", "resume_ms")
    return {part: (times[i + 1] - times[i]) * 1e3 for i, part in enumerate(parts)}


def model_shape(config: Any) -> str:
    """The model's sizes in the format of LanguageModel.shape; empty if the configuration lacks them."""
    sizes = [getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size", "vocab_size")]
    return "{} layers of {}, {} tokens".format(*sizes) if all(isinstance(size, int) for size in sizes) else ""


def _vllm_version() -> str:
    from vllm import __version__

    return str(__version__)


def _adapter_request(name: str, path: str) -> Any:
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

    return LoadLoRAAdapterRequest(lora_name=name, lora_path=path)


def _adapter_removal(name: str) -> Any:
    from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest

    return UnloadLoRAAdapterRequest(lora_name=name)
