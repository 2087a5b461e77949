"""A client of OpenEnv's protocol, and an environment of a server as a game: `task.game = "openenv:URL"`.

OpenEnv's protocol is JSON over a WebSocket at /ws. A request is {"type": "reset" | "step" | "state" | "close", "data":
...}, and each gets one reply: {"type": "observation" | "state" | "error", "data": ...}. One connection is one session.
The game has one seat, "player", and its value is the sum of the rewards."""

from __future__ import annotations

import asyncio
import atexit
import math
import re
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs

import orjson

from pvg.errors import Closing, ConfigurationError, PvgError, ServerUnavailableError, one_line
from pvg.games.game import LostSessionError, NoRoomError, ReplayedGame, Shown
from pvg.inputs import has_place
from pvg.telemetry.waits import in_background

if TYPE_CHECKING:
    import aiohttp

PREFIX = "openenv:"
PROMPT, ACTION = "prompt", "message"  # the usual fields of an observation and of an action
EXECUTION_ERROR = "EXECUTION_ERROR"  # OpenEnv's code for an exception of the environment
CAPACITY_REACHED = "CAPACITY_REACHED"  # OpenEnv's code for a server whose sessions are all in use
PLAYER = "player"  # the seat
TIMEOUT_S = 60.0  # for a connection, and for a reply
MOST_BYTES = 16 * 2**20  # of a reply
URL = re.compile(r"(?:https?|wss?)://[^/\s?#@]+(?:/[^\s?#]*)?")
URL_EXAMPLE = "Write a URL such as http://127.0.0.1:8010"

T = TypeVar("T")


class OpenEnvRefusal(PvgError):
    """An error reply of a server. `code` is one of OpenEnv's codes, such as "EXECUTION_ERROR"."""

    def __init__(self, url: str, code: str, message: str) -> None:
        super().__init__(f"The environment at {url} answered {code}: {message}")
        self.code = code


@dataclass(frozen=True, slots=True)
class OpenEnvReply:
    """A server's reply to `reset` or `step`."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class OpenEnvClient(Closing):
    """One session of a server. Blocking, for one thread at a time. It connects at the first request.

    Raises ServerUnavailableError if no server answers, LostSessionError if the connection ends in a session, and
    OpenEnvRefusal for an error reply.
    """

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        """Raises ConfigurationError for an impossible URL."""
        if not URL.fullmatch(url) or not has_place(url):
            raise ConfigurationError(f"{url!r} is not the URL of an environment.", URL_EXAMPLE)
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    def reset(self, **data: Any) -> OpenEnvReply:
        """Begin an episode. Connects again if the server has closed the connection, for example after an idle hour."""
        request = {"type": "reset", "data": data}
        if self._socket is not None:
            with suppress(LostSessionError):
                return _reply(self.url, self._ask(request))
        return _reply(self.url, self._ask(request))

    def step(self, action: Mapping[str, Any]) -> OpenEnvReply:
        return _reply(self.url, self._ask({"type": "step", "data": dict(action)}))

    def state(self) -> dict[str, Any]:
        return self._ask({"type": "state"})

    def close(self) -> None:
        _run(self._close())

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return _run(self._asked(request))

    async def _asked(self, request: dict[str, Any]) -> dict[str, Any]:
        """The data of the reply."""
        import aiohttp

        connected = self._socket is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                socket = self._socket or await self._connected()
                await socket.send_str(orjson.dumps(request).decode())
                message = await socket.receive()
        except TimeoutError:
            await self._close()
            raise ServerUnavailableError(
                f"The environment at {self.url} did not answer within {self._timeout_s:g} s.", "Check the server."
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            await self._close()
            if connected:
                raise self._lost(str(error)) from None
            raise ServerUnavailableError(
                f"No environment answers at {self.url}: {error or type(error).__name__}.",
                "Start the server, or correct the URL.",
            ) from None
        if message.type is not aiohttp.WSMsgType.TEXT:
            await self._close()
            size = socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
            why = f"its reply has more than {MOST_BYTES:,} bytes" if size else "the server closed it"
            raise self._lost(why)
        return self._data(message.data)

    def _lost(self, why: str) -> LostSessionError:
        return LostSessionError(f"The connection to the environment at {self.url} ended: {why}.")

    def _data(self, text: str) -> dict[str, Any]:
        try:
            found = orjson.loads(text)
            kind, data = found["type"], found.get("data")
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise self._foreign("its reply is no JSON object with a type") from None
        data = {} if data is None else data
        if not isinstance(data, dict):
            raise self._foreign("the data of its reply is no JSON object")
        if kind == "error":
            raise OpenEnvRefusal(self.url, str(data.get("code", "UNKNOWN")), str(data.get("message", "")))
        return data

    def _foreign(self, why: str) -> ServerUnavailableError:
        return ServerUnavailableError(f"The server at {self.url} does not speak OpenEnv's protocol: {why}.")

    async def _connected(self) -> aiohttp.ClientWebSocketResponse:
        import aiohttp

        self._http = aiohttp.ClientSession()
        address = re.sub(r"^http", "ws", self.url) + "/ws"
        _CONNECTED.add(self)
        self._socket = await self._http.ws_connect(address, max_msg_size=MOST_BYTES)
        return self._socket

    async def _close(self) -> None:
        socket, http = self._socket, self._http
        self._socket = self._http = None
        _CONNECTED.discard(self)
        if socket is not None and not socket.closed:
            with suppress(Exception):  # the server may have ended
                async with asyncio.timeout(2.0):
                    await socket.send_str('{"type":"close"}')
                    await socket.close()
        if http is not None:
            await http.close()


def _reply(url: str, data: dict[str, Any]) -> OpenEnvReply:
    observation, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
    if not isinstance(observation, dict) or not isinstance(done, bool):
        raise ServerUnavailableError(f"The reply of the environment at {url} is no observation of OpenEnv's protocol.")
    if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        raise ServerUnavailableError(f"The environment at {url} gave the reward {reward!r}, which is no number.")
    return OpenEnvReply(observation, None if reward is None else float(reward), done)


def prompt_of(url: str, observation: Mapping[str, Any], name: str) -> str:
    """The text in the field `name`. Raises ConfigurationError, naming the fields that have text, if there is none."""
    found = observation.get(name)
    if isinstance(found, str):
        return found
    texts = [key for key, value in observation.items() if isinstance(value, str)]
    raise ConfigurationError(
        f"The observations of the environment at {url} have no text in the field {name!r}.",
        f"Fields with text: {', '.join(texts) or 'none'}. Name one: task.prompt_field, or ?prompt=FIELD in the name of "
        "a game.",
    )


# --- the environment as a game ----------------------------------------------------------------------------------------


def open_openenv(name: str) -> ReplayedGame:
    """The game of `URL`, or `URL?prompt=FIELD&action=FIELD` if the environment uses other fields than "prompt" and
    "message". Raises ConfigurationError for an impossible URL."""
    url, _, query = name.partition("?")
    fields = parse_qs(query, keep_blank_values=True)
    if unknown := fields.keys() - {"prompt", "action"}:
        raise ConfigurationError(f"{name!r}: unknown {', '.join(sorted(unknown))}.", "Known: prompt and action.")
    if wrong := [key for key, values in fields.items() if len(values) > 1 or not values[0]]:
        raise ConfigurationError(f"{name!r} does not name one field for {wrong[0]}.", "Write ?prompt=NAME&action=NAME.")
    prompt, action = fields.get("prompt", [PROMPT])[0], fields.get("action", [ACTION])[0]
    OpenEnvClient(url)  # checks the URL
    return ReplayedGame(f"{PREFIX}{name}", lambda: OpenEnvEnvironment(url, prompt, action), waits=True)


class OpenEnvEnvironment:
    """A `SteppedEnvironment`: one session of a server. The seed of the start determines all its chance, because a step
    of OpenEnv's protocol has no seed."""

    def __init__(self, url: str, prompt_field: str, action_field: str) -> None:
        self._client = OpenEnvClient(url)
        self._prompt, self._action = prompt_field, action_field
        self._sum = 0.0  # of the rewards

    def reset(self, seed: int) -> Shown:
        self._sum = 0.0
        try:
            reply = self._client.reset(seed=seed)
        except OpenEnvRefusal as error:
            if error.code != CAPACITY_REACHED:
                raise
            raise NoRoomError(str(error), "End other sessions, or let the server have more.") from None
        return self._shown(reply)

    def step(self, text: str, seed: int) -> Shown:
        """One move. The environment's own error on a text ends the game, and the note says why."""
        try:
            return self._shown(self._client.step({self._action: text}))
        except OpenEnvRefusal as error:
            if error.code != EXECUTION_ERROR:
                raise
            return Shown("", "", ((PLAYER, self._sum),), error.message)

    def close(self) -> None:
        self._client.close()

    def _shown(self, reply: OpenEnvReply) -> Shown:
        self._sum += reply.reward or 0.0
        note = reply.observation.get("note")
        return Shown(
            seat="" if reply.done else PLAYER,
            prompt="" if reply.done else prompt_of(self._client.url, reply.observation, self._prompt),
            values=((PLAYER, self._sum),),
            note=one_line(note) if isinstance(note, str) else "",
        )


# --- blocking calls ---------------------------------------------------------------------------------------------------

_CONNECTED: set[OpenEnvClient] = set()  # it keeps them alive, because only their own thread may release a connection


@atexit.register
def _close_all() -> None:
    for client in list(_CONNECTED):
        client.close()


def _run(work: Coroutine[Any, Any, T]) -> T:
    return in_background(work).result()
