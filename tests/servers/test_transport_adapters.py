"""Adapters that are swapped by version: peft's files, names for requests, unloading, and what cannot travel so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import orjson
import pytest
import torch
from fake_vllm import FakeVllm, with_servers
from safetensors.torch import load_file

from pvg.config.operation import Weights
from pvg.models.language_model import LowRankAdapter
from pvg.servers.control import ControlClient, DeliveryTiming
from pvg.servers.publishing import PublishingSession, WeightLabel, WeightUpdate
from pvg.servers.transports import files
from pvg.servers.transports.files import AdapterTransport
from pvg.servers.transports.opening import open_transport

SESSION = PublishingSession(1000, "aaaaaaaa")
LOAD, UNLOAD = "/pvg/adapters", "/pvg/adapters/unload"
BASE: Mapping[str, torch.Tensor] = {"w": torch.arange(6.0)}
CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "peft_type": "LORA", "base_model_name_or_path": "base"}
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def opened(root: Path) -> AdapterTransport:
    found = open_transport(Weights(root=root, transport="lora"), "run", None, "bfloat16", SESSION)
    assert isinstance(found, AdapterTransport)
    return found


def label(version: int) -> WeightLabel:
    return WeightLabel(SESSION, version)


def update(version: int) -> WeightUpdate:
    return WeightUpdate(version, BASE, adapter=LowRankAdapter({NAME: torch.full((4, 2), 0.1 * version)}, CONFIG))


def test_an_adapter_is_written_as_peft_does_and_loaded_under_its_label(tmp_path: Path) -> None:
    async def play(servers: list[FakeVllm], controls: list[ControlClient]) -> None:
        transport = opened(tmp_path)
        assert transport.adapters
        await transport.stage(update(1), label(1))
        outcomes = await transport.send(controls, label(1), "trace")
        assert all(isinstance(outcome, DeliveryTiming) for outcome in outcomes)
        folder = tmp_path / "run" / "v000001-aaaaaaaa"
        assert {path.name for path in folder.iterdir()} == {
            "adapter_model.safetensors",
            "adapter_config.json",
            "STABLE",
        }
        assert torch.equal(
            load_file(folder / "adapter_model.safetensors")[NAME], torch.full((4, 2), 0.1, dtype=torch.bfloat16)
        )
        config = orjson.loads((folder / "adapter_config.json").read_bytes())
        assert config == {"task_type": "CAUSAL_LM", "bias": "none", **CONFIG}
        assert list(orjson.loads((folder / "STABLE").read_bytes())["files"]) == ["adapter_model.safetensors"]
        for server in servers:
            assert server.asked == [(LOAD, {"name": "run/v000001-aaaaaaaa", "label": str(label(1))})]
            assert server.label == "default"  # the engine's own weights are the base's
        assert transport.model_of(label(1)) == str(label(1))
        await transport.close()
        assert not folder.exists()

    with_servers(2, play, tmp_path)


def test_the_base_model_has_no_name_and_is_not_sent(tmp_path: Path) -> None:
    async def play(servers: list[FakeVllm], controls: list[ControlClient]) -> None:
        transport = opened(tmp_path)
        await transport.stage(WeightUpdate(1, BASE), label(1))
        (outcome,) = await transport.send(controls, label(1), "")
        assert isinstance(outcome, DeliveryTiming)
        assert outcome.label == label(1)
        assert transport.model_of(label(1)) is None
        assert servers[0].asked == []
        await transport.stage(update(2), label(2))
        await transport.stage(WeightUpdate(3, {"w": BASE["w"].clone()}), label(3))  # the base again, in a later round
        assert transport.model_of(label(3)) is None
        assert transport.model_of(label(2)) is not None
        await transport.retire(controls, [label(1)])

    with_servers(1, play, tmp_path)


def test_old_adapters_are_unloaded_before_their_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "KEPT", 1)

    async def play(servers: list[FakeVllm], controls: list[ControlClient]) -> None:
        transport = opened(tmp_path)
        for version in (1, 2, 3):
            await transport.stage(update(version), label(version))
            await transport.send(controls, label(version), "")
        await transport.retire(controls, [label(1)])
        for server in servers:
            assert set(server.adapters) == {str(label(1)), str(label(3))}
            assert [body for path, body in server.asked if path == UNLOAD] == [{"label": str(label(2))}]
        folders = {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()}
        assert folders == {"v000001-aaaaaaaa", "v000003-aaaaaaaa"}
        await transport.retire(controls, [])
        assert all(set(server.adapters) == {str(label(3))} for server in servers)

    with_servers(2, play, tmp_path)
