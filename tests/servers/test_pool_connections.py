"""How many connections the pool opens, keeps and closes; what the server sees of a caller that has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_vllm import FakeOptions, FakeVllm
from patience import until

from pvg.servers.pool import HttpPool

GENERATE = "/inference/v1/generate"
PATIENCE_S = 20.0


def body(tokens: int, *, stream: bool = False, name: str = "r") -> dict[str, Any]:
    sampling = {"max_tokens": tokens, "seed": 1, "logprobs": 0}
    return {"request_id": name, "token_ids": [5, 6, 7], "sampling_params": sampling, "stream": stream}


def drive(use: Callable[[HttpPool, FakeVllm], Awaitable[None]], connections: int = 64, **options: Any) -> None:
    async def run() -> None:
        pool = HttpPool(connections, connect_timeout_s=5.0, **options)
        async with FakeVllm(FakeOptions(token_ms=5.0)) as server:
            try:
                await use(pool, server)
            finally:
                await pool.close()

    asyncio.run(run())


async def ask(pool: HttpPool, server: FakeVllm, name: str, tokens: int = 4) -> None:
    await pool.request("POST", server.url + GENERATE, body(tokens, name=name), timeout_s=PATIENCE_S)


async def read(pool: HttpPool, server: FakeVllm, name: str, tokens: int = 4) -> int:
    async with pool.events(server.url + GENERATE, body(tokens, stream=True, name=name), timeout_s=PATIENCE_S) as events:
        return len([event async for event in events])


@pytest.mark.parametrize("way", [ask, read])
def test_requests_that_the_limits_cover_are_all_on_the_server_at_once_and_none_waits(way: Any) -> None:
    async def use(pool: HttpPool, server: FakeVllm) -> None:
        server.freeze()
        asked = [asyncio.create_task(way(pool, server, f"r{i}")) for i in range(150)]
        await until(lambda: server.running == 150)
        server.thaw()
        await asyncio.gather(*asked)
        assert server.connections == 150

    drive(use, 150)


@pytest.mark.parametrize("way", [ask, read])
def test_a_connection_is_kept_for_the_next_request(way: Any) -> None:
    async def use(pool: HttpPool, server: FakeVllm) -> None:
        for i in range(5):
            await way(pool, server, f"r{i}")
        assert server.connections == 1

    drive(use)


@pytest.mark.parametrize("way", [ask, read])
def test_a_fresh_pool_opens_one_for_every_request(way: Any) -> None:
    async def use(pool: HttpPool, server: FakeVllm) -> None:
        for i in range(5):
            await way(pool, server, f"r{i}")
        assert server.connections == 5

    drive(use, fresh=True)


def test_a_fresh_pool_does_not_wait_behind_streams() -> None:
    """The control path: 150 streams are open, and the call gets a separate connection at once."""

    async def use(pool: HttpPool, server: FakeVllm) -> None:
        streams = [asyncio.create_task(read(pool, server, f"r{i}", tokens=1000)) for i in range(150)]
        await until(lambda: server.running == 150)
        control = HttpPool(1, connect_timeout_s=5.0, fresh=True)
        await control.request("GET", server.url + "/pvg/info", timeout_s=PATIENCE_S)
        assert server.running == 150
        await control.close()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await until(lambda: server.running == 0)

    drive(use, 150)


def test_a_stream_that_is_left_early_ends_its_request_on_the_server() -> None:
    async def use(pool: HttpPool, server: FakeVllm) -> None:
        async with pool.events(server.url + GENERATE, body(1000, stream=True), timeout_s=None) as events:
            async for _ in events:
                break
        await until(lambda: server.running == 0)
        assert (dict(server.aborted), dict(server.finished)) == ({"r": 1}, {})
        await ask(pool, server, "next")
        assert server.connections == 2

    drive(use)


def test_the_key_goes_with_every_request() -> None:
    async def use(pool: HttpPool, server: FakeVllm) -> None:
        server.options.key = "secret"
        assert (await pool.request("GET", server.url + "/pvg/info", timeout_s=PATIENCE_S)).status == 200

    drive(use, key="secret")
