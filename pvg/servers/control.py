"""`ControlClient`: what a trainer tells one server besides generation: new weights, pause, resume, how are you.

    control = ControlClient("http://127.0.0.1:8000", pool)
    info = await control.info()
    delivery = await control.load_weights(name="run-1/v000012", label=WeightLabel(session, 12), trace="1f3a")

The pool is its own (`weights.client = "dedicated"`), with a fresh connection for every call, or generation's
("shared"). The server stamps each call at its first byte, and says how long it worked on it: what is left of the wall
time was spent waiting, in this process, in the network, or in the server's event loop.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.servers.labels import WeightLabel
from pvg.servers.pool import HttpPool, MalformedReply, RefusedRequest, Reply

PROTOCOL = 1  # of the routes below /pvg
GENERATION_ID = "generate-tokens-"  # what vLLM puts before the id of a request for tokens
TRACE_HEADER = "x-pvg-trace"
RECEIVED_HEADER = "x-pvg-received-ns"  # when the first byte of a call was seen, in ns since 1970
WORK_HEADER = "x-pvg-work-ms"  # from then to the reply


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself. `boot` is another one after every start; `label` is vLLM's weight version."""

    url: str
    boot: str
    vllm: str
    model: str
    shape: str  # layers, width and vocabulary; empty where its configuration does not tell
    runner: str  # "generate" or "pooling"
    dtype: str
    max_model_len: int
    max_num_seqs: int
    prefix_caching: bool
    logprobs_mode: str
    max_lora_rank: int  # 0: no adapters
    label: str
    paused: bool
    world_size: int


@dataclass(frozen=True, slots=True)
class DeliveryTiming:
    """One update as one server took it. Milliseconds; `parts` divide `rpc_ms`: pause, load, resume. `sent_ns`,
    `received_ns`: when the call was made, and when the server saw its first byte, each by its own side's clock."""

    url: str
    label: WeightLabel
    wall_ms: float
    rpc_ms: float
    received_ns: int
    parts: Mapping[str, float]
    sent_ns: int = 0

    @property
    def queue_ms(self) -> float:
        return self.wall_ms - self.rpc_ms

    @property
    def arrival_ms(self) -> float:
        """The part of `queue_ms` before the server's first byte, as far as the two clocks agree; 0 where unknown."""
        return (self.received_ns - self.sent_ns) / 1e6 if self.sent_ns and self.received_ns else 0.0


def check_shape(info: ServerInfo, shape: str, setting: str) -> None:
    """Raises ConfigurationError for a server whose model has other sizes than `shape`, those of the trainer's. Weights
    that do not fit would leave its engine with half of them."""
    if shape and info.shape and info.shape != shape:
        raise ConfigurationError(
            f"{info.url} serves {info.model!r} ({info.shape}), and {setting} has {shape}.",
            "Start it with `pvg serve` and this experiment's settings, or name another server.",
        )


class ControlClient:
    """Borrows `pool`. Faults are raised as they are (pvg.servers.pool), but for two that the user can mend: a wrong
    key (ConfigurationError) and a server that `pvg serve` did not start (MissingRequirementError)."""

    def __init__(self, url: str, pool: HttpPool, *, timeout_s: float, probe_timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._pool = pool
        self._timeout_s = timeout_s
        self._probe_timeout_s = probe_timeout_s

    async def info(self) -> ServerInfo:
        """Asks the engine behind the server too: a server whose engine hangs does not answer."""
        try:
            reply = await self._call("GET", "/pvg/info", None, self._probe_timeout_s)
        except RefusedRequest as error:
            if error.status == 404:
                raise MissingRequirementError(
                    f"{self.url} is a server without pvg's control routes.", "Start it with: pvg serve EXPERIMENT"
                ) from None
            raise
        found = reply.json()
        if not isinstance(found, dict) or found.get("protocol") != PROTOCOL:
            spoken = found.get("protocol") if isinstance(found, dict) else None
            raise MissingRequirementError(
                f"{self.url} speaks protocol {spoken} of pvg's control routes, and this client {PROTOCOL}.",
                "Start the server with the pvg that trains.",
            )
        told = {**found, "url": self.url}
        for name, kind in get_type_hints(ServerInfo).items():
            if type(told.get(name)) is not kind:
                raise MalformedReply(self.url, f"/pvg/info lacks {name!r}, or tells it as no {kind.__name__}")
        return ServerInfo(**{name: told[name] for name in ServerInfo.__slots__})

    async def load_weights(self, name: str, label: WeightLabel, trace: str, *, keep_kv: bool = False) -> DeliveryTiming:
        """Have the server load the weights in the folder `name` of its root: paused (requests in flight are kept),
        loaded, labelled, resumed. Returns when it is done. A label that the server already has is done at once.

        `keep_kv`: requests in flight go on with the keys and values of the old weights, instead of computing those of
        their prompt and of what they have so far again.
        """
        return await self._update("/pvg/servers", {"name": name, "keep_kv": keep_kv}, label, trace)

    async def load_adapter(self, name: str, label: WeightLabel, trace: str) -> DeliveryTiming:
        """Have the server load the adapter in the folder `name` of its root, as a model of the label's name."""
        return await self._update("/pvg/adapters", {"name": name}, label, trace)

    async def unload_adapter(self, label: WeightLabel, trace: str) -> None:
        """Forget the adapter of that label; one that is not there is no error."""
        await self._call("POST", "/pvg/adapters/unload", {"label": str(label)}, self._timeout_s, trace)

    async def pause(self, trace: str = "") -> Reply:
        """Stop between two steps of the engine; requests in flight are kept."""
        return await self._call("POST", "/pause?mode=keep", None, self._timeout_s, trace)

    async def resume(self, trace: str = "") -> Reply:
        return await self._call("POST", "/resume", None, self._timeout_s, trace)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests for tokens: their replies come at once, with what there is. Ids that are not there are no
        error; vLLM answers before it is done."""
        body = {"request_ids": [f"{GENERATION_ID}{name}" for name in request_ids]}
        await self._call("POST", "/inference/v1/abort_requests", body, self._probe_timeout_s)

    async def checksums(self) -> dict[str, str]:
        """sha256 in hex of the engine's tensors, by vLLM's own names; a tensor that the engine has in another form has
        none."""
        body: Mapping[str, Any] = {"action": "checksum"}
        found = (await self._call("POST", "/weight_checker", body, self._timeout_s)).json()
        if not isinstance(found, dict) or not isinstance(found.get("checksums"), dict):
            raise MalformedReply(self.url, "/weight_checker gave no checksums")
        return {str(name): str(digest) for name, digest in found["checksums"].items()}

    async def call(self, path: str, body: Mapping[str, Any] | None, trace: str = "") -> Reply:
        """POST to another of vLLM's RL routes."""
        return await self._call("POST", path, body, self._timeout_s, trace)

    async def _update(self, path: str, body: Mapping[str, Any], label: WeightLabel, trace: str) -> DeliveryTiming:
        started, sent_ns = time.perf_counter(), time.time_ns()
        reply = await self._call("POST", path, {**body, "label": str(label)}, self._timeout_s, trace)
        wall_ms = (time.perf_counter() - started) * 1e3
        found = reply.json()
        if not isinstance(found, dict) or found.get("label") != str(label):
            raise MalformedReply(self.url, f"{path} answered for other weights than {label}")
        return DeliveryTiming(
            url=self.url,
            label=label,
            wall_ms=wall_ms,
            rpc_ms=float(_header(reply, WORK_HEADER)),
            received_ns=int(_header(reply, RECEIVED_HEADER, whole=True)),
            parts={key: _milliseconds(reply, key, value) for key, value in found.items() if key.endswith("_ms")},
            sent_ns=sent_ns,
        )

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float, trace: str = ""
    ) -> Reply:
        try:
            return await self._pool.request(
                method, self.url + path, body, timeout_s=timeout_s, headers={TRACE_HEADER: trace} if trace else None
            )
        except RefusedRequest as error:
            if error.status == 401:
                raise ConfigurationError(
                    f"{self.url} refuses the control key.",
                    "Give trainer and server the same weights.root, or the same PVG_CONTROL_KEY.",
                ) from None
            raise


def _header(reply: Reply, name: str, *, whole: bool = False) -> str:
    """A header that holds a number, a `whole` one or any."""
    text = reply.headers.get(name, "")
    if not (text.isdecimal() if whole else text.replace(".", "", 1).isdecimal()):
        raise MalformedReply(reply.url, f"the header {name} is missing or no number")
    return text


def _milliseconds(reply: Reply, key: str, value: Any) -> float:
    if not isinstance(value, (int, float)):
        raise MalformedReply(reply.url, f"{key} is no number")
    return float(value)


# What a vLLM server says of its work at /metrics, as the few numbers that are worth a line.

# Of all the metrics: the names that are read, by what they are kept as. Those of several engines are added up.
READ = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:generation_tokens_total": "generated",
    "vllm:prompt_tokens_total": "read",
}


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """At one moment: requests being computed and in the queue; tokens sampled and read since the start."""

    running: int = 0
    waiting: int = 0
    generated: int = 0
    read: int = 0
    at: float = field(default_factory=time.monotonic)  # seconds

    def rates(self, before: ServerLoad) -> tuple[float, float]:
        """Tokens per second sampled and read since `before`."""
        seconds = max(self.at - before.at, 1e-9)
        return (self.generated - before.generated) / seconds, (self.read - before.read) / seconds


def read_figures(text: str) -> ServerLoad:
    """The figures in Prometheus' text format; what is not there counts as 0."""
    found = dict.fromkeys(READ.values(), 0.0)
    for line in text.splitlines():
        name, brace, rest = line.partition("{")
        if not brace:
            name, _, rest = line.partition(" ")
        if name in READ:
            found[READ[name]] += float(rest.rpartition("}")[2].split()[0])
    return ServerLoad(**{key: int(value) for key, value in found.items()})
