"""How many connections a client may open, derived from how many requests are to be in flight (invariant 7).

A pool smaller than the concurrency does not fail: it queues inside the HTTP client, where no timing sees it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson
from aiohttp.http import HttpProcessingError

from pvg.errors import ConfigurationError

# Small runs get these anyway: weight updates and health checks share a client that must never be the bottleneck.
FLOOR_TOTAL = 500
FLOOR_PER_HOST = 200


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Most connections open at once: to all `hosts` together, and to each of them."""

    total: int
    per_host: int
    hosts: int = 1

    @classmethod
    def derive(cls, concurrency: int, hosts: int = 1) -> ConnectionLimits:
        """Limits under which `concurrency` requests spread evenly over `hosts` never wait for a connection.

        Raises ConfigurationError when either is below 1.
        """
        _check_positive(concurrency, hosts)
        per_host = max(FLOOR_PER_HOST, -(-concurrency // hosts))
        return cls(total=max(FLOOR_TOTAL, concurrency), per_host=per_host, hosts=hosts)

    @property
    def capacity(self) -> int:
        """Requests that can really be in flight."""
        return min(self.total, self.per_host * self.hosts)

    def assert_covers(self, concurrency: int) -> None:
        """Raises ConfigurationError naming the limit that is too low for `concurrency` requests in flight."""
        _check_positive(concurrency, self.hosts)
        if self.total < concurrency:
            raise ConfigurationError(
                f"The connection limit of {self.total} is below the concurrency of {concurrency}.",
                f"Raise it to {concurrency}, or lower rollout.concurrency.",
            )
        if self.per_host * self.hosts < concurrency:
            raise ConfigurationError(
                f"The limit of {self.per_host} connections per host allows {self.per_host * self.hosts} to "
                f"{self.hosts} host(s), below the concurrency of {concurrency}.",
                f"Raise it to {-(-concurrency // self.hosts)}, add hosts, or lower rollout.concurrency.",
            )


def _check_positive(concurrency: int, hosts: int) -> None:
    if concurrency < 1 or hosts < 1:
        raise ConfigurationError(f"The concurrency ({concurrency}) and the hosts ({hosts}) must be at least 1.")


# `HttpPool`: connections to servers, as many as the concurrency needs, and faults with names.
#
#     pool = HttpPool(ConnectionLimits.derive(1024, hosts=2), connect_timeout_s=5.0, key=key)
#     reply = await pool.request("POST", f"{server}/inference/v1/generate", body, timeout_s=60.0)
#
# Invariant: a request waits for the server, never for a connection (invariant 7): the limits cover the concurrency,
# which whoever opens the pool asserts. `waited_s` tells if that should ever fail.

LONGEST_EVENT = 64 << 20  # bytes of one event of a stream
KEEP_ALIVE_S = 4.0  # less than vLLM's 5 s: a connection must not be reused at the moment when the server closes it


class ServerFault(Exception):
    """A request that a server did not serve. `sent`: whether it may have begun to."""

    sent = True

    def __init__(self, url: str, what: str) -> None:
        super().__init__(f"{url}: {what}")
        self.url = url
        self.what = what


class ServerUnreachable(ServerFault):
    """No connection: the request was not sent."""

    sent = False


class ConnectionBroken(ServerFault):
    """The connection ended before the reply did."""


class ReplyTimeout(ServerFault):
    """No reply in time."""


class MalformedReply(ServerFault):
    """A reply that is not what the route's replies look like."""


class RefusedRequest(ServerFault):
    """A status of 300 or above: vLLM redirects nobody, and the key goes nowhere else. `code` names the reason where
    the server gives one."""

    def __init__(self, url: str, status: int, code: str, message: str) -> None:
        super().__init__(url, f"HTTP {status}: {message or code or 'no reason given'}")
        self.status = status
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply with a status below 300."""

    status: int
    body: bytes
    headers: Mapping[str, str]
    url: str

    def json(self) -> Any:
        """Raises MalformedReply for what is not JSON."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError as error:
            raise MalformedReply(self.url, f"no JSON: {error}") from None


class HttpPool:
    """`fresh`: every request opens a connection of its own, so that none waits behind another or for a stale one.

    Belongs to one event loop. `connect_timeout_s` bounds the connecting, each request's `timeout_s` everything.
    """

    def __init__(
        self, limits: ConnectionLimits, *, connect_timeout_s: float, key: str = "", fresh: bool = False
    ) -> None:
        self.limits = limits
        self.waited_s = 0.0  # for a free connection, all requests together
        self.opened = 0
        self.reused = 0
        self._connect_timeout_s = connect_timeout_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._fresh = fresh
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._open: set[aiohttp.ClientResponse] = set()

    async def request(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """One request and its whole reply. Raises a ServerFault."""
        async with self._exchange(method, url, body, timeout_s, headers) as response:
            return Reply(response.status, await response.read(), response.headers, url)

    @asynccontextmanager
    async def events(
        self, url: str, body: Mapping[str, Any], *, timeout_s: float | None
    ) -> AsyncIterator[AsyncIterator[Any]]:
        """The JSON objects of a stream of server-sent events, as they come. Leaving early closes the connection,
        which tells vLLM to stop. Raises a ServerFault, ConnectionBroken for a stream that ends without its `[DONE]`."""
        async with self._exchange("POST", url, body, timeout_s, None) as response:
            yield _events(url, response)

    async def close(self) -> None:
        """Close all connections; requests in flight end as ConnectionBroken. Closing twice does nothing."""
        self._closed = True
        for response in self._open:  # aiohttp would leave those who read a body waiting for ever
            response.content.set_exception(aiohttp.ClientConnectionError("the pool was closed"))
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def _exchange(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None,
        timeout_s: float | None,
        headers: Mapping[str, str] | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._connect_timeout_s)
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        content = {"Content-Type": "application/json"} if data is not None else {}
        try:
            async with self._opened().request(
                method, url, data=data, timeout=timeout, headers={**content, **(headers or {})}, allow_redirects=False
            ) as response:
                if response.status >= 300:
                    raise _refusal(url, response.status, await response.read())
                self._open.add(response)
                try:
                    yield response
                finally:
                    self._open.discard(response)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ServerUnreachable(url, _said(error)) from error
        except TimeoutError as error:
            raise ReplyTimeout(url, f"no reply within {timeout_s:g} s" if timeout_s else "no reply") from error
        except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError) as error:
            raise ConnectionBroken(url, _said(error)) from error
        except aiohttp.ClientError as error:
            raise MalformedReply(url, _said(error)) from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._closed:
            raise RuntimeError("The pool is closed.")
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=self.limits.total,
                limit_per_host=self.limits.per_host,
                keepalive_timeout=None if self._fresh else KEEP_ALIVE_S,
                force_close=self._fresh,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=self._headers,
                auto_decompress=True,
                read_bufsize=1 << 20,  # prompts' log-probs come as one long line
                trace_configs=[self._watch()],
            )
        return self._session

    def _watch(self) -> aiohttp.TraceConfig:
        watch = aiohttp.TraceConfig()

        async def queued(_: aiohttp.ClientSession, place: SimpleNamespace, __: Any) -> None:
            place.queued = time.perf_counter()

        async def left(_: aiohttp.ClientSession, place: SimpleNamespace, __: Any) -> None:
            self.waited_s += time.perf_counter() - place.queued

        async def opened(_: aiohttp.ClientSession, __: SimpleNamespace, ___: Any) -> None:
            self.opened += 1

        async def reused(_: aiohttp.ClientSession, __: SimpleNamespace, ___: Any) -> None:
            self.reused += 1

        watch.on_connection_queued_start.append(queued)
        watch.on_connection_queued_end.append(left)
        watch.on_connection_create_end.append(opened)
        watch.on_connection_reuseconn.append(reused)
        return watch


async def _events(url: str, response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    while line := await _line(url, response):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            await response.read()  # the end of the reply: without it the connection could not be used again
            return
        try:
            yield orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise MalformedReply(url, f"no JSON in the stream: {error}") from None
    raise ConnectionBroken(url, "the stream ended early")


async def _line(url: str, response: aiohttp.ClientResponse) -> bytes:
    """The next line with its end; b"" after the last."""
    try:
        return await response.content.readline(max_line_length=LONGEST_EVENT)
    except HttpProcessingError:
        raise MalformedReply(url, f"an event of more than {LONGEST_EVENT} bytes") from None


def _refusal(url: str, status: int, body: bytes) -> RefusedRequest:
    """vLLM answers {"error": {"message", "code", "type"}} or {"detail": ...} or {"error": text}; others anything."""
    code, message = "", body[:200].decode(errors="replace").strip()
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return RefusedRequest(url, status, code, message)
    error = found.get("error", found.get("detail", "")) if isinstance(found, dict) else ""
    if isinstance(error, dict):
        return RefusedRequest(url, status, str(error.get("code", "")), str(error.get("message", ""))[:500])
    return RefusedRequest(url, status, code, str(error)[:500] or message)


def _said(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


async def pause_before_retry(attempt: int, jitter: float) -> None:
    """Wait before attempt number `attempt` (from 1): 0.1 s doubled each time, at most 5 s, times 0.5 to 1.5 by
    `jitter` in [0, 1), so that many requests that failed together do not come back together."""
    await asyncio.sleep(min(5.0, 0.1 * 2 ** (attempt - 1)) * (0.5 + jitter))
