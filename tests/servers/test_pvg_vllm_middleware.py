"""PvgMiddleware as vLLM calls it, over an application and an engine that note what reaches them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import mark_stable
from safetensors.torch import save_file

from pvg.rollout.vllm_requests import read_generated, read_prompt_logprobs
from pvg.servers.control import ARRAYS
from pvg.servers.server_side.pvg_vllm import middleware as routes
from pvg.servers.server_side.pvg_vllm.middleware import Message, PvgMiddleware, Receive, Scope, Send

KEY = "a-key"
WITH_KEY = {"authorization": f"Bearer {KEY}"}


class Engine:
    """Notes the calls, as the engine client of vLLM would get them. `faults`: what loading then says or raises."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.label = "default"
        self.faults: list[str | Exception] = []
        self.resume_faults: list[Exception] = []
        self.paused = False
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                runner_type="generate",
                dtype="torch.bfloat16",
                max_model_len=128,
                logprobs_mode="processed_logprobs",
                enable_sleep_mode=True,
                hf_text_config=SimpleNamespace(num_hidden_layers=2, hidden_size=64, vocab_size=320),
            ),
            lora_config=SimpleNamespace(max_lora_rank=16),
            scheduler_config=SimpleNamespace(max_num_seqs=64),
            cache_config=SimpleNamespace(enable_prefix_caching=True),
            parallel_config=SimpleNamespace(world_size_across_dp=1),
        )

    async def get_weight_version(self) -> str:
        return self.label

    async def is_paused(self) -> bool:
        return self.paused

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode} {clear_cache}")
        self.paused = True

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        if self.resume_faults:
            raise self.resume_faults.pop()
        self.paused = False

    async def update_weight_version(self, label: str) -> None:
        self.calls.append(f"label {label}")
        self.label = label

    async def sleep(self, *, level: int, mode: str) -> None:
        self.calls.append(f"sleep {level} {mode}")

    async def wake_up(self) -> None:
        self.calls.append("wake")

    async def collective_rpc(self, method: str, args: tuple[list[str]] = ([],)) -> list[str]:
        if method == "pvg_gpu":
            return ["GPU-1"]
        self.calls.append(f"{method} {[Path(file).name for file in args[0]]}")
        await asyncio.sleep(0)
        fault = self.faults.pop(0) if self.faults else ""
        if isinstance(fault, Exception):
            raise fault
        return ["", fault]  # two workers


class Models:
    """vLLM's object for models and adapters."""

    def __init__(self) -> None:
        self.base_model_paths = [SimpleNamespace(name="prover")]
        self.lora_requests: dict[str, str] = {}
        self.fault = ""

    async def load_lora_adapter(self, request: Any) -> Any:
        if self.fault:
            return SimpleNamespace(error=SimpleNamespace(message=self.fault))
        self.lora_requests[request.lora_name] = request.lora_path
        return "loaded"

    async def unload_lora_adapter(self, request: Any) -> str:
        del self.lora_requests[request.lora_name]
        return "unloaded"


class Server:
    """The middleware and what is behind it."""

    def __init__(self) -> None:
        self.engine, self.models = Engine(), Models()
        self.reached: list[str] = []
        self.middleware = PvgMiddleware(self._inner)
        self._state = SimpleNamespace(engine_client=self.engine, openai_serving_models=self.models)

    async def _inner(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.reached.append(scope.get("path", scope["type"]))
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

    def ask(
        self, method: str, path: str, body: bytes = b"", **extra: Any
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        return asyncio.run(self.asked(method, path, body, **extra))

    async def asked(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] = WITH_KEY, **extra: Any
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Status, JSON and headers of the reply; the body arrives in two pieces."""
        pieces = [body[: len(body) // 2], body[len(body) // 2 :]]
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

        async def send(message: Message) -> None:
            sent.append(message)

        raw = [(key.encode(), value.encode()) for key, value in headers.items()]
        app = SimpleNamespace(state=self._state)
        scope = {"type": "http", "method": method, "path": path, "headers": raw, "app": app}
        await self.middleware({**scope, **extra}, receive, send)
        start, content = sent
        found = {bytes(key).decode(): bytes(value).decode() for key, value in start["headers"]}
        return start["status"], json.loads(content["body"]), found

    def post(self, path: str, body: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
        return self.ask("POST", path, json.dumps(body).encode())

    def code(self, path: str, body: Any) -> tuple[int, str]:
        status, found, _ = self.post(path, body)
        assert found["error"]["message"]
        return status, found["error"]["code"]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PVG_CONTROL_KEY", KEY)
    monkeypatch.setenv("PVG_WEIGHTS_ROOT", str(tmp_path))
    monkeypatch.delenv("PVG_OPEN_TO_NETWORK", raising=False)
    for name, file in [("v1", "model.safetensors"), ("v2", "model.safetensors"), ("a1", "adapter_model.safetensors")]:
        (tmp_path / name).mkdir()
        save_file({"tensor": torch.zeros(3)}, tmp_path / name / file)
        mark_stable(tmp_path / name, {file: (tmp_path / name / file).stat().st_size})
    (tmp_path / "a1" / "adapter_config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def server(root: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    def request(name: str, path: str = "") -> SimpleNamespace:
        return SimpleNamespace(lora_name=name, lora_path=path)

    monkeypatch.setattr(routes, "_vllm_version", lambda: "0.0.1")
    monkeypatch.setattr(routes, "_adapter_request", request)
    monkeypatch.setattr(routes, "_adapter_removal", request)
    return Server()


@pytest.mark.parametrize("path", ["/pause", "/pvg/info", "/", "/health/", "/v1/models/x", "//health"])
@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer"}, {"authorization": f"Basic {KEY}"}, {"authorization": f"Bearer {KEY}x"}]
)
def test_without_the_key_nothing_but_generation(server: Server, path: str, headers: dict[str, str]) -> None:
    status, found, stamps = server.ask("GET", path, headers=headers)
    assert (status, found["error"]["code"]) == (401, "wrong_key")
    assert not server.reached
    assert stamps["x-pvg-received-ns"].isdecimal()


@pytest.mark.parametrize(
    "path", ["/health", "/inference/v1/generate", "/v1/completions", "/classify", "/metrics", "/v1/models"]
)
def test_generation_needs_no_key_and_is_not_touched(server: Server, path: str) -> None:
    status, _, headers = server.ask("POST", path, headers={})
    assert (status, server.reached, headers) == (200, [path], {})


@pytest.mark.parametrize("open_to_network", ["", "1"])
def test_a_control_call_does_not_wait_for_a_batch_of_requests_to_be_read(
    root: Path, monkeypatch: pytest.MonkeyPatch, open_to_network: str
) -> None:
    monkeypatch.setenv("PVG_OPEN_TO_NETWORK", open_to_network)
    server = Server()

    seen: list[int] = []  # requests that have reached vLLM, turn by turn of the loop

    async def watch() -> None:
        while len(server.reached) < 151:
            seen.append(len(server.reached))
            await asyncio.sleep(0)

    async def drive() -> None:
        requests = [asyncio.create_task(server.asked("POST", "/inference/v1/generate")) for _ in range(150)]
        await asyncio.gather(asyncio.create_task(server.asked("POST", "/pause")), watch(), *requests)

    asyncio.run(drive())
    assert max(after - before for before, after in pairwise(seen)) <= 9  # with the control call
    assert server.reached.index("/pause") <= 16


def test_an_open_server_asks_for_the_key_everywhere(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PVG_OPEN_TO_NETWORK", "1")
    server = Server()
    assert server.ask("POST", "/inference/v1/generate", headers={})[0] == 401
    assert server.ask("POST", "/inference/v1/generate")[0] == 200
    assert server.ask("GET", "/health", headers={})[0] == 200


@pytest.mark.parametrize(
    "path", ["/collective_rpc", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/adapters/x"]
)
def test_what_is_closed_is_closed_with_the_key_too(server: Server, path: str) -> None:
    status, found, _ = server.ask("POST", path)
    assert (status, found["error"]["code"]) == (403, "closed")
    assert not server.reached


def test_a_proxys_root_path_opens_nothing(server: Server) -> None:
    assert server.ask("POST", "/proxy/collective_rpc", root_path="/proxy")[0] == 403
    assert server.ask("POST", "/proxy/pause", headers={}, root_path="/proxy")[0] == 401
    assert server.ask("POST", "/proxy/health", headers={}, root_path="/proxy")[0] == 200


def test_a_websocket_without_the_key_is_closed(server: Server) -> None:
    sent: list[Message] = []

    async def nothing() -> Message:
        return {}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    asyncio.run(server.middleware(scope, nothing, send))
    assert [message["type"] for message in sent] == ["websocket.close"]
    assert not server.reached
    asyncio.run(server.middleware({**scope, "headers": [(b"authorization", f"Bearer {KEY}".encode())]}, nothing, send))
    asyncio.run(server.middleware({"type": "lifespan"}, nothing, send))
    assert server.reached == ["/v1/realtime", "lifespan"]


@pytest.mark.parametrize("missing", ["PVG_CONTROL_KEY", "PVG_WEIGHTS_ROOT"])
def test_no_key_or_no_root_no_server(root: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.delenv(missing)
    with pytest.raises(RuntimeError, match=missing):
        Server()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'"text"', b"[" * 100_000, b"{}"])
def test_a_body_that_is_none_is_a_400(server: Server, body: bytes) -> None:
    status, found, _ = server.ask("POST", "/pvg/weights", body)
    assert (status, found["error"]["code"]) == (400, "bad_request")
    assert not server.engine.calls


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"name": 1, "label": "1-a/1"}, (400, "bad_request")),
        ({"name": "v1", "label": None}, (400, "bad_request")),
        ({"name": "v" * 5000, "label": "1-a/1"}, (400, "bad_request")),
        ({"name": "v1", "label": "default"}, (422, "bad_label")),
        ({"name": "v1", "label": "broken:1-a/1"}, (422, "bad_label")),
        ({"name": "../v1", "label": "1-a/1"}, (403, "foreign_path")),
        ({"name": "missing", "label": "1-a/1"}, (422, "not_stable")),
        ({"name": "a\ud800", "label": "1-a/1"}, (422, "not_stable")),
        ({"name": "v" * 4000, "label": "1-a/1"}, (422, "not_stable")),
    ],
)
def test_a_wrong_call_is_refused_and_leaves_the_engine_alone(server: Server, body: Any, expected: Any) -> None:
    for path in ["/pvg/weights", "/pvg/adapters"]:
        assert server.code(path, body) == expected
    assert not server.engine.calls


def test_a_body_without_end_is_refused(server: Server) -> None:
    status, found, _ = server.ask("POST", "/pvg/weights", b" " * (2 << 20))
    assert (status, found["error"]["code"]) == (413, "too_large")


def test_an_update_pauses_loads_labels_and_goes_on(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    body = json.dumps({"name": "v1", "label": "1-a/1"}).encode()
    status, found, headers = server.ask("POST", "/pvg/weights", body, headers={**WITH_KEY, "x-pvg-trace": "7f"})
    assert (status, found["label"]) == (200, "1-a/1")
    assert {key for key in found if key.endswith("_ms")} == {"pause_ms", "load_ms", "resume_ms"}
    assert float(headers["x-pvg-work-ms"]) >= sum(value for key, value in found.items() if key != "label") - 0.01
    load = "pvg_load_weights ['model.safetensors']"
    assert server.engine.calls == ["pause keep True", load, "label 1-a/1", "resume"]
    lines = [line for line in capsys.readouterr().err.splitlines() if "trace=7f" in line]
    told = [line.split("event=")[1].split()[0] for line in lines]
    assert told == ["server.recv", "rpc.start", "rpc.done", "server.reply"]
    assert "version=1 rpc_ms=" in lines[2]


def test_an_update_that_is_repeated_resumes_an_engine_that_stayed_paused(server: Server) -> None:
    server.engine.resume_faults = [TimeoutError("RPC call to resume timed out")]
    body = {"name": "v1", "label": "5-a/1"}
    with pytest.raises(TimeoutError):  # vLLM answers 500
        server.post("/pvg/weights", body)
    assert (server.engine.label, server.engine.paused) == ("5-a/1", True)
    assert server.post("/pvg/weights", body)[0] == 200
    assert not server.engine.paused


def test_it_wakes_before_weights_come_and_says_that_dropped_ones_are_gone(server: Server) -> None:
    assert server.code("/pvg/sleep", {"level": 3}) == (422, "no_sleep")
    server.post("/pvg/weights", {"label": "18f-aa/1", "name": "v1"})
    del server.engine.calls[:]
    for _ in range(2):
        assert server.post("/pvg/sleep", {"level": 1})[0] == 200
    found = server.ask("GET", "/pvg/info")[1]
    assert (found["gpus"], found["asleep"], found["label"]) == ("GPU-1", True, "18f-aa/1")
    server.post("/pvg/weights", {"label": "18f-aa/1", "name": "v1"})
    assert server.engine.calls == ["sleep 1 keep", "wake"]
    server.post("/pvg/sleep", {"level": 2})
    assert server.engine.label == "broken:18f-aa/1"
    server.post("/pvg/wake", {})
    server.post("/pvg/wake", {})
    assert not server.ask("GET", "/pvg/info")[1]["asleep"]
    server.post("/pvg/sleep", {"level": 2})
    server.post("/pvg/weights", {"label": "18f-aa/1", "name": "v1"})
    assert server.engine.calls[2:8] == ["label broken:18f-aa/1", "sleep 2 abort", "wake"] * 2
    assert server.engine.label == "18f-aa/1"
    server.post("/pvg/sleep", {"level": 1})
    server.post("/pvg/adapters", {"label": "18f-aa/2", "name": "a1"})
    assert server.engine.calls[-2:] == ["sleep 1 keep", "wake"]
    server.engine.vllm_config.model_config.enable_sleep_mode = False
    assert server.code("/pvg/sleep", {"level": 1}) == (422, "no_sleep")


def test_backwards_and_older_sessions_are_refused(server: Server) -> None:
    server.post("/pvg/weights", {"name": "v1", "label": "5-a/2"})
    assert server.code("/pvg/weights", {"name": "v1", "label": "5-a/1"}) == (409, "version_backwards")
    assert server.code("/pvg/weights", {"name": "v1", "label": "4-b/9"}) == (409, "older_session")
    assert server.engine.label == "5-a/2"


def test_a_load_that_fails_in_one_worker_breaks_the_label_until_one_succeeds(server: Server) -> None:
    server.engine.faults = ["ValueError: no such tensor"]
    status, found, _ = server.post("/pvg/weights", {"name": "v1", "label": "1-a/1"})
    assert (status, found["error"]["code"]) == (500, "load_failed")
    assert "no such tensor" in found["error"]["message"]
    assert server.engine.calls[-2:] == ["label broken:1-a/1", "resume"]
    assert server.post("/pvg/weights", {"name": "v1", "label": "1-a/1"})[0] == 200
    assert server.engine.label == "1-a/1"


def test_adapters_are_loaded_once_and_unloaded(server: Server) -> None:
    body = {"name": "a1", "label": "5-a/1"}
    assert server.post("/pvg/adapters", body)[0] == 200
    assert list(server.models.lora_requests) == ["5-a/1"]
    server.models.fault = "loaded twice"
    assert server.post("/pvg/adapters", body)[1]["load_ms"] == 0.0
    assert server.code("/pvg/adapters", {"name": "a1", "label": "5-a/2"}) == (500, "load_failed")
    assert server.code("/pvg/adapters", {"name": "a1", "label": "4-b/2"}) == (409, "older_session")
    assert server.code("/pvg/adapters", {"name": "v1", "label": "5-a/3"}) == (422, "not_safetensors")
    for _ in range(2):
        assert server.post("/pvg/adapters/unload", {"label": "5-a/1"})[:2] == (200, {"label": "5-a/1"})
    assert not server.models.lora_requests
    assert not server.engine.calls, "nothing was paused"


class Serving:
    """vLLM's object for token requests, with the results of one request of 2,000 tokens in pieces."""

    ids = tuple(range(100_000, 102_000))
    prompt = SimpleNamespace(prompt_token_ids=[1, 2, 3], prompt_logprobs=[None, {2: -0.5}, {3: float("nan")}])

    async def results(self, pieces: int, finish: str = "length") -> AsyncIterator[Any]:
        size = len(self.ids) // pieces
        for first in range(0, len(self.ids), size):
            ids, last = self.ids[first : first + size], first + size == len(self.ids)
            output = SimpleNamespace(
                token_ids=ids,
                logprobs=[{token: logprob(-token / 70)} for token in ids],
                finish_reason=finish if last else None,
                weight_versions=[SimpleNamespace(start=0, end=2000, version="a/1")] if last else None,
                routed_experts=None,
            )
            scores = [one and {i: logprob(p) for i, p in one.items()} for one in self.prompt.prompt_logprobs]
            yield SimpleNamespace(
                outputs=[output],
                prompt_token_ids=self.prompt.prompt_token_ids,
                prompt_logprobs=None if first else scores,
                num_cached_tokens=2,
            )

    def _raise_if_error(self, reason: str | None, name: str) -> None:
        if reason == "error":
            raise RuntimeError(name)

    async def serve_tokens_full_generator(self, request: Any, results: AsyncIterator[Any], name: str) -> str:
        return "an object per token"

    async def serve_tokens_stream_generator(
        self, request: Any, results: AsyncIterator[Any], name: str
    ) -> AsyncIterator[str]:
        yield "an object per token"


def logprob(value: float) -> SimpleNamespace:
    return SimpleNamespace(logprob=value)


def asking(extra: Any) -> SimpleNamespace:
    return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))


async def pieces_of(reply: AsyncIterator[str]) -> list[str]:
    return [piece async for piece in reply]


def test_tokens_come_in_arrays_of_11_bytes_each_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "TOLD_EVERY_S", 0.0)
    serving, arrays = Serving(), asking(ARRAYS)
    for _ in range(2):
        routes.answer_in_arrays(serving)
    routes.answer_in_arrays(None)  # a server that only scores

    async def ask() -> tuple[list[str], list[str]]:
        whole: Any = await serving.serve_tokens_full_generator(arrays, serving.results(1), "r")
        streamed = serving.serve_tokens_stream_generator(arrays, serving.results(4), "r")
        return await pieces_of(whole), await pieces_of(streamed)

    (whole,), streamed = asyncio.run(ask())
    assert len(whole) / len(serving.ids) < 11  # vLLM's own JSON: 140
    found, reply = read_generated(json.loads(whole), "u"), json.loads(whole)
    assert found.token_ids.tolist() == list(serving.ids)
    assert found.logprobs.tolist() == [float(np.float32(-token / 70)) for token in serving.ids]
    assert (found.labels, found.prompt_tokens, found.cached_tokens) == (((0, "a/1"),), 3, 2)
    assert read_prompt_logprobs(reply, np.array([1, 2, 3], np.int32), "u")[0].tolist() == [-0.5, -9999.0]
    assert [json.loads(event.removeprefix("data: ")) for event in streamed[:-1]] == [500, 1000, 1500, reply]
    assert streamed[-1] == "data: [DONE]\n\n"


def test_a_long_reply_is_read_in_as_many_calls_of_python_as_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = Serving()
    routes.answer_in_arrays(serving)

    async def ask() -> Any:
        reply: Any = await serving.serve_tokens_full_generator(asking(ARRAYS), serving.results(1), "r")
        return json.loads((await pieces_of(reply))[0])

    counts = []
    for tokens in (2_000, 20_000):
        monkeypatch.setattr(Serving, "ids", tuple(range(100_000, 100_000 + tokens)))
        reply, called = asyncio.run(ask()), list[str]()
        sys.setprofile(lambda frame, event, _, called=called: called.append(event))
        try:
            found = read_generated(reply, "u")
        finally:
            sys.setprofile(None)
        assert len(found.token_ids) == tokens
        counts.append(sum(event in ("call", "c_call") for event in called))
    assert counts[0] == counts[1] < 200


def test_other_token_requests_are_answered_as_vllm_does_and_errors_stay_errors() -> None:
    serving = Serving()
    routes.answer_in_arrays(serving)

    async def ask() -> None:
        for extra in (None, {"other": 1}):
            plain = asking(extra)
            text = await serving.serve_tokens_full_generator(plain, serving.results(1), "r")
            assert text == "an object per token"
            assert await pieces_of(serving.serve_tokens_stream_generator(plain, serving.results(1), "r")) == [text]
        with pytest.raises(RuntimeError, match="r1"):
            await serving.serve_tokens_full_generator(asking(ARRAYS), serving.results(1, "error"), "r1")

    asyncio.run(ask())
