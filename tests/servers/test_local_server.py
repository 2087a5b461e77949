"""The server behind `pvg view --live` and `pvg serve --player verifier`: clients that are silent, leave or send
nonsense."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import orjson
import pytest

pytestmark = pytest.mark.slow

# Room for 20 connections.
SERVER = """
import asyncio, resource, sys
from aiohttp import web
from pvg.servers import process

async def length(request):
    return web.json_response(len(await request.read()))

async def much(request):
    return web.Response(body=bytes(1 << 24))

async def serve():
    routes = [web.post("/length", length), web.get("/much", much)]
    error = lambda text, status: web.json_response({"error": text}, status=status)
    async with process.LocalServer.start(routes, 0, error, browsers=False) as server:
        print(server.port, flush=True)
        await asyncio.sleep(600)

resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
process.SILENCE_S = process.BODY_S = 3.0  # a busy machine may need a second for a request
if sys.argv[1] == "uvloop":
    import uvloop
    uvloop.run(serve())
else:
    asyncio.run(serve())
"""
HOST = b"Host: 127.0.0.1\r\n"
END = b"Connection: close\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextmanager
def serving(loop: str) -> Iterator[int]:
    """The port of a server in another process, which must print no line of errors."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, loop], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()
        assert process.stderr is not None
        assert process.stderr.read() == ""


@asynccontextmanager
async def sent(port: int, data: bytes) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
    try:
        writer.write(data)
        await writer.drain()
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer(port: int, data: bytes) -> tuple[int, bytes]:
    """Status and body; (0, b"") if the server closes the connection."""
    async with sent(port, data) as (reader, _), asyncio.timeout(60):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return int(head.split()[1]) if head else 0, body


def post(body: bytes, more: bytes = b"", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"POST /length HTTP/1.1\r\n" + HOST + more + f"Content-Length: {size}\r\n".encode() + END + body


async def wrong_requests(port: int) -> None:
    assert await answer(port, post(b"four")) == (200, b"4")
    wrong = {
        post(b"no gzip", b"Content-Encoding: gzip\r\n"): 400,
        post(b"none", b"Content-Encoding: deflate\r\n"): 400,
        b"\x00\x01\r\n\r\n": 400,
        b"GET /" + b"1" * 5000 + b" HTTP/1.1\r\n" + HOST + END: 404,
        b"GET /" + b"1" * 50_000 + b" HTTP/1.1\r\n" + HOST + END: 400,
        b"POST /length HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n" + END + b"no size\r\n": 400,
        post(b"x", b"Origin: http://127.0.0.1\r\n"): 403,
        post(b"a part", length=1000): 408,
        post(bytes(1 << 21)): 413,
    }
    for request, status in wrong.items():
        found, body = await answer(port, request)
        assert found == status, request[:80]
        assert orjson.loads(body)["error"]
    assert await answer(port, b"POST /len") == (0, b"")  # half a head


async def clients_that_leave(port: int) -> None:
    for request in [post(b"a part", length=1000), b"GET /much HTTP/1.1\r\n" + HOST + END, b"GET /m", b""] * 3:
        async with sent(port, request) as (reader, _):
            if b"much" in request:
                await reader.read(100)
    assert await answer(port, post(b"four")) == (200, b"4")


async def more_clients_than_files(port: int) -> None:
    """Half-open connections and clients that read nothing take all places for SILENCE_S, and then others are served."""
    much = b"GET /much HTTP/1.1\r\n" + HOST + END
    async with asyncio.timeout(120):
        silent = [sent(port, much if number % 3 else b"POST /len") for number in range(40)]
        for each in silent:
            await each.__aenter__()
        found = await asyncio.gather(*(answer(port, post(b"four")) for _ in range(40)))
        assert found == [(200, b"4")] * 40
        for each in silent:
            await each.__aexit__(None, None, None)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("clients", [wrong_requests, clients_that_leave, more_clients_than_files])
def test_a_server_outlives_its_clients_without_a_line(
    loop: str, clients: Callable[[int], Coroutine[Any, Any, None]]
) -> None:
    with serving(loop) as port:
        asyncio.run(clients(port))
