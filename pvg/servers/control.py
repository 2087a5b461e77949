"""`ControlClient`: a trainer's calls to one server other than generation: weights, pause, resume, status.

    control = ControlClient("http://127.0.0.1:8000", pool)
    info = await control.info()
    delivery = await control.load_weights(name="run-1/v000012", label=WeightLabel(session, 12), trace="1f3a")

The pool is not generation's, and makes a new connection for every call, so a call never waits behind requests.
The server timestamps each call at its first byte and reports its working time. The rest of the wall time is waiting: in
this process, in the network, or in the server's event loop.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pvg.config.operation import Serving, Weights
from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.servers.pool import HttpPool, MalformedReply, RefusedRequest, Reply
from pvg.servers.publishing import WeightLabel
from pvg.store.atomic import disk_full_explained, make_directory, sync_directory, temporary_beside

PROTOCOL = 2  # version of the routes below /pvg, and of replies with tokens
GENERATION_ID = "generate-tokens-"  # vLLM's prefix for the ids of token requests
ARRAYS = {"pvg_arrays": True}  # asks pvg's part of a server for arrays of tokens, not for a JSON object per token
TRACE_HEADER = "x-pvg-trace"
RECEIVED_HEADER = "x-pvg-received-ns"  # arrival of a call's first byte, in ns since 1970
WORK_HEADER = "x-pvg-work-ms"  # from arrival to reply


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's description of itself. `boot` changes with every start; `label` is vLLM's weight version."""

    url: str
    boot: str
    vllm: str
    model: str
    shape: str  # layers, width and vocabulary; empty if its configuration does not have them
    runner: str  # "generate" or "pooling"
    dtype: str
    max_model_len: int
    max_num_seqs: int
    prefix_caching: bool
    logprobs_mode: str
    max_lora_rank: int  # 0: adapters are disabled
    label: str
    paused: bool
    gpus: str  # UUIDs of its GPUs, with commas, if it can sleep; else empty
    asleep: bool
    world_size: int


@dataclass(frozen=True, slots=True)
class DeliveryTiming:
    """One update of one server. Times in milliseconds; `parts` divides `rpc_ms` into pause, load and resume. `sent_ns`,
    `received_ns`: time of the call, and of its first byte at the server, each by the local clock."""

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
        """The part of `queue_ms` before the first byte arrived, as far as the clocks agree; 0 if unknown."""
        return (self.received_ns - self.sent_ns) / 1e6 if self.sent_ns and self.received_ns else 0.0


class ControlClient:
    """Does not own `pool`. Raises the faults of pvg.servers.pool, and two errors that the user can fix:
    ConfigurationError for a wrong key, MissingRequirementError for a server that `pvg serve` did not start."""

    def __init__(self, url: str, pool: HttpPool, *, timeout_s: float, probe_timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._pool = pool
        self._timeout_s = timeout_s
        self._probe_timeout_s = probe_timeout_s

    async def info(self) -> ServerInfo:
        """The server's status. This also queries its engine, so a server whose engine hangs does not answer."""
        try:
            reply = await self._call("GET", "/pvg/info", None, self._probe_timeout_s)
        except RefusedRequest as error:
            if error.status == 404:
                raise MissingRequirementError(
                    f"{self.url} has no pvg control routes.", "Start it with: pvg serve EXPERIMENT"
                ) from None
            raise
        found = reply.json()
        if not isinstance(found, dict) or found.get("protocol") != PROTOCOL:
            spoken = found.get("protocol") if isinstance(found, dict) else None
            raise MissingRequirementError(
                f"{self.url} uses protocol {spoken} of pvg's control routes, but this client uses {PROTOCOL}.",
                "Start the server with the same version of pvg as the trainer.",
            )
        fields = {**found, "url": self.url}
        for name, kind in get_type_hints(ServerInfo).items():
            if type(fields.get(name)) is not kind:
                raise MalformedReply(self.url, f"in /pvg/info, {name!r} is missing or not of type {kind.__name__}")
        return ServerInfo(**{name: fields[name] for name in ServerInfo.__slots__})

    async def load_weights(self, name: str, label: WeightLabel, trace: str) -> DeliveryTiming:
        """Make the server load the weights in folder `name` of its root: pause (keeping requests in flight), load,
        label, resume. Returns when this is done; immediately if the server already has the label. The server recomputes
        the keys and values of requests in flight.
        """
        return await self._update("/pvg/weights", {"name": name}, label, trace)

    async def load_adapter(self, name: str, label: WeightLabel, trace: str) -> DeliveryTiming:
        """Make the server load the adapter in folder `name` of its root, as a model named like the label."""
        return await self._update("/pvg/adapters", {"name": name}, label, trace)

    async def unload_adapter(self, label: WeightLabel, trace: str) -> None:
        """Unload the adapter with that label. It is not an error if it is not loaded."""
        await self._call("POST", "/pvg/adapters/unload", {"label": str(label)}, self._timeout_s, trace)

    async def pause(self, trace: str = "") -> Reply:
        """Stop between two engine steps. Requests in flight are kept."""
        return await self._call("POST", "/pause?mode=keep", None, self._timeout_s, trace)

    async def resume(self, trace: str = "") -> Reply:
        return await self._call("POST", "/resume", None, self._timeout_s, trace)

    async def sleep(self, level: int) -> None:
        """Free the server's GPU memory. Level 1 keeps the weights in the machine's memory; level 2 drops them."""
        await self._call("POST", "/pvg/sleep", {"level": level}, self._timeout_s)

    async def wake(self) -> None:
        await self._call("POST", "/pvg/wake", {}, self._timeout_s)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these token requests; their replies return with the tokens so far. Unknown ids are ignored. vLLM answers
        before the requests have ended."""
        body = {"request_ids": [f"{GENERATION_ID}{name}" for name in request_ids]}
        await self._call("POST", "/inference/v1/abort_requests", body, self._probe_timeout_s)

    async def call(self, path: str, body: Mapping[str, Any] | None, trace: str = "") -> Reply:
        """POST to another of vLLM's RL routes."""
        return await self._call("POST", path, body, self._timeout_s, trace)

    async def _update(self, path: str, body: Mapping[str, Any], label: WeightLabel, trace: str) -> DeliveryTiming:
        started, sent_ns = time.perf_counter(), time.time_ns()
        reply = await self._call("POST", path, {**body, "label": str(label)}, self._timeout_s, trace)
        wall_ms = (time.perf_counter() - started) * 1e3
        found = reply.json()
        if not isinstance(found, dict) or found.get("label") != str(label):
            raise MalformedReply(self.url, f"{path} answered for weights other than {label}")
        return DeliveryTiming(
            url=self.url,
            label=label,
            wall_ms=wall_ms,
            rpc_ms=header_number(reply, WORK_HEADER),
            received_ns=int(header_number(reply, RECEIVED_HEADER)),
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


def header_number(reply: Reply, name: str) -> float:
    """A header with a number, which pvg's middleware sets. Raises MalformedReply."""
    text = reply.headers.get(name, "")
    if not text.replace(".", "", 1).isdecimal():
        raise MalformedReply(reply.url, f"the header {name} is missing or not a number")
    return float(text)


def _milliseconds(reply: Reply, key: str, value: Any) -> float:
    if not isinstance(value, (int, float)):
        raise MalformedReply(reply.url, f"{key} is not a number")
    return float(value)


# `Connections`: HTTP connections to servers, and the key that the control routes require.

KEY_VARIABLE = "PVG_CONTROL_KEY"
KEY_FILE = "control.key"
SHORTEST_KEY = 16


@dataclass(frozen=True, slots=True)
class Connections:
    """HTTP connections to servers: `requests` for their work, `control` for weights and probes."""

    requests: HttpPool
    control: HttpPool
    serving: Serving
    weights: Weights

    @classmethod
    def open(
        cls, serving: Serving, weights: Weights, concurrency: int, setting: str = "", key: str | None = None
    ) -> Connections:
        """`concurrency`, `setting`: see HttpPool.of. `key`: None reads the control routes' key. Sends nothing yet."""
        key = control_key(weights.root) if key is None else key
        requests = HttpPool.of(concurrency, setting, key=key)
        return cls(requests, HttpPool(requests.connections, key=key, fresh=True), serving, weights)

    def client(self, url: str) -> ControlClient:
        """A client of the control routes of the server at `url`."""
        timeout_s, probe_timeout_s = self.weights.timeout_s, self.serving.probe_timeout_s
        return ControlClient(url, self.control, timeout_s=timeout_s, probe_timeout_s=probe_timeout_s)

    async def close(self) -> None:
        """A second call does nothing."""
        async with AsyncExitStack() as rest:  # closes the second pool even if the first one fails
            rest.push_async_callback(self.control.close)
            await self.requests.close()


# --- the key ---------------------------------------------------------------------------------------------------------


def control_key(root: Path) -> str:
    """The key. Raises ConfigurationError if it cannot be sent in an HTTP header, or if the file is readable by others
    or cannot be read or created; MissingRequirementError if the disk is full."""
    if key := os.environ.get(KEY_VARIABLE, ""):
        return _checked(key, f"The environment variable {KEY_VARIABLE}")
    path = root / KEY_FILE
    if not path.exists():
        _make(path)
    return _checked(_read(path), str(path))


def _make(path: Path) -> None:
    """Create the key unless another process does so first. The file appears with its full content, because a partial
    key would be a different key."""
    try:
        make_directory(path.parent)
        temporary = temporary_beside(path)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with disk_full_explained(path), open(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(32))
                file.flush()
                os.fsync(descriptor)
            os.link(temporary, path)  # unlike a rename, it does not replace a key that another process just created
        finally:
            temporary.unlink()
        sync_directory(path.parent)
    except FileExistsError:
        return
    except OSError as error:
        raise ConfigurationError(
            f"The control key cannot be written to {path}: {error.strerror}.",
            f"Set {KEY_VARIABLE} for the trainer and its servers, or set weights.root to a folder that you own.",
        ) from None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode, content = os.fstat(file.fileno()).st_mode, file.read(1 << 12)
    except OSError as error:
        raise ConfigurationError(
            f"The control key {path} cannot be read: {error.strerror}.",
            f"Run trainer and servers as the same user, or set {KEY_VARIABLE} for both.",
        ) from None
    if mode & 0o077:
        raise ConfigurationError(f"{path} is readable by others.", f"chmod 600 {path}")
    return content.decode(errors="replace").strip()


def _checked(key: str, where: str) -> str:
    if not key.isascii() or not key.isprintable() or " " in key or len(key) < SHORTEST_KEY:
        raise ConfigurationError(
            f"{where} is not a valid key: it must be {SHORTEST_KEY} or more printable ASCII characters without spaces.",
            "Remove it: pvg then creates a new one.",
        )
    return key
