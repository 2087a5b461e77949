"""A server with OpenAI's routes, whose behaviour a test writes as a function of the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = Callable[[str, Any], Any]  # (route, body) -> JSON, or a web.Response


@dataclass
class OpenAiServer:
    """`asked`: (route, body, headers) of each request. `most`: the largest number of requests at one time."""

    answer: Answer
    delay_s: float = 0.0
    url: str = ""
    asked: list[tuple[str, Any, dict[str, str]]] = field(default_factory=list)
    now: int = 0
    most: int = 0

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        route = request.path.removeprefix("/v1/")
        self.asked.append((route, body, dict(request.headers)))
        self.now, self.most = self.now + 1, max(self.most, self.now + 1)
        await asyncio.sleep(self.delay_s)
        self.now -= 1
        found = self.answer(route, body)
        return found if isinstance(found, web.Response) else web.json_response(found)


@asynccontextmanager
async def serving(answer: Answer, delay_s: float = 0.0) -> AsyncIterator[OpenAiServer]:
    server = OpenAiServer(answer, delay_s)
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()


def said(text: str) -> dict[str, Any]:
    """A chat completion with this text."""
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}
