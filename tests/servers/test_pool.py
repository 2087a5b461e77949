"""How many connections the pool opens, keeps and closes; and what it says of every way in which a server or the
network fails."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from fake_vllm import FakeOptions, FakeVllm, serving
from fault_proxy import Fault, FaultProxy
from patience import until

from pvg.rollout.vllm_requests import GENERATE
from pvg.servers.control import ARRAYS
from pvg.servers.pool import (
    ConnectionBroken,
    HttpPool,
    MalformedReply,
    RefusedRequest,
    ReplyTimeout,
    ServerFault,
    ServerUnreachable,
)

PATIENCE_S = 20.0
LONG = 300  # tokens of a reply that does not fit into one packet


def body(tokens: int = LONG, *, stream: bool = False, name: str = "r") -> dict[str, Any]:
    sampling = {"max_tokens": tokens, "seed": 1, "logprobs": 0, "extra_args": ARRAYS}
    return {"request_id": name, "token_ids": [5, 6, 7], "sampling_params": sampling, "stream": stream}


async def whole(pool: HttpPool, url: str, timeout_s: float | None = PATIENCE_S, **asked: Any) -> int:
    reply = await pool.request("POST", url + GENERATE, body(**asked), timeout_s=timeout_s)
    return tokens_of(reply.json())


def tokens_of(reply: Any) -> int:
    return len(base64.b64decode(reply["choices"][0]["token_ids"])) // 4


async def streamed(pool: HttpPool, url: str, timeout_s: float | None = PATIENCE_S, **asked: Any) -> int:
    async with pool.events(url + GENERATE, body(stream=True, **asked), timeout_s=timeout_s) as events:
        return sum([tokens_of(event) async for event in events if isinstance(event, dict)])


WAYS = [whole, streamed]
Way = Callable[..., Awaitable[int]]


def drive(
    use: Callable[[HttpPool, FakeVllm, FaultProxy], Awaitable[Any]],
    connections: int = 8,
    token_ms: float = 0.0,
    **options: Any,
) -> Any:
    async def run() -> Any:
        server = FakeVllm(FakeOptions(token_ms=token_ms))
        pool = HttpPool(connections, connect_timeout_s=0.5 if connections == 8 else 5.0, **options)
        async with server, FaultProxy(server.url) as proxy:
            try:
                return await use(pool, server, proxy)
            finally:
                await pool.close()

    return asyncio.run(run())


def fault_of(way: Way, fault: Fault, timeout_s: float = PATIENCE_S) -> ServerFault:
    async def use(pool: HttpPool, _: FakeVllm, proxy: FaultProxy) -> ServerFault:
        proxy.plan(fault)
        with pytest.raises(ServerFault) as caught:
            await way(pool, proxy.url, timeout_s)
        assert caught.value.url == proxy.url + GENERATE
        assert str(caught.value).startswith(proxy.url)
        assert "\n" not in str(caught.value)
        assert await way(pool, proxy.url) == LONG  # the next request finds a connection that works
        return caught.value

    found = drive(use)
    assert isinstance(found, ServerFault)
    return found


# Each with the fault of a whole reply, and of a stream.
FAULTS: list[tuple[Fault, type[ServerFault], type[ServerFault]]] = [
    *((Fault("reset", after), ConnectionBroken, ConnectionBroken) for after in (0, 40, 700)),
    *((Fault("cut", after), ConnectionBroken, ConnectionBroken) for after in (0, 40, 700)),
    (Fault("truncated"), ConnectionBroken, ConnectionBroken),
    (Fault("hang"), ReplyTimeout, ReplyTimeout),
    (Fault("dribble", seconds=0.02), ReplyTimeout, ReplyTimeout),
    (Fault("error"), RefusedRequest, RefusedRequest),
    (Fault("malformed"), MalformedReply, ConnectionBroken),  # no event came, and no end
    (Fault("short_json"), MalformedReply, ConnectionBroken),
    (Fault("garbage"), MalformedReply, MalformedReply),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "of_whole", "of_stream"), FAULTS)
def test_each_fault_of_a_reply_has_its_class(fault: Fault, of_whole: type, of_stream: type) -> None:
    timeout_s = 0.3 if of_whole is ReplyTimeout else PATIENCE_S
    for way, kind in ((whole, of_whole), (streamed, of_stream)):
        found = fault_of(way, fault, timeout_s)
        assert type(found) is kind
        assert found.sent
        if isinstance(found, RefusedRequest):
            assert (found.status, found.code, found.message) == (500, "the_proxy", "EngineCore died")


@pytest.mark.parametrize("way", WAYS)
def test_where_nobody_listens_nothing_was_sent(way: Way) -> None:
    async def use(pool: HttpPool, server: FakeVllm, proxy: FaultProxy) -> None:
        await proxy.refuse()
        with pytest.raises(ServerUnreachable) as caught:
            await way(pool, proxy.url)
        assert not caught.value.sent
        await proxy.accept()
        assert await way(pool, proxy.url) == LONG
        assert sum(server.received.values()) == 1

    drive(use)


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_dies_ends_its_requests_as_broken_and_is_then_unreachable(way: Way) -> None:
    async def use(pool: HttpPool, server: FakeVllm, _: FaultProxy) -> None:
        server.options.token_ms = 5.0
        asked = [asyncio.create_task(way(pool, server.url, None)) for _ in range(4)]
        await until(lambda: server.running == 4)
        await server.kill()
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            assert type(outcome) is ConnectionBroken
        with pytest.raises(ServerUnreachable):
            await way(pool, server.url)
        server.options.token_ms = 0.0
        await server.restart()
        assert await way(pool, server.url) == LONG

    drive(use)


# --- replies that only a server of the test's own gives --------------------------------------------------------------


def answered_by(handler: Callable[[web.Request], Awaitable[web.StreamResponse]], way: Way) -> Any:
    """What `way` makes of the handler's reply: its result or its fault."""

    async def run() -> Any:
        pool = HttpPool(8, connect_timeout_s=0.5)
        async with serving(handler) as url:
            try:
                return await way(pool, url)
            except ServerFault as fault:
                return fault
            finally:
                await pool.close()

    return asyncio.run(run())


def in_pieces(*pieces: bytes) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    return handler


EVENT = b'data: {"choices": [{"token_ids": "AQAAAA=="}]}\n\n'


def test_events_come_whole_however_they_are_cut() -> None:
    pieces = b": a comment\n\n" + EVENT.replace(b"\n\n", b"\r\n\r\n") + b"event: x\n" + EVENT + b"data: [DONE]\n\n"
    assert answered_by(in_pieces(*[pieces[i : i + 1] for i in range(len(pieces))]), streamed) == 2


@pytest.mark.parametrize("piece", [b"data: {\n\n", b"data: \xff\xfe\n\n", b"data:\n\n"])
def test_an_event_that_is_no_json_is_malformed(piece: bytes) -> None:
    assert type(answered_by(in_pieces(EVENT, piece, EVENT), streamed)) is MalformedReply


def test_an_event_without_end_is_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pvg.servers.pool.LONGEST_EVENT", 1 << 20)
    assert type(answered_by(in_pieces(*[b"x" * (1 << 18)] * 32), streamed)) is MalformedReply


def test_a_redirect_is_refused_and_not_followed() -> None:
    """The key must not go where a reply says."""

    async def elsewhere(_: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect("/elsewhere")

    for way in WAYS:
        found = answered_by(elsewhere, way)
        assert isinstance(found, RefusedRequest)
        assert found.status == 307


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ('{"error": {"message": "no such model", "code": 404}}', "404", "no such model"),
        ('{"error": "Failed to pause"}', "", "Failed to pause"),
        ('{"detail": "Not Found"}', "", "Not Found"),
        ('{"detail": [{"msg": "field required"}]}', "", "[{'msg': 'field required'}]"),
        ("Internal Server Error", "", "Internal Server Error"),
        ("", "", ""),
        ("[1]", "", "[1]"),
    ],
)
def test_what_a_refusal_says_in_each_of_its_forms(text: str, code: str, message: str) -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.Response(status=404, text=text)

    found = answered_by(refuse, whole)
    assert isinstance(found, RefusedRequest)
    assert (found.code, found.message) == (code, message)
    assert str(found).endswith(f"HTTP 404: {message or 'no reason given'}")


# --- connections ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_requests_that_the_limits_cover_are_all_on_the_server_at_once_and_none_waits(way: Way) -> None:
    async def use(pool: HttpPool, server: FakeVllm, _: FaultProxy) -> None:
        server.freeze()
        asked = [asyncio.create_task(way(pool, server.url, tokens=4)) for i in range(150)]
        await until(lambda: server.running == 150)
        server.thaw()
        await asyncio.gather(*asked)
        assert server.connections == 150

    drive(use, 150, token_ms=5.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("fresh", "opened"), [(False, 1), (True, 5)])
def test_a_connection_is_kept_for_the_next_request_but_not_in_a_fresh_pool(way: Way, fresh: bool, opened: int) -> None:
    async def use(pool: HttpPool, server: FakeVllm, _: FaultProxy) -> None:
        for _i in range(5):
            await way(pool, server.url, tokens=4)
        assert server.connections == opened

    drive(use, fresh=fresh)


def test_a_fresh_pool_does_not_wait_behind_streams() -> None:
    """The control path: 150 streams are open, and the call gets a separate connection at once."""

    async def use(pool: HttpPool, server: FakeVllm, _: FaultProxy) -> None:
        streams = [asyncio.create_task(streamed(pool, server.url, tokens=1000)) for i in range(150)]
        await until(lambda: server.running == 150)
        control = HttpPool(1, connect_timeout_s=5.0, fresh=True)
        await control.request("GET", server.url + "/pvg/info", timeout_s=PATIENCE_S)
        assert server.running == 150
        await control.close()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await until(lambda: server.running == 0)

    drive(use, 150, token_ms=5.0)


def test_a_stream_that_is_left_early_ends_its_request_on_the_server() -> None:
    async def use(pool: HttpPool, server: FakeVllm, _: FaultProxy) -> None:
        async with pool.events(server.url + GENERATE, body(1000, stream=True), timeout_s=None) as events:
            async for _ in events:
                break
        await until(lambda: server.running == 0)
        assert (dict(server.aborted), dict(server.finished)) == ({"r": 1}, {})
        await whole(pool, server.url, tokens=4)
        assert server.connections == 2

    drive(use, token_ms=5.0)


def test_the_key_goes_with_every_request() -> None:
    async def use(pool: HttpPool, server: FakeVllm, _: FaultProxy) -> None:
        server.options.key = "secret"
        assert (await pool.request("GET", server.url + "/pvg/info", timeout_s=PATIENCE_S)).status == 200

    drive(use, key="secret")
