"""Servers that are added and removed while requests are in flight, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from vllm_drills import KEY, Drill, FakeOptions, FakeVllm, fingerprint, request, run, until

from pvg.errors import ServerUnavailableError

pytestmark = pytest.mark.slow


@asynccontextmanager
async def another(root: Path, *, start: bool = True, max_model_len: int = 2048) -> AsyncIterator[FakeVllm]:
    server = FakeVllm(FakeOptions(root=root, key=KEY, token_ms=1.0, max_model_len=max_model_len))
    await server.start()
    if not start:
        await server.kill()
    try:
        yield server
    finally:
        await server.kill()


def test_an_added_server_gets_the_newest_weights_before_its_first_request(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        await d.publish(1)
        async with another(tmp_path) as server:
            d.engine.served.add(server.url)
            await d.ask_all([request(i) for i in range(8)])  # does not wait for it
            await until(lambda: len(d.up()) == 2)
            assert server.fingerprint() == fingerprint(1)
            assert server.calls["/pvg/weights"] == 1
            await d.ask_all([request(100 + i) for i in range(16)])
            assert sum(server.finished.values()) == 8
            await d.publish(2)
            assert {one.fingerprint() for one in (server, *d.servers)} == {fingerprint(2)}
            assert d.events.named("server.added") == [{"event": "server.added", "server": server.url}]

    run(use, tmp_path, servers=1)


def test_a_removed_server_ends_its_requests_and_gets_no_others(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        tasks = [asyncio.create_task(d.ask(request(i, 40, stops=False))) for i in range(8)]
        await until(lambda: d.running() == 8)
        removing = asyncio.create_task(d.engine.served.remove(d.proxies[0].url))
        await asyncio.sleep(0)
        received = sum(d.servers[0].received.values())
        await d.ask_all([request(100 + i, 4) for i in range(8)])
        assert not removing.done()
        await d.publish(1)
        await removing
        assert d.servers[0].running == 0
        assert sum(d.servers[0].received.values()) == received == 4
        assert d.servers[0].fingerprint() == fingerprint(0)  # nothing needs its weights any more
        await asyncio.gather(*tasks)
        assert d.events.named("retry") == []
        assert d.up() == [d.proxies[1].url]
        await asyncio.sleep(0.2)  # the last probe may still be on its way through the proxy
        asked = d.servers[0].calls["/pvg/info"]
        await asyncio.sleep(0.2)  # four times the time between two probes
        assert d.servers[0].calls["/pvg/info"] == asked

    run(use, tmp_path, token_ms=20.0)


def test_requests_that_a_removed_server_does_not_end_in_time_go_to_the_others(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        tasks = [asyncio.create_task(d.ask(request(i, 40, stops=False))) for i in range(8)]
        await until(lambda: d.running() == 8)
        await d.engine.served.remove(d.proxies[0].url, drain_s=0.0)
        found = await asyncio.gather(*tasks)
        assert [completion.request_id for completion in found] == [f"r{i}" for i in range(8)]
        assert {retry["server"] for retry in d.events.named("retry")} == {d.proxies[0].url}
        assert "was removed" in d.events.named("retry")[0]["why"]
        await until(lambda: d.servers[0].running == 0)

    run(use, tmp_path, token_ms=10.0)


def test_without_any_server_requests_wait_for_one_that_is_added(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        await d.engine.served.remove(d.proxies[0].url)
        with pytest.raises(ServerUnavailableError, match=r"No server has been up for 0\.3 s: there is none"):
            await d.engine.generate(request(1))
        asked = asyncio.create_task(d.ask(request(2)))
        d.engine.served.add(d.proxies[0].url)
        await asked

    run(use, tmp_path, servers=1, unavailable_s=0.3)


def test_requests_wait_for_a_server_that_is_being_started(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        fleet, url = d.engine.served.fleet, d.proxies[0].url
        await d.engine.served.remove(url)
        fleet.starting = 1
        asked = asyncio.create_task(d.ask(request(1)))
        await asyncio.sleep(1.0)  # five times `unavailable_s`
        assert not asked.done()
        d.engine.served.add(url)
        await asked

    run(use, tmp_path, servers=1, unavailable_s=0.2)
