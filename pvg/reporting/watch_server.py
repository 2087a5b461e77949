"""The server of `pvg watch`: the page of one run, and the page with all its solutions.

    async with WatchServer.start(run, port=0) as server:
        print(server.url)

| address | answer |
|---|---|
| `/` | the report, which loads itself again; 304 if it has the ETag that the browser names |
| `/rollouts.html` | the page with all solutions |

Invariants: it listens on 127.0.0.1 only, and answers only requests whose Host header names this machine. Otherwise a
page of another site could read the run with a DNS name that points here. It answers GET and HEAD only. One thread reads
the run, and only when a browser asks.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from aiohttp import web

from pvg.errors import MissingRequirementError, PvgError, reason
from pvg.reporting.live_page import LIVE, ROLLOUTS, LiveRun
from pvg.reporting.rollouts_file import rollouts_kind
from pvg.reporting.table import PageKind, policy_of
from pvg.store.run_directory import RunDirectory

HOST = "127.0.0.1"
NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class WatchServer:
    """Use `WatchServer.start`."""

    url: str
    port: int

    def __init__(self, run: RunDirectory) -> None:
        self._live = LiveRun(run)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pvg-watch")

    @classmethod
    @asynccontextmanager
    async def start(cls, run: RunDirectory, port: int) -> AsyncIterator[WatchServer]:
        """Serve until the block ends. Port 0 is any free one. Raises MissingRequirementError if the port cannot be
        used."""
        server = cls(run)
        app = web.Application(middlewares=[_guard])
        app.on_response_prepare.append(_harden)
        app.add_routes(
            [
                web.get("/", server._page),
                web.get(f"/{ROLLOUTS}", server._rollouts),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, HOST, port).start()
            except OSError as error:
                raise PortInUseError(
                    f"Port {port} of {HOST} cannot be used: {reason(error)}.",
                    "Choose another port with --port, or 0 for any free one.",
                    taken=error.errno == errno.EADDRINUSE,
                ) from None
            server.port = int(runner.addresses[0][1])
            server.url = f"http://{HOST}:{server.port}/"
            yield server
        finally:
            await runner.cleanup()
            server._thread.shutdown(cancel_futures=True)

    async def _work(self, function: Callable[[], str]) -> str:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def _page(self, request: web.Request) -> web.Response:
        text = await self._work(self._live.page)
        tag = hashlib.sha256(text.encode()).hexdigest()
        if any(known.value == tag for known in request.if_none_match or ()):
            return web.Response(status=304, headers={"ETag": f'"{tag}"'})
        answer = _html(text, LIVE)
        answer.etag = tag
        return answer

    async def _rollouts(self, _: web.Request) -> web.Response:
        return _html(await self._work(self._live.solutions), rollouts_kind("/"))


class PortInUseError(MissingRequirementError):
    """The port cannot be used. `taken`: another program listens on it."""

    def __init__(self, message: str, remedy: str, *, taken: bool) -> None:
        super().__init__(message, remedy)
        self.taken = taken


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        name = urlsplit(f"//{request.headers.get('Host', '')}").hostname
    except ValueError:
        name = None
    if name not in NAMES:
        raise web.HTTPForbidden(text="pvg watch answers only requests to 127.0.0.1 or localhost.")
    try:
        return await handler(request)
    except PvgError as error:
        raise web.HTTPInternalServerError(text=str(error)) from error


async def _harden(_: web.Request, answer: web.StreamResponse) -> None:
    answer.headers.update(HEADERS)


def _html(text: str, kind: PageKind) -> web.Response:
    answer = web.Response(
        text=text,
        content_type="text/html",
        headers={"Content-Security-Policy": f"{policy_of(kind)}; frame-ancestors 'none'"},
    )
    answer.enable_compression()
    return answer
