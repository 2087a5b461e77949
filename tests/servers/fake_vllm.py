"""`FakeVllm`: a real HTTP server that speaks as one of `pvg serve` does (protocol 2), over the model of fake_model.py.

    async with FakeVllm(FakeOptions(root=folder, key="k")) as server:
        ...                                       # server.url; server.running, .received, .aborted, .stale_hits, ...

As a process, for SIGKILL and SIGSTOP (the key comes in PVG_CONTROL_KEY; "ready PORT" on stdout when it listens):

    python tests/servers/fake_vllm.py --port 0 --token-ms 5 --root FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from fake_model import (
    AS_STARTED,
    Sampled,
    Weights,
    as_vllm_writes,
    prompt_logprobs,
    read_weights,
    routed_experts,
    sampled,
)

from pvg.servers.control import ControlClient
from pvg.servers.pool import HttpPool
from pvg.servers.server_side.pvg_vllm.accepted_weights import (
    ADAPTER_FILE,
    BROKEN,
    Refusal,
    ServedLabel,
    adapter_folder,
    check_order,
    check_session,
    weight_files,
)

BLOCK = 16  # tokens of a block of the prefix cache
FREE = {"/health", "/ping", "/version", "/v1/models", "/metrics", "/inference/v1/generate", "/v1/completions"}
SIMPLE = (
    *("/health", "/pvg/info", "/is_paused", "/weight_info", "/pause", "/resume", "/pvg/adapters/unload"),
    *("/pvg/sleep", "/pvg/wake"),
    *("/inference/v1/abort_requests", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
    *("/finish_weight_update", "/update_weight_version", "/shutdown_weight_transfer_engine"),
)
CLOSED = ("/collective_rpc", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters")

Scorer = Callable[[Weights | None, Sequence[int]], list[float]]


@dataclass
class FakeOptions:
    """How the server is started. `root`: PVG_WEIGHTS_ROOT."""

    root: Path = Path()
    key: str = ""
    token_ms: float = 1.0
    load_ms: float = 0.0
    end_ms: float = 0.0  # from the last event of a stream to the end of the reply
    max_num_seqs: int = 256
    max_model_len: int = 2048
    max_lora_rank: int = 0
    world_size: int = 1
    shape: str = ""
    model: str = "fake"  # its name in requests
    runner: str = "generate"
    logprobs_mode: str = "processed_logprobs"
    protocol: int = 2
    routed_experts: bool = False  # --enable-return-routed-experts
    keeps_cache: bool = False  # across updates, so that only the salts of the client part the versions
    aborts: bool = True  # whether requests can be aborted
    gpus: str = ""  # of a server that can sleep
    work_ms: float = 0.0  # what the replies say instead of the time that the work took


class FakeVllm:
    """Counts: `received`, `finished`, `aborted` by request id, of requests that have one; `running`, `peak` at once;
    `connections`. `asked`: path and body of the control calls, in order."""

    def __init__(self, options: FakeOptions | None = None, *, scorer: Scorer | None = None) -> None:
        self.options = options or FakeOptions()
        self.scorer = scorer
        self.received: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.aborted: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.plans: dict[str, list[str]] = defaultdict(list)
        self.live: dict[str, Sampled] = {}  # by vLLM's own request id
        self.running = 0
        self.peak = 0
        self.stale_hits = 0  # blocks of the prefix cache that other weights had computed than used them
        self.fail_loads = 0  # number of loads from now on that fail halfway
        self.before_load: Callable[[], Awaitable[None]] | None = None
        self._port = 0
        self._runner: web.AppRunner | None = None
        self._protocols: set[Any] = set()
        self._boot()

    def _boot(self) -> None:
        self.boot = os.environ.get("PVG_BOOT") or secrets.token_hex(8)
        self.label = "default"
        self.asleep = False
        self.weights: Weights | None = None
        self.adapters: dict[str, Weights] = {}
        self._newest_adapter: ServedLabel | None = None
        self._cache: dict[tuple[str, tuple[int, ...]], str] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._updating = asyncio.Lock()  # one update at a time
        self._core = asyncio.Lock()  # held while weights load: vLLM's core answers no request meanwhile
        self._places = asyncio.Semaphore(self.options.max_num_seqs)

    # --- life --------------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def connections(self) -> int:
        """Opened so far that brought a request."""
        return len(self._protocols)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    @property
    def paused(self) -> bool:
        return not self._resumed.is_set()

    def plan(self, path: str, *faults: str) -> None:
        """For the next control calls of `path`, one each: reset or refuse; or, when the work is done, reset_after,
        hang_after or garbage_after."""
        self.plans[path] += faults

    async def __aenter__(self) -> FakeVllm:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def start(self, port: int = 0) -> None:
        app = web.Application(middlewares=[self._guard], client_max_size=64 << 20)
        for path in SIMPLE:
            app.router.add_route("*", path, self._simple)
        app.router.add_post("/pvg/weights", self._weights)
        app.router.add_post("/pvg/adapters", self._adapter)
        app.router.add_post("/inference/v1/generate", self._generate)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port or self._port, backlog=1024)
        await site.start()
        self._port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def kill(self) -> None:
        """As SIGKILL: all connections are reset, and nothing listens any more."""
        if self._runner is None:
            return
        server = self._runner.server
        assert server is not None
        for protocol in list(server.connections):
            if protocol.transport is not None:
                protocol.transport.abort()
        await self._runner.cleanup()
        self._runner = None

    async def restart(self) -> None:
        """On the same port, with the weights it was first started with."""
        await self.kill()
        self._boot()
        await self.start()

    def freeze(self) -> None:
        """The engine hangs: the front end answers /health, and nothing else comes back."""
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    # --- what every call passes --------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        received_ns, started = time.time_ns(), time.perf_counter()
        self._protocols.add(request.protocol)
        self.calls[request.path] += 1
        fault = await self._planned(request) if request.path not in FREE else ""
        allowed = request.headers.get("Authorization") == f"Bearer {self.options.key}" or not self.options.key
        try:
            if request.path not in FREE and not allowed:
                raise Refusal(401, "wrong_key", "The control key is wrong or missing.")
            if request.path.startswith(CLOSED):
                raise Refusal(403, "closed", f"{request.path} is closed on this server.")
            if fault == "refuse":
                raise Refusal(500, "planned", "planned by the test")
            response = web.Response() if fault == "reset" else await handler(request)
        except Refusal as refusal:
            response = _refused(refusal.status, refusal.code, refusal.message)
        except web.HTTPNotFound:
            response = web.json_response({"detail": "Not Found"}, status=404)
        if fault.startswith("reset") and request.transport is not None:
            request.transport.abort()
        if fault == "hang_after":
            await asyncio.sleep(60.0)
        if fault == "garbage_after":
            response = web.Response(text="<html>")
        if request.path not in FREE:
            worked_ms = self.options.work_ms or (time.perf_counter() - started) * 1e3
            response.headers["x-pvg-received-ns"] = str(received_ns)
            response.headers["x-pvg-work-ms"] = f"{worked_ms:.3f}"
        return response

    async def _planned(self, request: web.Request) -> str:
        """Note a control call; the fault that is planned for it."""
        body = await request.json() if request.body_exists else {}
        self.asked.append((request.path, {**body, **request.query}))
        plan = self.plans[request.path]
        return plan.pop(0) if plan else ""

    async def _simple(self, request: web.Request) -> web.Response:
        if request.path not in ("/health"):
            await self._thawed.wait()
            async with self._core:
                pass
        body = await request.json() if request.body_exists else {}
        if request.path == "/pause":
            self._resumed.clear()
        elif request.path == "/resume":
            self._resumed.set()
        elif request.path == "/pvg/sleep":
            self._resumed.clear()
            self._cache.clear()
            self.asleep = True
            if body["level"] == 2:
                self.weights, self.label = None, BROKEN + self.label
        elif request.path == "/pvg/wake":
            self._wake()
        elif request.path == "/pvg/adapters/unload":
            self.adapters.pop(body["label"], None)
        elif request.path in ("/finish_weight_update", "/update_weight_version"):
            (self.label,) = body.values()
        answers: dict[str, Callable[[], Any]] = {
            "/pvg/info": self.info,
            "/is_paused": lambda: {"is_paused": self.paused},
            "/weight_info": lambda: {"weight_version": self.label},
            "/inference/v1/abort_requests": lambda: self._abort(body["request_ids"]),
        }
        return web.json_response(answers.get(request.path, dict)())

    def info(self) -> dict[str, Any]:
        names = ("protocol", "runner", "max_model_len", "max_num_seqs", "max_lora_rank", "logprobs_mode", "model")
        return {
            **{name: getattr(self.options, name) for name in (*names, "shape", "world_size")},
            **{"boot": self.boot, "label": self.label, "paused": self.paused},
            **{"gpus": self.options.gpus, "asleep": self.asleep},
            **{"vllm": "0.32.0", "dtype": "float32", "prefix_caching": True},
        }

    def _wake(self) -> None:
        if self.asleep:
            self.asleep = False
            self._resumed.set()

    def _abort(self, names: list[str]) -> None:
        """Those that run end with what they have; unknown ids are no error."""
        if not self.options.aborts:
            raise Refusal(404, "404", "Not Found")
        for name in names:
            if (made := self.live.get(name)) and made.finish_reason is None:
                made.finish_reason = "abort"

    # --- weights -----------------------------------------------------------------------------------------------------

    async def _weights(self, request: web.Request) -> web.Response:
        body = await request.json()
        # vLLM's front end lets a handler end when its client has gone.
        return web.json_response(await asyncio.shield(asyncio.ensure_future(self._update(body))))

    async def _update(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._thawed.wait()
        async with self._updating:
            self._wake()
            label = _label(body)
            if self.label == str(label):
                self._resumed.set()
                return {"label": str(label), "pause_ms": 0.0, "load_ms": 0.0, "resume_ms": 0.0}
            check_order(self.label, label)
            (file,) = weight_files(self.options.root, body["name"])
            self._resumed.clear()
            started = time.perf_counter()
            try:
                async with self._core:
                    await self._load(label, file)
            except ValueError as error:
                self.label = f"{BROKEN}{label}"
                raise Refusal(500, "load_failed", f"The weights {label} could not be loaded: {error}") from None
            finally:
                self._resumed.set()
            load_ms = (time.perf_counter() - started) * 1e3
            return {"label": str(label), "pause_ms": 0.1, "load_ms": load_ms, "resume_ms": 0.1}

    async def _load(self, label: ServedLabel, path: Path) -> None:
        if self.before_load is not None:
            await self.before_load()
        await asyncio.sleep(self.options.load_ms / 1e3)
        if self.fail_loads > 0:
            self.fail_loads -= 1
            self.weights = None  # some tensors new, some old: neither version's tokens
            raise ValueError("the tests want it so")
        self.weights = read_weights(path)
        self.label = str(label)
        if not self.options.keeps_cache:
            self._cache.clear()

    async def _adapter(self, request: web.Request) -> web.Response:
        await self._thawed.wait()
        body = await request.json()
        label, started = _label(body), time.perf_counter()
        self._wake()
        if not self.options.max_lora_rank:
            raise Refusal(422, "no_adapters", "This server was started without adapters.")
        if str(label) not in self.adapters:
            if self._newest_adapter is not None:
                check_session(self._newest_adapter, label)
            self.adapters[str(label)] = read_weights(adapter_folder(self.options.root, body["name"]) / ADAPTER_FILE)
            self._newest_adapter = label
        return web.json_response({"label": str(label), "load_ms": (time.perf_counter() - started) * 1e3})

    # --- generation --------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name, model = str(body.get("request_id", "")), body.get("model")
        if model not in (None, self.options.model, *self.adapters):
            raise Refusal(404, "404", f"The model `{model}` does not exist.")
        if set(body.get("cache_salt") or "") & set("@/\\\0") or len(body.get("cache_salt") or "") > 128:
            raise Refusal(400, "400", "cache_salt must be short and hold none of @, /, \\ and NUL.")
        if len(body["token_ids"]) + 1 > self.options.max_model_len:
            raise Refusal(400, "400", f"The prompt is longer than the context of {self.options.max_model_len} tokens.")
        self.received[name] += bool(name)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            response = await self._answered(request, body, name)
        except BaseException:  # cancelled: the client has gone
            self.aborted[name] += bool(name)
            raise
        finally:
            self.running -= 1
        self.finished[name] += bool(name)
        return response

    async def _answered(self, request: web.Request, body: dict[str, Any], name: str) -> web.StreamResponse:
        made, usage = Sampled(), self._usage(body)
        self.live[f"generate-tokens-{name}"] = made
        if not body.get("stream"):
            scores = None
            async for _ in self._tokens(body, made):
                scores = scores or self._scores(body)
            return web.json_response(self._reply(body, made, usage) | {"prompt_logprobs": scores})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for count in self._tokens(body, made):
            await response.write(b"data: %d\n\n" % count)
        await response.write(b"data: " + json.dumps(self._reply(body, made, usage)).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await asyncio.sleep(self.options.end_ms / 1e3)
        return response

    def _reply(self, body: dict[str, Any], made: Sampled, usage: Callable[[Sampled], dict[str, Any]]) -> dict[str, Any]:
        if not (body["sampling_params"].get("extra_args") or {}).get("pvg_arrays"):
            return {"choices": ["vLLM's own form"]}
        choice = made.choice()
        if self.options.routed_experts and made.finish_reason in ("stop", "length"):  # an abort has none
            choice["routed_experts"] = as_vllm_writes(routed_experts([*body["token_ids"], *made.ids]))
        return {"choices": [choice], "usage": usage(made)}

    async def _tokens(self, body: dict[str, Any], made: Sampled) -> AsyncIterator[int]:
        """Samples into `made`, one token after the other; the number of them. Weights may change between two."""
        parameters, prompt = body["sampling_params"], tuple(body["token_ids"])
        stop_ids = tuple(parameters.get("stop_token_ids") or ())
        seed = parameters.get("seed", random.getrandbits(60))
        longest = min(parameters["max_tokens"], self.options.max_model_len - len(prompt))
        async with self._places:
            while made.finish_reason is None:
                await asyncio.sleep(self.options.token_ms / 1e3)
                await self._thawed.wait()
                await self._resumed.wait()
                if made.finish_reason is not None:
                    yield len(made.ids)
                    return
                fingerprint = self.fingerprint(body.get("model"))
                made.add(*sampled(fingerprint, prompt, seed, len(made.ids), stop_ids), self.label)
                if made.ids[-1] in stop_ids:
                    made.finish_reason = "stop"
                elif len(made.ids) == longest:
                    made.finish_reason = "length"
                if len(made.ids) == 1:
                    self._prefill(body, fingerprint)
                yield len(made.ids)

    def _weights_of(self, model: str | None) -> Weights | None:
        return self.weights if model is None else self.adapters.get(model, self.weights)

    def fingerprint(self, model: str | None = None) -> str:
        weights = self._weights_of(model)
        return weights.fingerprint if weights else AS_STARTED

    def _scores(self, body: dict[str, Any]) -> str | None:
        if body["sampling_params"].get("prompt_logprobs") is None:
            return None
        ids, model = body["token_ids"], body.get("model")
        weights = self._weights_of(model)
        found = self.scorer(weights, ids) if self.scorer else prompt_logprobs(self.fingerprint(model), ids)
        return base64.b64encode(np.array(found, "<f4").tobytes()).decode()

    def _blocks(self, body: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
        ids, salt = body["token_ids"], f"{body.get('model')}|{body.get('cache_salt')}"
        return [(salt, tuple(ids[:end])) for end in range(BLOCK, len(ids), BLOCK)]

    def _prefill(self, body: dict[str, Any], fingerprint: str) -> None:
        for block in self._blocks(body):
            self.stale_hits += self._cache.setdefault(block, fingerprint) != fingerprint

    def _usage(self, body: dict[str, Any]) -> Callable[[Sampled], dict[str, Any]]:
        cached = BLOCK * sum(block in self._cache for block in self._blocks(body))
        prompt = len(body["token_ids"])
        return lambda made: {
            "prompt_tokens": prompt,
            "completion_tokens": len(made.ids),
            "total_tokens": prompt + len(made.ids),
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _label(body: dict[str, Any]) -> ServedLabel:
    if (label := ServedLabel.parse(str(body.get("label")))) is None:
        raise Refusal(422, "bad_label", f"{body.get('label')!r} is no label.")
    return label


def _refused(status: int, code: str, message: str) -> web.Response:
    return web.json_response({"error": {"code": code, "message": message}}, status=status)


@asynccontextmanager
async def serving(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """The URL of a server that gives a test's own answer to everything."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.05)  # 0 waits for ever
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def with_servers(
    count: int,
    play: Callable[[list[FakeVllm], list[ControlClient]], Awaitable[None]],
    root: Path = Path(),
    timeout_s: float = 5.0,
) -> None:
    """Run `play` with that many servers, whose replies say that the work took 1.5 ms, and their control clients."""

    async def run() -> None:
        pool = HttpPool(16, connect_timeout_s=2.0, fresh=True)
        servers = [FakeVllm(FakeOptions(root=root, max_lora_rank=8, work_ms=1.5)) for _ in range(count)]
        for server in servers:
            await server.start()
        try:
            await play(servers, [ControlClient(s.url, pool, timeout_s=timeout_s, probe_timeout_s=5.0) for s in servers])
        finally:
            await pool.close()
            for server in servers:
                await server.kill()

    asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    for option in fields(FakeOptions):
        if option.name != "key":
            kind = type(option.default)
            kind = Path if isinstance(option.default, Path) else kind
            parser.add_argument(f"--{option.name.replace('_', '-')}", type=kind, default=option.default)
    given = vars(parser.parse_args())
    port = given.pop("port")

    async def serve() -> None:
        server = FakeVllm(FakeOptions(key=os.environ.get("PVG_CONTROL_KEY", ""), **given))
        await server.start(port)
        print(f"ready {server.url.rpartition(':')[2]}", flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
