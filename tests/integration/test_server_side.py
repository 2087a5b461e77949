"""pvg_vllm inside a real vLLM: weights arrive exactly, whatever is in flight; what must be refused is refused."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from torch import Tensor
from vllm_servers import EMBEDDED, Generated, Labels, Server, generate, language_model, perturbed, prompts, publish

from pvg.errors import ConfigurationError
from pvg.servers.control import ControlClient
from pvg.servers.pool import RefusedRequest
from pvg.servers.publishing import WeightLabel

TOLERANCE = 1e-3  # nats: float32 here and there, other kernels


class Bench:
    """A server, its control client, and the models that its labels stand for."""

    def __init__(self, server: Server, control: ControlClient, http: aiohttp.ClientSession) -> None:
        self.server = server
        self.control = control
        self.http = http
        self.modules: dict[str, Any] = {}

    async def update(self, labels: Labels, name: str, module: Any) -> WeightLabel:
        """Load what is published as `name`, of which `module` is transformers' copy."""
        label = labels.next()
        self.modules[str(label)] = module
        await self.control.load_weights(name, label, trace=f"test-{label.version}")
        return label

    async def generate(self, prompt: list[int], **options: Any) -> Generated:
        return await generate(self.http, self.server.url, prompt, **options)


@asynccontextmanager
async def at_work(server: Server) -> AsyncIterator[Bench]:
    pool = server.pool()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as http:
        try:
            yield Bench(server, server.control(pool), http)
        finally:
            await pool.close()


@pytest.fixture(scope="module")
def two_versions(server: Server) -> dict[str, Any]:
    """Published as even and odd; transformers' models by these names."""
    tensors = {"even": perturbed(EMBEDDED, 0), "odd": perturbed(EMBEDDED, 1)}
    for name, values in tensors.items():
        publish(server.root, name, values)
    return {name: language_model(EMBEDDED, values) for name, values in tensors.items()}


@pytest.fixture
def scratch(server: Server) -> Iterator[Path]:
    """A separate folder below the root."""
    folder = server.root / "scratch"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


async def refusal(control: ControlClient, name: str, label: WeightLabel) -> tuple[int, str]:
    with pytest.raises(RefusedRequest) as refused:
        await control.load_weights(name, label, trace="")
    return refused.value.status, refused.value.code


def test_log_probs_are_those_of_the_new_weights_after_every_update_to_and_fro(
    server: Server, two_versions: Mapping[str, Any]
) -> None:
    async def play() -> list[tuple[float, str]]:
        seen = []
        async with at_work(server) as bench:
            labels = Labels()
            for name in ["even", "odd", "even", "odd", "even"]:
                label = await bench.update(labels, name, two_versions[name])
                for seed, prompt in enumerate(prompts(4, 24, seed=label.version)):
                    done = await bench.generate(prompt, seed=seed, salt=str(label), prompt_log_probs=True)
                    assert done.spans == [(str(label), 0, 16)]
                    seen.append((done.gap(bench.modules), name))
        return seen

    gaps = asyncio.run(play())
    assert max(gap for gap, _ in gaps) < TOLERANCE, gaps


def test_no_prefix_of_old_weights_serves_new_ones(server: Server, two_versions: Mapping[str, Any]) -> None:
    prompt = prompts(1, 100, seed=5)[0]

    async def play() -> None:
        async with at_work(server) as bench:
            labels = Labels()
            for name in ["even", "odd"]:
                label = await bench.update(labels, name, two_versions[name])
                first = await bench.generate(prompt, max_tokens=2, salt=str(label))
                again = await bench.generate(prompt, max_tokens=2, salt=str(label))
                assert first.cached == 0
                assert again.cached >= 64
                assert max(first.gap(bench.modules), again.gap(bench.modules)) < TOLERANCE
            # One that was salted for old weights, as a request that waited while the new ones came.
            late = str(await bench.update(labels, "even", two_versions["even"]))
            await bench.update(labels, "odd", two_versions["odd"])
            done = await bench.generate(prompt, max_tokens=2, salt=late)
            assert done.cached == 0
            assert done.gap(bench.modules) < TOLERANCE

    asyncio.run(play())


def wrong_shape(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors["model.layers.2.mlp.down_proj.weight"] = tensors["model.layers.2.mlp.down_proj.weight"][:, :-8].contiguous()
    return tensors


def no_last_norm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    del tensors["model.norm.weight"]
    return tensors


def no_key_projection(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    return tensors


def one_too_many(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors["model.layers.3.mlp.down_proj.weight"] = tensors["model.layers.2.mlp.down_proj.weight"].clone()
    return tensors


@pytest.mark.parametrize("spoil", [wrong_shape, no_last_norm, no_key_projection, one_too_many])
def test_weights_that_do_not_fit_break_the_label_until_some_that_fit_arrive(
    server: Server, two_versions: Mapping[str, Any], scratch: Path, spoil: Any
) -> None:
    publish(server.root, "scratch/bad", spoil(perturbed(EMBEDDED, 1)))

    async def play() -> None:
        async with at_work(server) as bench:
            labels = Labels()
            await bench.update(labels, "even", two_versions["even"])
            bad = labels.next()
            assert await refusal(bench.control, "scratch/bad", bad) == (500, "load_failed")
            info = await bench.control.info()
            assert (info.label, info.paused) == (f"broken:{bad}", False)
            done = await bench.generate(prompts(1, 20)[0])
            assert done.spans == [(f"broken:{bad}", 0, 16)]
            bench.modules[str(bad)] = two_versions["odd"]  # the same version again, whole
            await bench.control.load_weights("odd", bad, trace="")
            done = await bench.generate(prompts(1, 20)[0], prompt_log_probs=True)
            assert done.gap(bench.modules) < TOLERANCE
            assert done.spans == [(str(bad), 0, 16)]

    asyncio.run(play())


def test_the_key_opens_everything_but_generation(server: Server) -> None:
    async def play() -> None:
        async with at_work(server) as bench:
            info = await bench.control.info()
            assert (info.runner, info.dtype, info.max_lora_rank) == ("generate", "float32", 0)
            assert info.prefix_caching
            for route in ["/pause", "/weight_info", "/docs", "/v1/embeddings", "/health/", "/reset_prefix_cache"]:
                async with bench.http.post(server.url + route) as response:
                    assert (route, response.status) == (route, 401)
                    assert (await response.json())["error"]["code"] == "wrong_key"
            for route in ["/health", "/v1/models", "/version"]:
                async with bench.http.get(server.url + route) as response:
                    assert (route, response.status) == (route, 200)
            key = {"Authorization": f"Bearer {server.key}"}
            for route in ["/collective_rpc", "/v1/load_lora_adapter", "/adapters"]:
                async with bench.http.post(server.url + route, json={}, headers=key) as response:
                    assert (route, response.status) == (route, 403)
            async with bench.http.post(server.url + "/pvg/weights", data=b"{", headers=key) as response:
                assert response.status == 400
            pool = server.pool(key="wrong")
            try:
                with pytest.raises(ConfigurationError, match="refuses the control key"):
                    await server.control(pool).info()
            finally:
                await pool.close()

    asyncio.run(play())
