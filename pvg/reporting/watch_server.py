"""The server of `pvg watch`: the live page of one run, its events, and its stored solutions.

    async with WatchServer.start(run, port=0) as server:
        print(server.url)

| address | answer |
|---|---|
| `/` | the live page |
| `/events` | server-sent events: `run`, with the state of the run as JSON |
| `/parts/NAME` | one part of the page, as JSON: title and HTML |
| `/rollouts` | the list of stored solutions; the fields of the form are its parameters |
| `/rollouts/ROUND/SHARD/ROW` | one solution |

Invariants: it listens on 127.0.0.1 only, and answers only requests whose Host header names this machine. Otherwise a
page of another site could read the run with a DNS name that points here. It answers GET and HEAD only. One thread reads
the run; nothing is read while no browser is connected. A client that reads slowly misses events, but not the last one.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar
from urllib.parse import urlsplit

import orjson
from aiohttp import web

from pvg.errors import MissingRequirementError, PvgError, reason
from pvg.reporting.live_page import INTERVAL_S, SHARE, LiveRun, live_kind
from pvg.reporting.rollouts_page import KIND, rollout_page, rollouts_page
from pvg.reporting.table import PageKind, policy_of
from pvg.store.run_directory import RunDirectory

HOST = "127.0.0.1"
NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
MOST_STREAMS = 32  # event streams at once
KEEP_ALIVE_S = 15.0  # between two bytes of a stream, so that a tunnel does not close it
READ_S = 2.0  # of new shards per request; a page that has not read all of them says so
RETRY_MS = 2000
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Answer = TypeVar("Answer")


class WatchServer:
    """Use `WatchServer.start`."""

    url: str
    port: int
    _follower: asyncio.Task[None]

    def __init__(self, run: RunDirectory) -> None:
        self._live = LiveRun(run)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pvg-watch")
        self._streams: set[asyncio.Event] = set()
        self._event = b""
        self._connected = asyncio.Event()

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
                web.get("/events", server._stream),
                web.get("/parts/{name}", server._part),
                web.get("/rollouts", server._list),
                web.get(r"/rollouts/{round:\d+}/{label}/{row:\d+}", server._rollout),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        server._follower = asyncio.create_task(server._follow())
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
            server._follower.cancel()
            await asyncio.gather(server._follower, return_exceptions=True)
            await runner.cleanup()
            server._thread.shutdown(cancel_futures=True)

    async def follow(self) -> None:
        """Returns never. Raises the error that ends the following of the run."""
        await self._follower

    # --- the run ---------------------------------------------------------------------------------------------------

    async def _work(self, function: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def _follow(self) -> None:
        """Look at the run once a second while a browser is connected, less often if that takes long; wake up the
        streams."""
        while True:
            await self._connected.wait()
            began = time.monotonic()
            event = await self._work(self._look)
            took_s = time.monotonic() - began
            if event != self._event:
                self._event = event
                for woken in self._streams:
                    woken.set()
            if not self._streams:
                self._connected.clear()
            await asyncio.sleep(max(INTERVAL_S, SHARE * took_s))

    def _look(self) -> bytes:
        self._live.update()
        return orjson.dumps(self._live.event(), option=orjson.OPT_NON_STR_KEYS)

    # --- answers ---------------------------------------------------------------------------------------------------

    async def _page(self, _: web.Request) -> web.Response:
        def draw() -> str:
            self._live.update()
            return self._live.page()

        return _html(await self._work(draw), live_kind())

    async def _part(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        found = await self._work(lambda: self._live.part(name))
        if found is None:
            raise web.HTTPNotFound(text=f"This page has no part {name!r}.")
        answer = web.Response(body=orjson.dumps(found), content_type="application/json")
        answer.enable_compression()
        return answer

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if len(self._streams) >= MOST_STREAMS:
            raise web.HTTPServiceUnavailable(text=f"{MOST_STREAMS} pages are open already. Close one.")
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        await answer.prepare(request)
        woken = asyncio.Event()
        self._streams.add(woken)
        self._connected.set()
        try:
            await answer.write(b"retry: %d\n\n" % RETRY_MS)
            event = await self._work(self._look)
            while True:
                await answer.write(b"event: run\ndata: " + event + b"\n\n")
                while not await _within(woken.wait(), KEEP_ALIVE_S):
                    await answer.write(b": still here\n\n")
                woken.clear()
                event = self._event
        except ConnectionError:
            return answer  # the browser is gone
        finally:
            self._streams.discard(woken)

    async def _list(self, request: web.Request) -> web.Response:
        fields = dict(request.query)

        def draw() -> str:
            unread = self._read()
            return rollouts_page(self._live.rollouts, self._live.followed.summary, fields, unread)

        return _html(await self._work(draw), KIND)

    async def _rollout(self, request: web.Request) -> web.Response:
        found = request.match_info
        round_, label, row = int(found["round"]), found["label"], int(found["row"])

        def draw() -> str | None:
            self._read()
            place = self._live.rollouts.place_of(round_, label, row)
            followed = self._live.followed
            if place is None:
                return None
            return rollout_page(self._live.rollouts, place, followed.summary, followed.experiment)

        text = await self._work(draw)
        if text is None:
            raise web.HTTPNotFound(text="This run has no such solution, or pvg watch has not read it yet.")
        return _html(text, KIND)

    def _read(self) -> int:
        """Bring the index up to date. Returns the number of files that are left."""
        self._live.update()
        self._live.rollouts.extend(self._live.followed.shards)
        return self._live.rollouts.read_more(READ_S)


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


async def _within(waiting: Awaitable[object], seconds: float) -> bool:
    try:
        await asyncio.wait_for(waiting, seconds)
    except TimeoutError:
        return False
    return True
