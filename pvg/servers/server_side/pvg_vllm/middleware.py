"""`PvgMiddleware`: runs before all of vLLM's routes, requires the key, blocks unsafe routes, and serves /pvg/*.

It timestamps control calls at their first byte. On a loopback address generation needs no key; it is only admitted a
few requests per turn of the event loop, and answers in arrays if asked to (`answer_in_arrays`). Every other route needs
`Authorization: Bearer KEY`. So routes of a later vLLM version are locked until they are listed here.

A weight update pauses the engine between two steps, lets its workers load, sets the label as weight version, and
resumes. Requests in flight are kept. The update drops the whole prefix cache with the keys and values of old weights,
and requests in flight recompute theirs. So every token is sampled from exactly the weights of its label, regardless of
the client's salts.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import math
import os
import secrets
import sys
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .accepted_weights import BROKEN, Refusal, ServedLabel, adapter_folder, check_order, check_session, weight_files

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

GENERATE = "/inference/v1/generate"
COMPUTED = frozenset({GENERATE, "/v1/completions", "/v1/chat/completions", "/classify", "/pooling"})
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
        path = routed_path(scope)
        if path in COMPUTED:
            async with self._admission:
                await asyncio.sleep(0)
        if path == GENERATE:
            answer_in_arrays(getattr(scope["app"].state, "serving_tokens", None))

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


# --- tokens in arrays ---

ARRAYS = "pvg_arrays"  # in `extra_args` of a request's sampling parameters
TOLD_EVERY_S = 0.1  # how often a stream says how many tokens there are
UNLIKELY = -9999.0  # as vLLM writes log-probs of minus infinity and NaN


def answer_in_arrays(serving: Any) -> None:
    """Let vLLM's token route (`ServingTokens`) send arrays to requests that ask for ARRAYS: token ids int32, log-probs
    float32, both little-endian in base64. vLLM's own JSON has an object per token: 140 bytes instead of 11, and
    0.44 us instead of 0.14 for the trainer to read (docs/benchmarks.md, rollout-vllm). A second call does nothing.

    A stream sends only counts of tokens until its end, and then the same reply as without a stream.
    """
    if serving is None or "serve_tokens_full_generator" in vars(serving):
        return
    whole, streamed = serving.serve_tokens_full_generator, serving.serve_tokens_stream_generator

    async def answer(request: Any, results: AsyncIterator[Any], name: str, *rest: Any) -> Any:
        if not (request.sampling_params.extra_args or {}).get(ARRAYS):
            return await whole(request, results, name, *rest)
        *_, reply = [event async for event in _array_events(serving, results, name)]
        return _one(reply)  # vLLM sends an iterator as it is

    def stream(request: Any, results: AsyncIterator[Any], name: str, *rest: Any) -> AsyncIterator[str]:
        if not (request.sampling_params.extra_args or {}).get(ARRAYS):
            plain: AsyncIterator[str] = streamed(request, results, name, *rest)
            return plain
        return _server_sent(_array_events(serving, results, name))

    serving.serve_tokens_full_generator, serving.serve_tokens_stream_generator = answer, stream


async def _one(text: str) -> AsyncIterator[str]:
    yield text


async def _server_sent(events: AsyncIterator[str]) -> AsyncIterator[str]:
    async for event in events:
        yield f"data: {event}\n\n"
    yield "data: [DONE]\n\n"


async def _array_events(serving: Any, results: AsyncIterator[Any], name: str) -> AsyncIterator[str]:
    """Counts of tokens, and at the end the reply. Without a stream there is one result."""
    ids, logprobs, prompt, cached, scores, told = array("i"), array("f"), 0, 0, None, time.monotonic()
    async for result in results:
        (output,) = result.outputs
        serving._raise_if_error(output.finish_reason, name)
        prompt, cached = len(result.prompt_token_ids or ()) or prompt, result.num_cached_tokens or cached
        if result.prompt_logprobs:
            prompt_ids = result.prompt_token_ids[1:]
            scores = array("f", _of_tokens(prompt_ids, result.prompt_logprobs[1:]))
        ids.extend(output.token_ids)
        logprobs.extend(_of_tokens(output.token_ids, output.logprobs or ()))
        if (now := time.monotonic()) > told + TOLD_EVERY_S and not output.finish_reason:
            told = now
            yield str(len(ids))
    choice = {
        "finish_reason": output.finish_reason,
        "token_ids": _base64(ids),
        "logprobs": _base64(logprobs),
        "weight_versions": [{"start": span.start, "version": span.version} for span in output.weight_versions or ()],
        "routed_experts": None if output.routed_experts is None else _npy(output.routed_experts),
    }
    usage = {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}
    reply = {"choices": [choice], "usage": usage, "prompt_logprobs": None if scores is None else _base64(scores)}
    yield json.dumps(reply)


def _of_tokens(ids: Iterable[int], candidates: Iterable[Mapping[int, Any] | None]) -> Iterable[float]:
    """The log-prob of each token among its candidates."""
    for token, found in zip(ids, candidates, strict=False):  # an abort's last result has no tokens, but all log-probs
        entry = found.get(token) if found else None
        value = UNLIKELY if entry is None else entry.logprob
        yield UNLIKELY if math.isnan(value) else max(value, UNLIKELY)


def _base64(values: array[Any]) -> str:
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values).decode()


def _npy(values: Any) -> str:
    from vllm.utils.serial_utils import numpy2base64

    return str(numpy2base64(values))


# --- routes ---

PROTOCOL = 2  # 2: token requests answer in arrays if asked to


@dataclass(frozen=True, slots=True)
class RouteCall:
    """One call: vLLM's application state, the request body, the client's trace id."""

    state: Any
    body: dict[str, Any]
    trace: str

    def text(self, key: str) -> str:
        """A string of the body. Raises a Refusal if it is missing or invalid."""
        value = self.body.get(key)
        if not isinstance(value, str) or not value or len(value) > 4096:
            raise Refusal(400, "bad_request", f"{key!r} must be a string.")
        return value

    def label(self) -> ServedLabel:
        """The label in the body. Raises a Refusal if it is invalid."""
        text = self.text("label")
        if (found := ServedLabel.parse(text)) is None:
            raise Refusal(422, "bad_label", f"{text!r} is not a label: SESSION/VERSION, where SESSION is <hex>-<tail>.")
        return found


Route = Callable[[RouteCall], Awaitable[dict[str, Any]]]


class Routes:
    """`root`: the folder with published weights. Serves one update at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._boot = os.environ.get("PVG_BOOT") or secrets.token_hex(8)  # lets the process that starts us recognize us
        self._updating = asyncio.Lock()
        self._newest_adapter: ServedLabel | None = None
        self._gpus: str | None = None  # asked once
        self._asleep = False
        self._table: dict[str, tuple[str, Route]] = {
            "/pvg/info": ("GET", self.info),
            "/pvg/weights": ("POST", self.weights),
            "/pvg/adapters": ("POST", self.adapters),
            "/pvg/adapters/unload": ("POST", self.unload_adapter),
            "/pvg/sleep": ("POST", self.sleep),
            "/pvg/wake": ("POST", self.wake),
        }

    def find(self, method: str, path: str) -> Route:
        """The handler of a route. Raises a Refusal (404, 405)."""
        if path not in self._table:
            raise Refusal(404, "no_such_route", f"There is no {path}.")
        expected, route = self._table[path]
        if method != expected:
            raise Refusal(405, "wrong_method", f"{path} takes {expected}.")
        return route

    async def info(self, call: RouteCall) -> dict[str, Any]:
        """The server's status. Queries the engine, so there is no answer while the engine hangs."""
        engine = call.state.engine_client
        config = engine.vllm_config
        model, lora = config.model_config, config.lora_config
        if self._gpus is None:
            self._gpus = ",".join(await engine.collective_rpc("pvg_gpu")) if model.enable_sleep_mode else ""
        return {
            "protocol": PROTOCOL,
            "boot": self._boot,
            "vllm": _vllm_version(),
            "model": call.state.openai_serving_models.base_model_paths[0].name,
            "shape": model_shape(model.hf_text_config),
            "runner": model.runner_type,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            "max_lora_rank": lora.max_lora_rank if lora is not None else 0,
            "label": await engine.get_weight_version(),
            "paused": await engine.is_paused(),
            "gpus": self._gpus,
            "asleep": self._asleep,
            "world_size": config.parallel_config.world_size_across_dp,
        }

    async def sleep(self, call: RouteCall) -> dict[str, Any]:
        """Free the GPU's memory until `wake` or new weights. Level 1 moves the weights to the machine's memory and
        keeps requests in flight; level 2 drops both, and the label says that the weights are gone."""
        engine, level = call.state.engine_client, call.body.get("level")
        if level not in (1, 2) or not engine.vllm_config.model_config.enable_sleep_mode:
            raise Refusal(422, "no_sleep", "The level is not 1 or 2, or the server has no --enable-sleep-mode.")
        async with self._updating:
            if not self._asleep:
                if level == 2:
                    label = (await engine.get_weight_version()).removeprefix(BROKEN)
                    await engine.update_weight_version(BROKEN + label)
                self._asleep = True  # also if it fails midway: waking an engine that is awake does nothing
                await engine.sleep(level=level, mode="keep" if level == 1 else "abort")
        return {}

    async def wake(self, call: RouteCall) -> dict[str, Any]:
        async with self._updating:
            await self._awake(call.state.engine_client)
        return {}

    async def _awake(self, engine: Any) -> None:
        """New weights for memory that is not there would end the engine."""
        if self._asleep:
            await engine.wake_up()
            self._asleep = False

    async def weights(self, call: RouteCall) -> dict[str, Any]:
        """Load published weights into the engine. Answers immediately if it has the label already, after it resumes an
        engine that an earlier call could not resume."""
        engine, label, name = call.state.engine_client, call.label(), call.text("name")
        async with self._updating:
            await self._awake(engine)
            current = await engine.get_weight_version()
            if current == str(label):
                if await engine.is_paused():
                    await engine.resume_generation()
                return {"label": str(label), "pause_ms": 0.0, "load_ms": 0.0, "resume_ms": 0.0}
            check_order(current, label)
            files = await asyncio.to_thread(weight_files, self._root, name)
            tell("rpc.start", trace=call.trace, version=label.version)
            timing = await _update(engine, label, files)
            tell("rpc.done", trace=call.trace, version=label.version, rpc_ms=sum(timing.values()), **timing)
            return {"label": str(label), **timing}

    async def adapters(self, call: RouteCall) -> dict[str, Any]:
        """Load a published adapter in addition to others. Requests name it by its label. Pauses nothing."""
        models, label, name = call.state.openai_serving_models, call.label(), call.text("name")
        async with self._updating:
            await self._awake(call.state.engine_client)
            if str(label) in models.lora_requests:
                return {"label": str(label), "load_ms": 0.0}
            if call.state.engine_client.vllm_config.lora_config is None:
                raise Refusal(422, "no_adapters", "The server was started without --enable-lora.")
            if self._newest_adapter is not None:
                check_session(self._newest_adapter, label)
            folder = await asyncio.to_thread(adapter_folder, self._root, name)
            tell("rpc.start", trace=call.trace, version=label.version)
            began = time.perf_counter()
            done = await models.load_lora_adapter(_adapter_request(str(label), str(folder)))
            load_ms = (time.perf_counter() - began) * 1e3
            if not isinstance(done, str):  # vLLM returns its errors
                raise Refusal(500, "load_failed", done.error.message)
            self._newest_adapter = label
            tell("rpc.done", trace=call.trace, version=label.version, rpc_ms=load_ms)
            return {"label": str(label), "load_ms": load_ms}

    async def unload_adapter(self, call: RouteCall) -> dict[str, Any]:
        """Accept no more requests for an adapter. Workers keep it while requests need it, and evict it when they need
        the space."""
        models, label = call.state.openai_serving_models, call.label()
        async with self._updating:
            if str(label) in models.lora_requests:
                await models.unload_lora_adapter(_adapter_removal(str(label)))
            return {"label": str(label)}


async def _update(engine: Any, label: ServedLabel, files: Sequence[Path]) -> dict[str, float]:
    """Milliseconds of each part. The engine always resumes, under a label that says what it has."""
    times = [time.perf_counter()]
    reached = BROKEN + str(label)
    try:
        await engine.pause_generation(mode="keep", clear_cache=True)
        times.append(time.perf_counter())
        try:
            failures = await engine.collective_rpc("pvg_load_weights", args=([str(file) for file in files],))
            if not any(failures):
                reached = str(label)
        finally:
            await engine.update_weight_version(reached)
        times.append(time.perf_counter())
    finally:
        await engine.resume_generation()
    times.append(time.perf_counter())
    if any(failures):
        reasons = sorted({failure for failure in failures if failure})
        raise Refusal(
            500, "load_failed", f"{label} was not loaded, and the engine's weights are broken: {'; '.join(reasons)}"
        )
    parts = ("pause_ms", "load_ms", "resume_ms")
    return {part: (times[i + 1] - times[i]) * 1e3 for i, part in enumerate(parts)}


def model_shape(config: Any) -> str:
    """The model's sizes in the format of LanguageModel.shape; empty if the configuration lacks them."""
    sizes = [getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size", "vocab_size")]
    return "{} layers of {}, {} tokens".format(*sizes) if all(isinstance(size, int) for size in sizes) else ""


def _vllm_version() -> str:
    from vllm import __version__

    return str(__version__)


def _adapter_request(name: str, path: str) -> Any:
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

    return LoadLoRAAdapterRequest(lora_name=name, lora_path=path)


def _adapter_removal(name: str) -> Any:
    from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest

    return UnloadLoRAAdapterRequest(lora_name=name)


# --- one HTTP exchange in plain ASGI ---

MOST_BODY_BYTES = 1 << 20


class ClientGone(Exception):
    """The client disconnected before its request was complete."""


def header(scope: Scope, name: bytes) -> bytes:
    """The first header of that name (lower case); empty if missing."""
    return next((bytes(value) for key, value in scope["headers"] if key.lower() == name), b"")


def routed_path(scope: Scope) -> str:
    """The path that the application routes by, without a proxy's root path."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path[len(root) :] if root and path.startswith(root + "/") else path


async def read_table(receive: Receive) -> dict[str, Any]:
    """The body as a JSON object. Raises a Refusal (400, 413) for anything else, ClientGone if the client
    disconnects."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > MOST_BODY_BYTES:
            raise Refusal(413, "too_large", f"A body has at most {MOST_BODY_BYTES} bytes.")
        if not message.get("more_body", False):
            break
    try:
        found = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "bad_request", f"The body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refusal(400, "bad_request", f"The body must be a JSON object, not {type(found).__name__}.")
    return found


async def reply(send: Send, status: int, content: Mapping[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, refusal: Refusal) -> None:
    await reply(send, refusal.status, {"error": {"code": refusal.code, "message": refusal.message}})


# --- log lines: `[weights] t=12.345678 event=... key=value` -----------------------------------------------------------


def tell(event: str, **fields: object) -> None:
    """Write one line to stderr in a single write, so that lines of several processes do not mix."""
    parts = ["[weights]", f"t={time.monotonic():.6f}", f"event={event}"]
    parts += [f"{key}={_value(value)}" for key, value in fields.items()]
    sys.stderr.write(" ".join(parts) + "\n")
    sys.stderr.flush()


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    # A trace id comes from outside, so it must not create a new line or field.
    text = str(value).replace("\r", "\\r").replace("\n", "\\n").replace('"', "'")
    return f'"{text}"' if (" " in text or not text) else text
