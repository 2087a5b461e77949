"""Every transport against a real vLLM: files and adapters in earnest; of what needs a GPU the names and signatures that
are used, and the engine of ours, as far as a CPU can tell."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from vllm_servers import (
    EMBEDDED,
    PACKAGE,
    Server,
    generate,
    language_model,
    log_probs,
    perturbed,
    prompts,
    started,
    vllm_python,
)

from pvg.config.models import ModelSection
from pvg.config.servers import Weights
from pvg.models import open_model
from pvg.servers.control import DeliveryTiming
from pvg.servers.pool import RefusedRequest
from pvg.servers.publishing import PublishingSession, WeightLabel, WeightUpdate
from pvg.servers.transports import open_transport
from pvg.servers.transports.files import AdapterTransport

TOLERANCE = 2e-3  # nats, in float32; a wrong version is off by more than 1

NAMES_AND_SIGNATURES = """
import dataclasses, inspect
from vllm.distributed.device_communicators.pynccl_wrapper import NCCL_UNIQUE_ID_BYTES, NCCLLibrary, ncclUniqueId
from vllm.distributed.weight_transfer.base import ParamMeta, VLLMWeightSyncClient, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_common import (
    NCCLWeightTransferInitInfo, uid_init_process_group, worker_init_payload,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

def parameters(function):
    return list(inspect.signature(function).parameters)

class Client:
    def init_weight_transfer_engine(self, init_info): ...
    def start_weight_update(self): ...
    def update_weights(self, update_info): ...
    def finish_weight_update(self, weight_version=None): ...

# What we do with it, with the values we do it with.
assert isinstance(Client(), VLLMWeightSyncClient)
engine = NCCLTrainerWeightTransferEngine(client=Client(), source=object())
assert engine.model_update_group is None and engine.is_sender and engine.packed is True
assert engine.packed_buffer_size_bytes > 0 and engine.packed_num_buffers > 0
assert parameters(engine.send_weights) == [] and parameters(engine.shutdown) == []
engine.shutdown()
unique_id = bytes(ncclUniqueId())
assert len(unique_id) == NCCL_UNIQUE_ID_BYTES
assert hasattr(NCCLLibrary, "ncclGetUniqueId")
assert parameters(uid_init_process_group) == ["nccl_unique_id_bytes", "rank", "world_size", "device"]
import base64
info = NCCLWeightTransferInitInfo(
    rank_offset=1, world_size=3, nccl_unique_id_b64=base64.b64encode(unique_id).decode(), packed=True,
    packed_buffer_size_bytes=1024, packed_num_buffers=2,
)
assert info.nccl_unique_id_bytes == unique_id
payload = worker_init_payload(info)
assert payload["rank_offset"] == 1 and "master_address" not in payload
assert NCCLWeightTransferInitInfo(**{**payload, "rank_offset": 2}).rank_offset == 2
assert IPCTrainerInitInfo(rank=0, packed=False).backend == "ipc"
assert parameters(WeightTransferTrainerFactory.trainer_init) == ["init_info", "client", "source"]
assert [field.name for field in dataclasses.fields(ParamMeta)] == ["name", "dtype", "shape"]
assert {name for name in vars(WeightSource) if not name.startswith("_")} >= {"metadata", "held_names", "groups"}
print("as expected")
"""

OUR_ENGINE = """
import json, inspect, torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from pvg_vllm.ipc_engine import BACKEND, JsonIpcEngine, JsonIpcUpdateInfo, register
from pvg_vllm.ipc_handles import ARGUMENTS, encode_handle

register()
register()
assert WeightTransferEngineFactory._registry[BACKEND]() is JsonIpcEngine
assert list(inspect.signature(rebuild_cuda_tensor).parameters) == [name for name, _ in ARGUMENTS]
handle = (
    torch.Tensor, torch.Size([2, 3]), (3, 1), 0, torch.storage.TypedStorage, torch.bfloat16, 0, b"h" * 64, 4096, 512,
    False, b"/torch_1", 0, b"e" * 64, True,
)
engine = object.__new__(JsonIpcEngine)  # its __init__ wants a model
table = {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]], "handles": [{"GPU-1": encode_handle(handle)}]}
info = engine.parse_update_info(json.loads(json.dumps(table)))
assert isinstance(info, JsonIpcUpdateInfo) and info.ipc_handles == [{"GPU-1": handle}] and info.tensor_sizes is None

def refused(**changes):
    try:
        engine.parse_update_info({**table, **changes})
    except ValueError as error:
        return str(error)
    raise SystemExit(f"accepted: {changes}")

assert "unexpected keyword" in refused(ipc_handles_pickled="gASVAAAA")
assert "unexpected keyword" in refused(ipc_handles=[{"GPU-1": list(handle)}])
assert "differ in length" in refused(names=["w", "v"])
assert "not a handle" in refused(handles=[{"GPU-1": {"dtype": "bfloat16"}}])
assert engine.parse_init_info({"packed": False}).packed is False
try:
    engine.init_transfer_engine(engine.parse_init_info({"packed": True}))
except ValueError as error:
    assert "packed" in str(error)
else:
    raise SystemExit("a packed transfer was accepted")
print("as expected")
"""


@pytest.mark.parametrize("script", [NAMES_AND_SIGNATURES, OUR_ENGINE], ids=["trainer side", "our engine"])
def test_vllm_has_what_is_used(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [vllm_python(), "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=tmp_path,
        env={"PYTHONPATH": str(PACKAGE / "servers" / "server_side"), "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "as expected"


@pytest.fixture(scope="module")
def transferring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--weight-transfer-config", '{"backend": "pvg_ipc"}', "--enable-lora", "--max-lora-rank", "16"]
    with started(EMBEDDED, tmp_path_factory.mktemp("transfer"), *options) as running:
        yield running


def test_a_server_with_our_engine_starts_and_refuses_what_is_no_handle(transferring: Server) -> None:
    """vLLM knows the backend in its worker; the calls and their bodies are what its routes take; nothing is unpickled;
    a failed update leaves the server with a label that says so, and working."""

    async def play() -> None:
        pool, label = transferring.pool(), WeightLabel(PublishingSession.begin(), 1)
        control = transferring.control(pool)
        pickled: dict[str, Any] = {"names": [], "dtype_names": [], "shapes": [], "ipc_handles_pickled": "gASVAAAA"}
        try:
            await control.call("/init_weight_transfer_engine", {"init_info": {"packed": False}})
            await control.pause("trace")
            await control.call("/start_weight_update", None, "trace")
            with pytest.raises(RefusedRequest) as caught:
                await control.call("/update_weights", {"update_info": pickled}, "trace")
            assert caught.value.status == 500
            await control.call("/update_weight_version", {"new_version": f"broken:{label}"}, "trace")
            await control.resume("trace")
            assert (await control.info()).label == f"broken:{label}"
            await control.call("/pause?mode=keep", None)
            await control.call("/start_weight_update", None)
            empty = {"names": [], "dtype_names": [], "shapes": [], "handles": []}
            await control.call("/update_weights", {"update_info": empty})
            reply = await control.call("/finish_weight_update", {"weight_version": str(label)}, "trace")
            assert float(reply.headers["x-pvg-work-ms"]) >= 0
            await control.resume()
            info = await control.info()
            assert (info.label, info.paused) == (str(label), False)
            await control.call("/shutdown_weight_transfer_engine", None)
        finally:
            await pool.close()

    asyncio.run(play())


def test_files_and_adapters_bring_what_the_trainer_has(transferring: Server) -> None:
    """Weights of the trainer's own classes through both transports; log-probs against the trainer's, in float32."""
    from pvg.models.adapters import KEY, attach_adapters

    base = open_model(ModelSection(source="embedded:modchain-prover"), torch.device("cpu"))
    adapted = attach_adapters(base, rank=8, alpha=16.0, seed=1)
    for _, layer in adapted._adapted():
        torch.nn.init.normal_(layer.lora_B[KEY].weight, std=0.1)
    moved = perturbed(EMBEDDED, 3)
    session = PublishingSession.begin()

    async def gap(http: aiohttp.ClientSession, tensors: Mapping[str, torch.Tensor], model: str, salt: str) -> float:
        done = await generate(http, transferring.url, prompts(1, 24)[0], salt=salt, model=model, prompt_log_probs=True)
        expected = log_probs(language_model(EMBEDDED, tensors), done.prompt + done.tokens)[1:]
        return float(np.abs(expected - (done.prompt_log_probs + done.log_probs)).max())

    async def play() -> None:
        pool = transferring.pool()
        control = transferring.control(pool)
        files = open_transport(Weights(root=transferring.root), "files", None, "float32", session)
        adapters = open_transport(
            Weights(root=transferring.root, transport="lora"), "adapters", None, "float32", session
        )
        assert isinstance(adapters, AdapterTransport)
        try:
            async with aiohttp.ClientSession() as http:
                first, second, third, fourth, last = (WeightLabel(session, version) for version in range(1, 6))
                await adapters.stage(WeightUpdate(1, base.weights()), first)
                await adapters.stage(WeightUpdate(2, adapted.weights(), adapter=adapted.adapter()), second)
                (loaded,) = await adapters.send([control], second, "adapter")
                assert isinstance(loaded, DeliveryTiming)
                assert await gap(http, base.weights(), adapters.model_of(first) or "", "base") < TOLERANCE
                assert await gap(http, adapted.weights(), adapters.model_of(second) or "", "adapted") < TOLERANCE
                await adapters.stage(WeightUpdate(3, adapted.weights(), adapter=adapted.adapter()), third)
                await adapters.send([control], third, "adapter")
                await adapters.stage(WeightUpdate(4, adapted.weights(), adapter=adapted.adapter()), fourth)
                await adapters.send([control], fourth, "adapter")
                await adapters.retire([control], [])  # the two newest stay; the second goes, on both sides
                body = {"token_ids": [3, 4], "sampling_params": {"max_tokens": 1}, "model": str(second)}
                async with http.post(transferring.url + "/inference/v1/generate", json=body) as response:
                    assert response.status == 404
                await files.stage(WeightUpdate(5, moved), last)
                (delivery,) = await files.send([control], last, "files")
                assert isinstance(delivery, DeliveryTiming)
                assert set(delivery.parts) == {"pause_ms", "load_ms", "resume_ms"}
                assert (await control.info()).label == str(last)
                assert await gap(http, moved, "", "moved") < TOLERANCE
                (again,) = await files.send([control], last, "files")
                assert isinstance(again, DeliveryTiming)
        finally:
            await adapters.close()
            await files.close()
            await pool.close()
        for run in ("files", "adapters"):
            assert list((transferring.root / run).iterdir()) == []

    asyncio.run(play())
