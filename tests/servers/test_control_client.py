"""The control client against the tests' own server: its refusals, its stamps, and what it makes of wrong replies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from fake_model import AS_STARTED, Weights, mark_stable
from fake_vllm import FakeOptions, FakeVllm, serving
from safetensors.numpy import save_file

from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.servers.control import ControlClient
from pvg.servers.pool import HttpPool, MalformedReply
from pvg.servers.publishing import PublishingSession, WeightLabel

PATIENCE_S = 20.0
SESSION = PublishingSession(0x1800, "aa")


def tensors(version: int) -> dict[str, np.ndarray]:
    return {"w": np.full((2, 3), version, np.float32), "b": np.arange(4, dtype=np.float32)}


def publish(root: Path, version: int, file: str = "model.safetensors") -> str:
    """A folder of weights as a transport writes it; returns its name."""
    folder = root / "run" / f"v{version:06d}"
    folder.mkdir(parents=True)
    save_file(tensors(version), folder / file)
    (folder / "adapter_config.json").write_text("{}")
    mark_stable(folder, {file: (folder / file).stat().st_size})
    return f"run/{folder.name}"


def drive(
    use: Callable[[ControlClient, FakeVllm], Awaitable[Any]],
    root: Path = Path(),
    *,
    key: str = "k",
    probe_timeout_s: float = PATIENCE_S,
    **options: Any,
) -> Any:
    async def run() -> Any:
        pool = HttpPool(4, connect_timeout_s=2.0, key=key, fresh=True)
        async with FakeVllm(FakeOptions(root=root, key="k", **options)) as server:
            try:
                control = ControlClient(server.url + "/", pool, timeout_s=PATIENCE_S, probe_timeout_s=probe_timeout_s)
                return await use(control, server)
            finally:
                await pool.close()

    return asyncio.run(run())


def answered_with(
    answer: Callable[[web.Request], Any], headers: Mapping[str, str], use: Callable[[ControlClient], Awaitable[Any]]
) -> Any:
    """`use` against a server that gives `answer` as JSON to everything, with `headers`."""

    async def handler(request: web.Request) -> web.Response:
        return web.json_response(answer(request), headers=headers)

    async def run() -> Any:
        pool = HttpPool(4, connect_timeout_s=2.0)
        async with serving(handler) as url:
            try:
                return await use(ControlClient(url, pool, timeout_s=PATIENCE_S, probe_timeout_s=PATIENCE_S))
            finally:
                await pool.close()

    return asyncio.run(run())


def test_info_says_what_the_server_is() -> None:
    async def use(control: ControlClient, server: FakeVllm) -> None:
        info = await control.info()
        assert info.url == control.url == server.url
        assert (info.boot, info.label, info.paused) == (server.boot, "default", False)
        assert (info.runner, info.dtype, info.max_lora_rank, info.world_size) == ("generate", "float32", 0, 1)
        await server.restart()
        assert (await control.info()).boot != info.boot

    drive(use)


@pytest.mark.parametrize("key", ["", "wrong"])
def test_a_wrong_key_is_told_with_what_mends_it_and_changes_nothing(key: str, tmp_path: Path) -> None:
    name = publish(tmp_path, 1)

    async def use(control: ControlClient, server: FakeVllm) -> None:
        calls = [
            control.info(),
            control.load_weights(name, WeightLabel(SESSION, 1), "t"),
            control.unload_adapter(WeightLabel(SESSION, 1), "t"),
            control.pause(),
        ]
        for call in calls:
            with pytest.raises(ConfigurationError, match=rf"{server.url} refuses the control key\. .*PVG_CONTROL_KEY"):
                await call
        assert (server.label, server.info()["paused"]) == ("default", False)

    drive(use, tmp_path, key=key)


def test_a_server_that_pvg_did_not_start_is_told_apart() -> None:
    async def use(control: ControlClient, _: FakeVllm) -> None:
        plain = ControlClient(control.url + "/elsewhere", control._pool, timeout_s=1.0, probe_timeout_s=PATIENCE_S)
        with pytest.raises(MissingRequirementError, match=r"has no pvg control routes.*pvg serve"):
            await plain.info()

    drive(use)


@pytest.mark.parametrize(("name", "value"), [("max_model_len", "many"), ("label", None), ("paused", 0)])
def test_an_info_of_the_wrong_kind_is_malformed(name: str, value: object) -> None:
    info = FakeVllm(FakeOptions()).info()
    for told in (info | {name: value}, {key: found for key, found in info.items() if key != name}):
        with pytest.raises(MalformedReply, match=name):
            answered_with(lambda _, told=told: told, {}, lambda control: control.info())


def test_weights_arrive_and_the_delivery_says_what_it_took(tmp_path: Path) -> None:
    name = publish(tmp_path, 7)

    async def use(control: ControlClient, server: FakeVllm) -> None:
        label = WeightLabel(SESSION, 7)
        delivery = await control.load_weights(name, label, trace="1f")
        assert (delivery.url, delivery.label) == (server.url, label)
        assert server.fingerprint() == Weights.of(tensors(7)).fingerprint != AS_STARTED
        assert (await control.info()).label == str(label)
        assert not server.info()["paused"]
        # The server's clock and ours are one here: it got the call while we waited, and worked for less than we did.
        assert delivery.wall_ms >= delivery.rpc_ms >= delivery.parts["load_ms"] >= 20.0
        assert delivery.queue_ms == delivery.wall_ms - delivery.rpc_ms
        assert set(delivery.parts) == {"pause_ms", "load_ms", "resume_ms"}
        assert delivery.received_ns > 1_600_000_000 * 10**9
        again = await control.load_weights(name, label, trace="20")
        assert again.parts["load_ms"] == 0.0

    drive(use, tmp_path, load_ms=20.0)


STAMPS = {"x-pvg-received-ns": "1763700000000000000", "x-pvg-work-ms": "1.5"}


@pytest.mark.parametrize("missing", STAMPS)
@pytest.mark.parametrize("instead", [None, "soon", "-3", "1.2.3", "²"])
def test_a_reply_without_its_stamps_is_malformed(missing: str, instead: str | None) -> None:
    headers = {name: value for name, value in STAMPS.items() if name != missing}
    if instead is not None:
        headers[missing] = instead
    label = WeightLabel(SESSION, 1)
    with pytest.raises(MalformedReply, match=f"the header {missing} is missing or not a number"):
        answered_with(
            lambda _: {"label": str(label)}, headers, lambda control: control.load_weights("run/v1", label, "t")
        )


@pytest.mark.parametrize(
    "found", [None, [], {}, {"label": "default"}, {"label": "1800-aa/2"}, {"label": "1800-aa/1", "load_ms": "fast"}]
)
def test_a_reply_for_other_weights_is_malformed(found: Any) -> None:
    with pytest.raises(MalformedReply):
        answered_with(
            lambda _: found, STAMPS, lambda control: control.load_weights("run/v1", WeightLabel(SESSION, 1), "t")
        )
