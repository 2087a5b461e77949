"""`OpenAiClient`: chat and text completions of a server with OpenAI's routes, such as vLLM, Ollama or a hosted model.

Invariants: requests go only to the URL that the user named, and follow no redirect. The key comes from an environment
variable; no message, file or exception contains it. At most `concurrency` requests are in flight.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from pvg.errors import ConfigurationError, PvgError, ServerUnavailableError, UsageError
from pvg.hub import SILENT, Say
from pvg.inputs import has_place
from pvg.servers.pool import HttpPool, MalformedReply, RefusedRequest, Reply, ServerFault, asked_again, pause_s

KEY_VARIABLE = "OPENAI_API_KEY"
CONCURRENCY = 8  # requests in flight
TIMEOUT_S = 120.0  # of one request
RETRIES = 12  # 36 s of waiting in all, for servers that start or limit the rate
QUIET_S = 5.0  # After so long without a reply, pvg tells the user.
LISTED = frozenset({"id", "root", "parent", "owned_by", "max_model_len", "meta"})  # "created" may be now
KEY_SHOWN = 8  # characters of a shorter key may be a part of other words


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


class OpenAiClient:
    """`url`: the base of the routes, usually ending in /v1. Errors are one line with a remedy: ServerUnavailableError
    for a server that does not answer or lacks what is asked, ConfigurationError for one that refuses the key."""

    def __init__(
        self, url: str, model: str, pool: HttpPool, key: str, variable: str, concurrency: int, timeout_s: float
    ) -> None:
        self.url, self.model = url, model
        self._pool, self._key, self._variable, self._timeout_s = pool, key, variable, timeout_s
        self._room = asyncio.Semaphore(concurrency)
        self.retries, self.say, self._said = RETRIES, SILENT, set[str]()

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        url: str,
        model: str = "",
        *,
        key_variable: str = "",
        concurrency: int = CONCURRENCY,
        timeout_s: float = TIMEOUT_S,
        say: Say = SILENT,
    ) -> AsyncIterator[OpenAiClient]:
        """`model`: "" for the only model that the server lists. `key_variable`: the environment variable with the key;
        "" for OPENAI_API_KEY, which may be unset. `say`: told once of a late reply, and once of a repeated request."""
        check_url(url)
        variable = key_variable or KEY_VARIABLE
        key = os.environ.get(variable, "").strip()
        if key_variable and not key:
            raise UsageError(f"The environment variable {variable} is not set.", f"export {variable}=KEY")
        if not (key.isascii() and key.isprintable()):
            raise UsageError(f"The environment variable {variable} is no key.", "Use printable ASCII characters.")
        pool = HttpPool.of(concurrency, "--concurrency", key=key)
        try:
            client = cls(url.rstrip("/"), model, pool, key, variable, concurrency, timeout_s)
            client.say = say
            if not model:
                names = [str(row["id"]) for row in await client._models()]
                if len(names) != 1:
                    raise UsageError(f"{client.url} lists {len(names)} models.", "Name one: --model NAME")
                client.model = names[0]
            yield client
        finally:
            await pool.close()

    async def chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> dict[str, Any]:
        """The first choice of a chat completion; its `message` has a `content`. `options`: fields of the request."""
        choice = await self._choice("chat/completions", {"messages": list(messages), **options})
        message = choice.get("message")
        if not isinstance(message, dict) or not isinstance(message.get("content"), str | None):
            raise self._explained(MalformedReply(self.url, "a choice without a message"))
        return {**choice, "message": {**message, "content": message.get("content") or ""}}

    async def complete(self, prompt: str, **options: Any) -> dict[str, Any]:
        """The first choice of a text completion; it has a `text`, and `logprobs` if the options ask for them."""
        choice = await self._choice("completions", {"prompt": prompt, **options})
        if not isinstance(choice.get("text"), str):
            raise self._explained(MalformedReply(self.url, "a choice without a text"))
        return choice

    async def post(self, route: str, body: Mapping[str, Any]) -> Any:
        """The JSON of a reply to a POST to `route` below the URL, retried while the server is busy or away."""
        return await self._request("POST", f"{self.url}/{route}" if route else self.url, body)

    async def _choice(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        found = await self.post(route, {"model": self.model, **body})
        choices = found.get("choices") if isinstance(found, dict) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise self._explained(MalformedReply(self.url, "a reply without choices"))
        return choices[0]

    async def about(self) -> dict[str, Any]:
        """What the server lists about the model, without what changes by itself; {} if it lists nothing."""
        rows: list[dict[str, Any]] = []
        with suppress(PvgError):  # the server need not have this route
            rows = await self._models()
        return {key: row[key] for row in rows if row["id"] == self.model for key in sorted(row.keys() & LISTED)}

    async def _models(self) -> list[dict[str, Any]]:
        found = await self._request("GET", f"{self.url}/models", None)
        rows = found.get("data") if isinstance(found, dict) else None
        return [row for row in rows or () if isinstance(row, dict) and "id" in row]

    async def _request(self, method: str, url: str, body: Mapping[str, Any] | None) -> Any:
        async def send() -> Reply:
            late = f"{self.url} has not answered for {QUIET_S:g} s. pvg waits up to {self._timeout_s:g} s for a reply."
            timer = asyncio.get_running_loop().call_later(QUIET_S, self._tell, "late", late)
            try:
                return await self._pool.request(method, url, body, timeout_s=self._timeout_s)
            finally:
                timer.cancel()

        try:
            async with self._room:
                return (await asked_again(send, self.retries, self._waits)).json()
        except ServerFault as fault:
            explained = self._explained(fault)
        raise explained  # outside of the block: the fault may quote the key, and would be the error's context

    def _waits(self, fault: ServerFault) -> None:
        pauses_s = sum(map(pause_s, range(1, self.retries + 1)))
        self._tell("again", f"{self._explained(fault).message} pvg asks again for about {pauses_s:.0f} s.")

    def _tell(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self.say(message)

    def _explained(self, fault: ServerFault) -> PvgError:
        """The fault as an error for the user. Servers quote the key in some messages."""
        what = fault.what.replace(self._key, "***") if len(self._key) >= KEY_SHOWN else fault.what
        if not isinstance(fault, RefusedRequest):
            return ServerUnavailableError(f"{self.url}: {what}.", "Check that the server runs and that the URL is its.")
        if fault.status in (401, 403):
            return ConfigurationError(f"{self.url} refuses the key: {what}.", f"Set {self._variable} to its key.")
        if 300 <= fault.status < 400:
            return ConfigurationError(f"{self.url} redirects elsewhere: {what}.", "Name the final URL.")
        if fault.final:
            return RefusedByServer(f"{self.url}: {what}.", "Check the URL (it often ends in /v1) and --model NAME.")
        return ServerUnavailableError(f"{self.url}: {what}.", "Wait until the server is ready, and try again.")


class RefusedByServer(ServerUnavailableError):
    """A request that this server would refuse again, for example because it lacks a route or an option."""


def check_url(url: str) -> None:
    """Raises UsageError for an address that is not http(s)://HOST[:PORT][/PATH]."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise UsageError("The URL contains a user or a password.", "Put the key in an environment variable.")
    if not is_url(url) or not has_place(url) or parts.query or parts.fragment:
        raise UsageError(f"{url!r} is not the address of a server.", "Write http://HOST:PORT/v1")
