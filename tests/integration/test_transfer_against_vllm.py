"""Every transport against a real vLLM: files and adapters in earnest; of what needs a GPU the names and signatures that
are used."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from vllm_servers import EMBEDDED, Server, generate, language_model, log_probs, perturbed, prompts, started, vllm_python

from pvg.config.operation import Weights
from pvg.config.training import ModelSection
from pvg.models import open_model
from pvg.servers.control import DeliveryTiming
from pvg.servers.publishing import PublishingSession, WeightLabel, WeightUpdate
from pvg.servers.transports.files import AdapterTransport
from pvg.servers.transports.opening import open_transport

TOLERANCE = 2e-3  # nats, in float32; a wrong version is off by more than 1

NAMES_AND_SIGNATURES = """
import dataclasses, inspect
from vllm.distributed.device_communicators.pynccl_wrapper import NCCL_UNIQUE_ID_BYTES, NCCLLibrary, ncclUniqueId
from vllm.distributed.weight_transfer.base import ParamMeta, VLLMWeightSyncClient, WeightSource
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
assert [field.name for field in dataclasses.fields(ParamMeta)] == ["name", "dtype", "shape"]
assert {name for name in vars(WeightSource) if not name.startswith("_")} >= {"metadata", "held_names", "groups"}
print("as expected")
"""


def test_vllm_has_what_is_used(tmp_path: Path) -> None:
    done = subprocess.run(
        [vllm_python(), "-c", NAMES_AND_SIGNATURES],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=tmp_path,
        env={"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "as expected"


@pytest.fixture(scope="module")
def transferring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(EMBEDDED, tmp_path_factory.mktemp("transfer"), "--enable-lora", "--max-lora-rank", "16") as running:
        yield running


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
