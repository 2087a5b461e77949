"""`ControlServer`: the control routes of a server of `pvg serve`, without a model, on a real socket.

It keeps what it was asked, and does what the tests plan for the next call of a route.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from pvg.servers.control import ControlClient
from pvg.servers.pool import HttpPool

# What may be planned. "after": the work is done, and the reply does not come through.
FAULTS = ("reset", "reset_after", "hang_after", "garbage_after", "refuse")


class ControlServer:
    """`label`, `adapters`: what it has; `asked`: (path, body) in order; `boot` changes with `restart`."""

    def __init__(self, *, world_size: int = 1, refuse_status: int = 500) -> None:
        self.world_size = world_size
        self.refuse_status = refuse_status
        self.label = "default"
        self.names: list[str] = []  # of the folders that were loaded
        self.adapters: dict[str, str] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.paused = False
        self.plans: dict[str, list[str]] = defaultdict(list)
        self.boot = secrets.token_hex(4)
        self.url = ""
        self._runner: web.AppRunner | None = None

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def plan(self, path: str, *faults: str) -> None:
        """For the next calls of `path`, one each."""
        assert set(faults) <= set(FAULTS)
        self.plans[path] += faults

    def restart(self) -> None:
        self.boot, self.label, self.adapters = secrets.token_hex(4), "default", {}

    async def __aenter__(self) -> ControlServer:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def control(self, pool: HttpPool, timeout_s: float = 5.0) -> ControlClient:
        return ControlClient(self.url, pool, timeout_s=timeout_s, probe_timeout_s=5.0)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        received_ns, path = time.time_ns(), request.path
        body = await request.json() if request.can_read_body else {}
        if request.query:
            body = {**body, **request.query}
        self.asked.append((path, body))
        fault = self.plans[path].pop(0) if self.plans[path] else ""
        if fault == "refuse":
            return web.json_response(
                {"error": {"code": "planned", "message": "planned by the test"}}, status=self.refuse_status
            )
        found = {} if fault == "reset" else self._do(path, body)
        if fault in ("reset", "reset_after"):
            assert request.transport is not None
            request.transport.abort()
        if fault == "hang_after":
            await asyncio.sleep(60.0)
        stamps = {"x-pvg-received-ns": str(received_ns), "x-pvg-work-ms": "1.5"}
        if fault == "garbage_after":
            return web.Response(text="<html>", headers=stamps)
        return web.json_response(found, headers=stamps)

    def _do(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/pvg/info":
            return self._info()
        if path == "/pvg/weights":
            if self.label != body["label"]:
                self.names.append(body["name"])
            self.label = body["label"]
            return {"label": body["label"], "pause_ms": 0.25, "load_ms": 1.0, "resume_ms": 0.25}
        if path == "/pvg/adapters":
            self.adapters[body["label"]] = body["name"]
            return {"label": body["label"], "load_ms": 1.0}
        if path == "/pvg/adapters/unload":
            self.adapters.pop(body["label"], None)
        elif path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        elif path == "/finish_weight_update":
            self.label = body["weight_version"]
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        return {}

    def _info(self) -> dict[str, Any]:
        return {
            **{"protocol": 1, "boot": self.boot, "vllm": "0.32.0", "model": "m", "shape": "", "runner": "generate"},
            **{"dtype": "float32", "max_model_len": 64, "max_num_seqs": 8, "prefix_caching": True},
            **{"logprobs_mode": "processed_logprobs", "max_lora_rank": 8, "label": self.label},
            **{"paused": self.paused, "world_size": self.world_size},
        }


def with_servers(
    count: int, play: Callable[[list[ControlServer], list[ControlClient]], Awaitable[None]], timeout_s: float = 5.0
) -> None:
    """Run `play` with that many servers and their control clients."""

    async def run() -> None:
        pool = HttpPool(16, connect_timeout_s=2.0, fresh=True)
        servers = [await ControlServer().__aenter__() for _ in range(count)]
        try:
            await play(servers, [server.control(pool, timeout_s) for server in servers])
        finally:
            await pool.close()
            for server in servers:
                await server.__aexit__()

    asyncio.run(run())
