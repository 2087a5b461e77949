"""`HttpPool`: HTTP connections to servers, as many as the concurrency needs, and an exception class for each fault.

    pool = HttpPool.of(1024, "rollout.concurrency", key=key)
    reply = await pool.request("POST", f"{server}/inference/v1/generate", body, timeout_s=60.0)

Invariant 7: a request waits for the server, never for a connection. A pool that is too small does not fail: requests
queue inside the HTTP client, where no timing shows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import orjson
from aiohttp.http import HttpProcessingError

from pvg.errors import allow_open_files, open_files

T = TypeVar("T")

# Weight updates and health checks of small runs share this client, which must never be the bottleneck.
LEAST_CONNECTIONS = 500


# --- the pool --------------------------------------------------------------------------------------------------------

END_S = 1.0  # from a stream's last event to the end of the reply; after that, the connection is closed
LONGEST_EVENT = 64 << 20  # bytes of one stream event
KEEP_ALIVE_S = 4.0  # below vLLM's 5 s, so that no connection is reused at the moment the server closes it


TEMPORARY = (408, 425, 429)  # request timeout, too early, too many requests: proxies send them under load


class ServerFault(Exception):
    """A request that a server did not serve. `sent`: the server may have started to serve it."""

    sent = True

    def __init__(self, url: str, what: str) -> None:
        super().__init__(f"{url}: {what}")
        self.url = url
        self.what = what


class ServerUnreachable(ServerFault):
    """No connection: the request was not sent."""

    sent = False


class ConnectionBroken(ServerFault):
    """The connection ended before the reply was complete."""


class ReplyTimeout(ServerFault):
    """No reply before the timeout."""


class MalformedReply(ServerFault):
    """A reply without the format of its route."""


class RefusedRequest(ServerFault):
    """A status of 300 or above. (vLLM never redirects, and the key must not go elsewhere.) `code` is the server's error
    code, if any."""

    def __init__(self, url: str, status: int, code: str, message: str) -> None:
        super().__init__(url, f"HTTP {status}: {message or code or 'no reason given'}")
        self.status = status
        self.code = code
        self.message = message

    @property
    def final(self) -> bool:
        """Whether the server would refuse the same request again."""
        return self.status < 500 and self.status not in TEMPORARY


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete reply with a status below 300."""

    status: int
    body: bytes
    headers: Mapping[str, str]
    url: str

    def json(self) -> Any:
        """The body as JSON. Raises MalformedReply if it is not JSON."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError as error:
            raise MalformedReply(self.url, f"not JSON: {error}") from None


CONNECT_S = 5.0  # timeout of a connection attempt: a server that listens accepts within milliseconds


class HttpPool:
    """At most `connections` of one event loop, to any hosts. `connect_timeout_s` limits the connecting,
    each request's `timeout_s` its total time. `fresh`: every request opens a new connection, so it never waits behind
    another or uses a stale one."""

    def __init__(
        self, connections: int, *, connect_timeout_s: float = CONNECT_S, key: str = "", fresh: bool = False
    ) -> None:
        self.connections = connections
        self._connect_timeout_s = connect_timeout_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._fresh = fresh
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._open: set[aiohttp.ClientResponse] = set()

    @classmethod
    def of(cls, concurrency: int, setting: str = "", *, key: str = "") -> HttpPool:
        """A pool in which `concurrency` requests never wait for a connection. `setting`: the one that bounds them.
        Raises MissingRequirementError if this process may not open as many files."""
        pool = cls(max(LEAST_CONNECTIONS, concurrency), key=key)
        allow_open_files(pool, concurrency, "request", setting)
        return pool

    async def request(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send one request and read the whole reply. Raises a ServerFault."""
        async with self._exchange(method, url, body, timeout_s, headers) as response:
            return Reply(response.status, await response.read(), response.headers, url)

    @asynccontextmanager
    async def events(
        self, url: str, body: Mapping[str, Any], *, timeout_s: float | None
    ) -> AsyncIterator[AsyncIterator[Any]]:
        """The JSON objects of a stream of server-sent events, as they arrive. Leaving early closes the connection,
        which makes vLLM stop. Raises a ServerFault, also for a stream that ends without `[DONE]`."""
        async with self._exchange("POST", url, body, timeout_s, None) as response:
            yield _events(url, response)

    async def close(self) -> None:
        """Close all connections. Requests in flight raise ConnectionBroken. A second call does nothing."""
        self._closed = True
        open_files.pop(self, None)
        for response in self._open:  # otherwise aiohttp lets readers of a body wait forever
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
                self._open.add(response)
                try:
                    if response.status >= 300:
                        raise _refusal(url, response.status, await response.read())
                    yield response
                finally:
                    self._open.discard(response)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ServerUnreachable(url, _message(error)) from error
        except TimeoutError as error:
            raise ReplyTimeout(url, f"no reply within {timeout_s:g} s" if timeout_s else "no reply") from error
        except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError) as error:
            raise ConnectionBroken(url, _message(error)) from error
        except aiohttp.ClientError as error:
            raise MalformedReply(url, _message(error)) from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._closed:
            raise RuntimeError("The pool is closed.")
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=self.connections, keepalive_timeout=None if self._fresh else KEEP_ALIVE_S, force_close=self._fresh
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=self._headers,
                auto_decompress=True,
                read_bufsize=1 << 20,  # the log-probs of a prompt are one long line
            )
        return self._session


async def _events(url: str, response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    while line := await _line(url, response):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            with suppress(TimeoutError):  # read to the end of the reply, so that the connection can be reused
                async with asyncio.timeout(END_S):
                    await response.read()
            return
        try:
            yield orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise MalformedReply(url, f"invalid JSON in the stream: {error}") from None
    raise ConnectionBroken(url, "the stream ended early")


async def _line(url: str, response: aiohttp.ClientResponse) -> bytes:
    """The next line including its newline; b"" at the end."""
    try:
        return await response.content.readline(max_line_length=LONGEST_EVENT)
    except HttpProcessingError:
        raise MalformedReply(url, f"an event of more than {LONGEST_EVENT} bytes") from None


def _refusal(url: str, status: int, body: bytes) -> RefusedRequest:
    """vLLM sends {"error": {"message", "code", "type"}}, {"detail": ...} or {"error": text}; other servers send
    anything."""
    code, message = "", body[:200].decode(errors="replace").strip()
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return RefusedRequest(url, status, code, message)
    error = found.get("error", found.get("detail", "")) if isinstance(found, dict) else ""
    if isinstance(error, dict):
        return RefusedRequest(url, status, str(error.get("code", "")), str(error.get("message", ""))[:500])
    return RefusedRequest(url, status, code, str(error)[:500] or message)


def _message(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


async def asked_again(send: Callable[[], Awaitable[T]], retries: int, told: Callable[[ServerFault], object] = id) -> T:
    """The result of `send`, which asks one server and is repeated after a fault, with which `told` is called. Raises
    the last fault. A request that is refused or gets no reply is not repeated."""
    for attempt in range(1, retries + 1):
        try:
            return await send()
        except ServerFault as fault:
            if isinstance(fault, ReplyTimeout) or (isinstance(fault, RefusedRequest) and fault.final):
                raise
            told(fault)
        await pause_before_retry(attempt, jitter=0.5)
    return await send()


async def together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. The first failure cancels the others, and is raised after they have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def pause_s(attempt: int) -> float:
    """Seconds before retry number `attempt` (from 1): 0.1, doubled each time, at most 5."""
    return min(5.0, 0.1 * 2.0 ** (attempt - 1))


async def pause_before_retry(attempt: int, jitter: float) -> None:
    """Wait for `pause_s`. `jitter` in [0, 1) scales it by 0.5 to 1.5, so that requests that failed together do not
    retry together."""
    await asyncio.sleep(pause_s(attempt) * (0.5 + jitter))
