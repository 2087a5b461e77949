"""`EnvironmentServer`: offers one game or task to OpenEnv's clients, over a WebSocket.

    async with EnvironmentServer.start(TaskEnvironment("modchain", task), port=8010) as server:
        print(server.url)
        await asyncio.Event().wait()

Routes: /ws (sessions; pvg.games.openenv has the protocol), /health, /metadata and /schema. OpenEnv's HTTP routes /reset
and /step are not offered, because they have no session.

The server trusts no client. It bounds the number of sessions, the size of a message, and the time that a client may
take to send a request or to read a reply. It refuses web pages, which could otherwise reach a server on this machine:
browsers send an Origin header. It unpickles nothing. Anybody who reaches the port may use it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import WSCloseCode, WSMsgType, web

import pvg
from pvg.errors import ConfigurationError, PvgError, reason, shortened
from pvg.servers.environments import EXECUTION_ERROR, BadRequestError, ServedEnvironment, ServedEpisode

MOST_BYTES = 2**20  # of a message
HANDSHAKE_S = 10.0  # until a connection has sent a whole HTTP request
REQUESTS = ("reset", "step", "state", "close")

log = logging.getLogger(__name__)


class EnvironmentServer:
    """A running server. `url` is its address, `sessions` the number of open sessions."""

    def __init__(self, environment: ServedEnvironment, most_sessions: int, idle_s: float) -> None:
        self.url = ""
        self._environment = environment
        self._most, self._idle_s = most_sessions, idle_s
        self._open: set[web.WebSocketResponse] = set()
        # One thread: a task need not be safe for several, and a slow one must not stop the event loop.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="environment")

    @property
    def sessions(self) -> int:
        return len(self._open)

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        environment: ServedEnvironment,
        host: str = "127.0.0.1",
        port: int = 0,
        most_sessions: int = 64,
        idle_s: float = 900.0,
    ) -> AsyncIterator[EnvironmentServer]:
        """Serve until the block ends. Port 0 is any free one. `idle_s`: seconds without a request after which a session
        ends. Raises ConfigurationError if the port cannot be used."""
        server = cls(environment, most_sessions, idle_s)
        app = web.Application()
        app.add_routes(
            [
                web.get("/ws", server._session),
                web.get("/health", server._health),
                web.get("/metadata", server._metadata),
                web.get("/schema", server._schema),
            ]
        )
        runner = web.AppRunner(app, keepalive_timeout=HANDSHAKE_S, shutdown_timeout=1.0, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            try:
                await site.start()
            except OSError as error:
                raise ConfigurationError(
                    f"Port {port} of {host} cannot be used: {reason(error)}.",
                    "Choose another port with --port, or stop the program that uses this one.",
                ) from None
            shown = f"[{host}]" if ":" in host else host
            server.url = f"http://{shown}:{runner.addresses[0][1]}"
            yield server
        finally:
            await server.end_sessions()
            await runner.cleanup()
            server._thread.shutdown(cancel_futures=True)

    async def end_sessions(self) -> None:
        """Close all sessions. A client that does not answer takes two seconds, so they are closed at once.
        An exception means that a client is gone already."""
        closing = [s.close(code=WSCloseCode.GOING_AWAY, message=b"the server ends this session") for s in self._open]
        await asyncio.gather(*closing, return_exceptions=True)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def _metadata(self, _: web.Request) -> web.Response:
        found = {
            "name": self._environment.name,
            "description": self._environment.description,
            "version": pvg.__version__,
        }
        return web.json_response(found)

    async def _schema(self, _: web.Request) -> web.Response:
        return web.json_response(self._environment.schema())

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        if "Origin" in request.headers:
            raise web.HTTPForbidden(text="This server does not serve web pages.")
        socket = web.WebSocketResponse(max_msg_size=MOST_BYTES, compress=False, timeout=2.0)
        await socket.prepare(request)
        if len(self._open) >= self._most:
            counts = {"active_sessions": len(self._open), "max_sessions": self._most}
            await _send(socket, _error("CAPACITY_REACHED", f"All {self._most} sessions are in use.", **counts))
            await socket.close()
            return socket
        self._open.add(socket)
        try:
            await self._serve(socket, self._environment.episode())
        except (TimeoutError, ConnectionError):
            pass  # the client is idle or gone: the session ends
        finally:
            self._open.discard(socket)
            await socket.close()
        return socket

    async def _serve(self, socket: web.WebSocketResponse, episode: ServedEpisode) -> None:
        """Answer the requests of one session, one after the other, until it ends."""
        while True:
            async with asyncio.timeout(self._idle_s):
                message = await socket.receive()
            if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                return  # closed, or too large
            reply = await self._answer(episode, message.data)
            if reply is None:
                return
            async with asyncio.timeout(self._idle_s):
                await _send(socket, reply)

    async def _answer(self, episode: ServedEpisode, text: str | bytes) -> dict[str, Any] | None:
        """The reply to one message; None for `close`."""
        try:
            request = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            return _error("INVALID_JSON", f"The message is not JSON: {error}")
        try:
            kind, data = _read(request)
            if kind == "close":
                return None
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, _replied, episode, kind, data)
        except BadRequestError as error:
            return _error(error.code, error.message)
        except PvgError as error:
            return _error(EXECUTION_ERROR, str(error))
        except Exception:  # a defect must not end the other sessions; the log has its traceback
            log.exception("%s failed on a request", self._environment.name)
            return _error(EXECUTION_ERROR, "The server has a defect; its log has the details.")


def _read(request: Any) -> tuple[str, dict[str, Any]]:
    """The type and the data of a request. Raises BadRequestError for anything else."""
    if not isinstance(request, dict):
        raise BadRequestError("A message must be a JSON object.")
    kind, data = request.get("type"), request.get("data", {})
    if kind not in REQUESTS:
        raise BadRequestError(f"The type of a message must be one of {', '.join(REQUESTS)}.", "UNKNOWN_TYPE")
    if unknown := request.keys() - {"type", "data"}:
        raise BadRequestError(f"A message has only type and data, not {shortened(repr(sorted(unknown)[0]))}.")
    if not isinstance(data, dict):
        raise BadRequestError("The data of a message must be a JSON object.")
    if kind == "step" and "data" not in request:
        raise BadRequestError("A step must have data: the action.")
    return kind, data


def _replied(episode: ServedEpisode, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    if kind == "state":
        return {"type": "state", "data": episode.state()}
    return {"type": "observation", "data": episode.reset(data) if kind == "reset" else episode.step(data)}


def _error(code: str, message: str, **details: int) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **details}}


async def _send(socket: web.WebSocketResponse, reply: dict[str, Any]) -> None:
    await socket.send_str(orjson.dumps(reply).decode())
