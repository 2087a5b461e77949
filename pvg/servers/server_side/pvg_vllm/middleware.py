"""`PvgMiddleware`: runs before all of vLLM's routes, requires the key, blocks unsafe routes, and serves /pvg/*.

It timestamps control calls at their first byte. On a loopback address generation needs no key; it is only admitted a
few requests per turn of the event loop. Every other route needs `Authorization: Bearer KEY`. So routes of a later vLLM
version are locked until they are listed here.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from pathlib import Path

from .exchange import (
    App,
    ClientGone,
    Message,
    Receive,
    Refusal,
    Scope,
    Send,
    header,
    read_table,
    refuse,
    reply,
    routed_path,
    tell,
)
from .routes import RouteCall, Routes

COMPUTED = frozenset({"/inference/v1/generate", "/v1/completions", "/v1/chat/completions", "/classify", "/pooling"})
FREE = COMPUTED | {"/health", "/ping", "/version", "/metrics", "/v1/models", "/tokenize", "/detokenize"}
FREE_ON_A_NETWORK = frozenset({"/health", "/ping"})
# They call any method of a worker, or load adapters from any path. Use /pvg/weights and /pvg/adapters instead.
CLOSED = ("/collective_rpc", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters")

# Token requests that start in one turn of the event loop. Otherwise a whole batch would be read and queued in a single
# turn of 100 ms or more, and a control call would wait that long before it is seen.
ADMITTED_AT_A_TIME = 8

RECEIVED_HEADER = b"x-pvg-received-ns"
WORK_HEADER = b"x-pvg-work-ms"
TRACE_HEADER = b"x-pvg-trace"


class PvgMiddleware:
    """Reads PVG_CONTROL_KEY, PVG_WEIGHTS_ROOT and PVG_OPEN_TO_NETWORK from the environment. Raises RuntimeError without
    the first two, so a server without a key serves nothing."""

    def __init__(self, app: App) -> None:
        key, root = os.environ.get("PVG_CONTROL_KEY", ""), os.environ.get("PVG_WEIGHTS_ROOT", "")
        if not key or not os.path.isabs(root):
            raise RuntimeError("PVG_CONTROL_KEY and PVG_WEIGHTS_ROOT (an absolute path) must be set: use `pvg serve`.")
        self._app = app
        self._credentials = b"Bearer " + key.encode()
        self._free = FREE_ON_A_NETWORK if os.environ.get("PVG_OPEN_TO_NETWORK") == "1" else FREE
        self._routes = Routes(Path(root))
        self._admission = asyncio.Semaphore(ADMITTED_AT_A_TIME)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif routed_path(scope) in self._free:
            await self._wait_for_turn(scope)
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._control(scope, receive, send)
        elif self._has_key(scope):  # a websocket
            await self._app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        stamped = _Stamped(scope, send)
        try:
            path = routed_path(scope)
            if not self._has_key(scope):
                raise Refusal(401, "wrong_key", "The control key is missing or wrong.")
            stamped.trusted(scope)
            if path.startswith(CLOSED):
                raise Refusal(403, "closed", f"{path} is closed: use the routes below /pvg.")
            if path == "/pvg" or path.startswith("/pvg/"):
                route = self._routes.find(scope["method"], path)
                body = {} if scope["method"] == "GET" else await read_table(receive)
                await reply(stamped, 200, await route(RouteCall(scope["app"].state, body, stamped.trace)))
            else:
                await self._wait_for_turn(scope)
                await self._app(scope, receive, stamped)
        except Refusal as refusal:
            await refuse(stamped, refusal)
        except ClientGone:
            return

    async def _wait_for_turn(self, scope: Scope) -> None:
        """Wait for a turn, in order of arrival, if the request is for tokens."""
        if routed_path(scope) in COMPUTED:
            async with self._admission:
                await asyncio.sleep(0)

    def _has_key(self, scope: Scope) -> bool:
        return hmac.compare_digest(header(scope, b"authorization"), self._credentials)


class _Stamped:
    """`send` that adds arrival and working time to the reply's headers, and logs calls that have a trace id."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._received_ns = time.time_ns()
        self._began = time.perf_counter()
        self._send = send
        self._path = routed_path(scope)
        self.trace = ""

    def trusted(self, scope: Scope) -> None:
        """Allow logging for this call, which has the key."""
        self.trace = header(scope, TRACE_HEADER).decode("latin-1")
        if self.trace:
            tell("server.recv", trace=self.trace, route=self._path)

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            work_ms = (time.perf_counter() - self._began) * 1e3
            stamps = [(RECEIVED_HEADER, str(self._received_ns).encode()), (WORK_HEADER, f"{work_ms:.3f}".encode())]
            message["headers"] = [*message.get("headers", ()), *stamps]
            if self.trace:
                tell("server.reply", trace=self.trace, route=self._path, status=message["status"], work_ms=work_ms)
        await self._send(message)
