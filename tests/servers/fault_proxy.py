"""`FaultProxy`: a TCP proxy that does to a server's replies what networks and dying servers do.

async with FaultProxy(server.url) as proxy:
    proxy.plan(Fault("reset", after=200), Fault("hang"))   # for the next two connections; then `proxy.default`
    proxy.default = Fault("error")
        proxy.only = "/inference/"                             # other connections pass as they are
    proxy.reset_all()                                      # what is open now ends at once
    await proxy.refuse()                                   # nothing listens; `accept` undoes it
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

Kind = Literal[
    "none", "reset", "cut", "dribble", "hang", "error", "busy", "malformed", "truncated", "garbage", "short_json"
]

RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: closing sends RST
SLOW_PIECE = 16  # bytes of a dribble


@dataclass(frozen=True)
class Fault:
    """What happens to one connection's replies.

    reset, cut: after `after` bytes of the reply, with a RST or silently (FIN). dribble: pieces of 16 bytes, `seconds`
    between them. hang: accepted, read, never answered. error: a 500. busy: a 429. malformed: 200 and no JSON.
    short_json: 200 and the first half of a JSON object. truncated: fewer bytes than Content-Length tells. garbage:
    bytes that are no HTTP.
    """

    kind: Kind = "none"
    after: int = 0
    seconds: float = 0.0


def _canned(status: str, body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


_CANNED: dict[str, bytes] = {
    "error": _canned("500 Internal Server Error", b'{"error": {"message": "EngineCore died", "code": "the_proxy"}}'),
    "busy": _canned("429 Too Many Requests", b'{"error": "try again later"}'),
    "malformed": _canned("200 OK", b"<html></html>"),
    "short_json": _canned("200 OK", b'{"choices": ['),
    "truncated": _canned("200 OK", b'{"choices": [', length=4096),
    "garbage": bytes(range(128, 256)) + b"\r\n\r\n",
}


class FaultProxy:
    def __init__(self, upstream: str, default: Fault | None = None) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.default = default or Fault()
        self.only = ""  # faults are for connections whose first request is to a path that begins so
        self._plan: deque[Fault] = deque()
        self._port = 0
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def plan(self, *faults: Fault) -> None:
        """One for each of the connections to come, in their order."""
        self._plan.extend(faults)

    async def __aenter__(self) -> FaultProxy:
        await self.accept()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def accept(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, backlog=1024)
        self._port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Stop listening: what comes is refused, what is open stays."""
        if self._server is not None:
            self._server.close()
            self._server = None
            await asyncio.sleep(0)

    def reset_all(self) -> None:
        """End every open connection with a RST."""
        for task, writer in list(self._open.items()):
            _reset(writer)
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = writer
        try:
            first = await reader.read(1 << 16) if self.only else b""
            chosen = not self.only or first.split(b" ", 2)[1].startswith(self.only.encode())
            fault = Fault() if not chosen else self._plan.popleft() if self._plan else self.default
            await self._through(first, reader, writer, fault)
        except (ConnectionError, asyncio.CancelledError):
            pass  # either side has gone, or the test is over
        finally:
            del self._open[task]
            writer.close()

    async def _through(
        self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault
    ) -> None:
        if fault.kind == "hang":
            while await reader.read(1 << 16):
                pass
            return
        if fault.kind in _CANNED:
            await _read_request(first, reader)
            writer.write(_CANNED[fault.kind])
            await writer.drain()
            return
        from_server, to_server = await asyncio.open_connection(*self._upstream)
        forward = asyncio.ensure_future(self._forward(first, reader, to_server))
        try:
            await self._back(from_server, writer, fault)
        finally:
            forward.cancel()
            to_server.close()

    async def _forward(self, first: bytes, reader: asyncio.StreamReader, to_server: asyncio.StreamWriter) -> None:
        try:
            data = first or await reader.read(1 << 16)
            while data:
                to_server.write(data)
                await to_server.drain()
                data = await reader.read(1 << 16)
        except ConnectionError:
            pass
        to_server.close()  # the client has gone: so does its connection to the server

    async def _back(self, from_server: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault) -> None:
        passed = 0
        while data := await from_server.read(1 << 16):
            if fault.kind in ("reset", "cut") and passed + len(data) >= fault.after:
                writer.write(data[: fault.after - passed])
                await writer.drain()
                if fault.kind == "reset":
                    _reset(writer)
                return
            passed += len(data)
            step = SLOW_PIECE if fault.kind == "dribble" else len(data)
            for first in range(0, len(data), step):
                writer.write(data[first : first + step])
                await writer.drain()
                if fault.kind == "dribble":
                    await asyncio.sleep(fault.seconds)


async def _read_request(first: bytes, reader: asyncio.StreamReader) -> None:
    """One request with its body, of which `first` has been read."""
    data = first
    while b"\r\n\r\n" not in data:
        data += await _more(reader)
    head, _, body = data.partition(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    while len(body) < length:
        body += await _more(reader)


async def _more(reader: asyncio.StreamReader) -> bytes:
    if data := await reader.read(1 << 16):
        return data
    raise ConnectionError("the client has gone")


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
