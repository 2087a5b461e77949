"""OpenEnv's protocol over real sockets: pvg's client and pvg's server, and clients and servers that misbehave."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType, WSServerHandshakeError, web
from environment_servers import Sums, end_sessions, served

sys.path.insert(0, str(Path(__file__).parent.parent / "games"))
from tiny_games import EvenOdd

from pvg.errors import ConfigurationError, ServerUnavailableError, StateError
from pvg.games import open_game
from pvg.games.negotiation import Negotiation
from pvg.games.openenv import LostSessionError, OpenEnvClient, OpenEnvRefusal
from pvg.records import Role
from pvg.servers import environment_server
from pvg.servers.environment_server import MOST_BYTES, EnvironmentServer
from pvg.servers.environments import BadRequestError, GameEnvironment, TaskEnvironment

NEGOTIATION = GameEnvironment("negotiation", Negotiation())
RESET = b'{"type":"reset","data":{"seed":1}}'


@pytest.fixture(scope="module")
def server() -> Iterator[EnvironmentServer]:
    with served(NEGOTIATION) as server:
        yield server


def talk(url: str, *messages: str | bytes, **options: Any) -> list[Any]:
    """Send messages in one session, and read one reply to each: its JSON, or the code with which the server closed the
    connection."""

    async def work() -> list[Any]:
        found: list[Any] = []
        async with ClientSession() as http, http.ws_connect(f"{url}/ws", **options) as session:
            for message in messages:
                await (session.send_str if isinstance(message, str) else session.send_bytes)(message)  # type: ignore[arg-type]
                found.append(await reply_of(session))
                if isinstance(found[-1], int):
                    break
        return found

    return asyncio.run(asyncio.wait_for(work(), 60.0))


async def reply_of(session: ClientWebSocketResponse) -> Any:
    reply = await session.receive()
    return orjson.loads(reply.data) if reply.type is WSMsgType.TEXT else int(session.close_code or 0)


def code(reply: Any) -> str:
    assert reply["type"] == "error"
    return str(reply["data"]["code"])


# --- round trips ------------------------------------------------------------------------------------------------------


def test_a_game_is_played_and_forked_over_the_socket(server: EnvironmentServer) -> None:
    with OpenEnvClient(server.url) as client, OpenEnvClient(server.url) as other:
        reply = client.reset(seed=7)
        assert (reply.reward, reply.done) == (None, False)
        client.step({"message": "5"})
        state = client.state()
        first, second = client.step({"message": "5"}), None
        assert (first.done, first.reward) == (True, first.observation["rewards"]["seller"])
        fork = other.reset(state=state["state"], seed=7)
        assert fork.observation["seat"] == "seller"
        second = other.step({"message": "5"})
        assert second == first
        with pytest.raises(OpenEnvRefusal, match="EXECUTION_ERROR: The episode is over"):
            client.step({"message": "5"})
        assert not client.reset(seed=8).done, "an error does not end the session"
    assert eventually(lambda: server.sessions == 0)


def test_a_game_of_a_server_is_a_game_of_pvg(server: EnvironmentServer) -> None:
    """The same decisions give the same values here and over the socket, and a fork replays."""
    game, local = open_game(f"openenv:{server.url}"), Negotiation()
    for number in range(4):
        opening = game.opening("train", number)
        there = game.start(opening)
        here = local.start(local.opening("train", opening.metadata["seed"]))
        while seats := local.seats(here):
            assert game.seats(there) == seats
            (seat,) = seats
            assert game.prompt(there, seat, Role.HELPFUL) == local.prompt(here, seat, Role.HELPFUL)
            fork = there
            there = game.step(there, {seat: game.parse(there, seat, "4")}, seed=1)
            here = local.step(here, {seat: local.parse(here, seat, "4")}, seed=1)
            assert game.step(fork, {seat: game.parse(fork, seat, "4")}, seed=1).shown == there.shown
        assert game.seats(there) == ()
        assert game.values(there) == pytest.approx(local.values(here))
        assert game.load(game.dump(there)) == there
    game.close()  # type: ignore[attr-defined]


def test_a_lost_session_of_a_game_is_replayed() -> None:
    with served(GameEnvironment("even-odd", EvenOdd())) as server:
        game = open_game(f"openenv:{server.url}")
        state = game.start(game.opening("train", 0))
        for text in ("1", "2", "3"):
            end_sessions(server)
            (seat,) = game.seats(state)
            state = game.step(state, {seat: game.parse(state, seat, text)}, seed=0)
        assert state.shown.prompt == "odd, round 1, -1: a number?"
        game.close()  # type: ignore[attr-defined]


def test_more_games_at_once_than_the_server_has_sessions() -> None:
    """As many games as a batch has: the oldest sessions are closed, and their games are repeated when they go on."""
    with served(GameEnvironment("even-odd", EvenOdd()), most_sessions=3) as server:
        game = open_game(f"openenv:{server.url}")
        states = [game.start(game.opening("train", number)) for number in range(8)]
        for text in ("1", "2", "3", "1"):
            seats = [game.seats(state)[0] for state in states]
            states = [
                game.step(state, {seat: game.parse(state, seat, text)}, seed=0)
                for state, seat in zip(states, seats, strict=True)
            ]
        assert {state.shown.prompt for state in states} == {"even, round 2, +0: a number?"}
        game.close()  # type: ignore[attr-defined]
        rivals = [OpenEnvClient(server.url) for _ in range(3)]
        for rival in rivals:
            rival.reset()
        with pytest.raises(ServerUnavailableError, match=r"All 3 sessions are in use.*--sessions"):
            game.opening("train", 0)
        for rival in rivals:
            rival.close()


class Dice:
    """An environment of another project whose chance no seed determines. Its observations have a field "values", which
    is about something else. It fails on the text "boom"."""

    name, description = "dice", ""
    seats: Sequence[str] = ()
    thrown = 0

    def schema(self) -> dict[str, Any]:
        return {}

    def episode(self) -> Dice:
        return self

    def state(self) -> dict[str, Any]:
        return {}

    def reset(self, data: Any) -> dict[str, Any]:
        return self.reply(None)

    def step(self, action: Any) -> dict[str, Any]:
        if action["message"] == "boom":
            raise BadRequestError("division by zero", "EXECUTION_ERROR")
        Dice.thrown += 1
        return self.reply(0.5)

    def reply(self, reward: float | None) -> dict[str, Any]:
        seen: dict[str, Any] = {"prompt": f"you threw {Dice.thrown}", "values": {"gold": 3.0}}
        if self.seats:
            seen |= {"seat": self.seats[0], "values": dict.fromkeys(self.seats, 0.25)}
        return {"observation": seen, "reward": reward, "done": False}


def moved(game: Any, state: Any, text: str) -> Any:
    (seat,) = game.seats(state)
    return game.step(state, {seat: game.parse(state, seat, text)}, seed=0)


def test_a_lost_session_that_cannot_be_repeated_is_an_error() -> None:
    with served(Dice()) as server:
        game = open_game(f"openenv:{server.url}")
        state = moved(game, game.start(game.opening("train", 0)), "x")
        end_sessions(server)
        with pytest.raises(StateError, match="showed something else when pvg repeated"):
            moved(game, state, "y")
        game.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("seats", [(), ("north", "south")])
def test_every_state_has_the_value_of_every_seat(seats: tuple[str, ...]) -> None:
    environment = Dice()
    environment.seats = seats
    with served(environment) as server:
        game = open_game(f"openenv:{server.url}")
        state = moved(game, game.start(game.opening("train", 0)), "x")
        values = {"north": 0.25, "south": 0.25} if seats else {"player": 0.5}
        assert (game.values(state), game.seats(state)) == (values, (next(iter(values)),))
        failed = moved(game, state, "boom")
        assert (game.values(failed), game.seats(failed)) == (values, ())
        assert failed.shown.note.endswith("EXECUTION_ERROR: division by zero")
        game.close()  # type: ignore[attr-defined]


def test_a_name_with_other_fields_names_each_once() -> None:
    for query in ("prompt", "prompt=", "prompt=a&prompt=b", "action=&prompt=a", "field=a"):
        with pytest.raises(ConfigurationError, match=r"does not name one field|unknown field"):
            open_game(f"openenv:http://127.0.0.1:9?{query}")


def test_health_metadata_and_schema(server: EnvironmentServer) -> None:
    async def get(path: str) -> Any:
        async with ClientSession() as http, http.get(f"{server.url}{path}") as reply:
            return reply.status, orjson.loads(await reply.read()) if reply.status == 200 else None

    assert asyncio.run(get("/health")) == (200, {"status": "healthy"})
    assert asyncio.run(get("/metadata"))[1]["name"] == "negotiation"
    schema = asyncio.run(get("/schema"))[1]
    assert schema["action"]["required"] == ["message"]
    assert {"prompt", "seat", "values"} <= schema["observation"]["properties"].keys()
    assert asyncio.run(get("/reset"))[0] == 404


# --- clients that misbehave -------------------------------------------------------------------------------------------


def test_bad_messages_get_an_error_and_the_session_goes_on(server: EnvironmentServer) -> None:
    bad: list[tuple[str | bytes, str]] = [
        ("", "INVALID_JSON"),
        ("{", "INVALID_JSON"),
        ("[" * 100_000, "INVALID_JSON"),
        ('{"type": NaN}', "INVALID_JSON"),
        (b"\xff\xfe", "INVALID_JSON"),
        ("[]", "VALIDATION_ERROR"),
        ("null", "VALIDATION_ERROR"),
        ("7", "VALIDATION_ERROR"),
        ("{}", "UNKNOWN_TYPE"),
        ('{"type": "mcp", "data": {}}', "UNKNOWN_TYPE"),
        ('{"type": ["reset"]}', "UNKNOWN_TYPE"),
        ('{"type": "reset", "data": []}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": 1e400}}', "INVALID_JSON"),
        ('{"type": "reset", "extra": 1}', "VALIDATION_ERROR"),
        ('{"type": "step"}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"message": "5"}}', "EXECUTION_ERROR"),
        ('{"type": "reset", "data": {"state": "gASVCgAAAAAAAACMBnByaW50lC4="}}', "VALIDATION_ERROR"),
    ]
    replies = talk(server.url, *(message for message, _ in bad), RESET)
    assert [code(reply) for reply in replies[:-1]] == [expected for _, expected in bad]
    assert replies[-1]["type"] == "observation"


def test_a_message_that_is_too_large_ends_only_its_session(server: EnvironmentServer) -> None:
    assert talk(server.url, RESET, "x" * (MOST_BYTES + 1))[-1] == 1009
    fits = '{"type":"reset","data":{"episode_id":"' + "x" * (MOST_BYTES - 100) + '"}}'
    assert code(talk(server.url, fits)[0]) == "VALIDATION_ERROR"
    assert eventually(lambda: server.sessions == 0)


def test_a_web_page_is_refused(server: EnvironmentServer) -> None:
    with pytest.raises(WSServerHandshakeError) as error:
        talk(server.url, RESET, headers={"Origin": "http://127.0.0.1:8010"})
    assert error.value.status == 403


def test_more_sessions_than_allowed_are_refused_and_room_is_made_when_one_ends() -> None:
    with served(NEGOTIATION, most_sessions=2) as server:
        first, second, third = (OpenEnvClient(server.url) for _ in range(3))
        first.reset()
        second.reset()
        with pytest.raises(OpenEnvRefusal, match="CAPACITY_REACHED: All 2 sessions are in use"):
            third.reset()
        third.close()
        first.close()
        assert eventually(lambda: server.sessions == 1)
        third.reset()
        second.close()
        third.close()


def test_dropped_and_half_open_connections_leave_nothing_behind(
    server: EnvironmentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    upgrade = (
        b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    for after in (b"", b"\x81", b"\x81\xfe\x10", b'\x81\x85\x00\x00\x00\x00{"', b"\xff\xff\xff\xff", b"\x01\x01x" * 50):
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(upgrade + after)
            raw.recv(64)
    assert eventually(lambda: server.sessions == 0)
    assert talk(server.url, RESET)[0]["type"] == "observation"


def test_clients_that_send_too_slowly_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sends its HTTP request byte by byte, one its first message. Pings do not keep a session."""
    monkeypatch.setattr(environment_server, "HANDSHAKE_S", 0.3)
    with served(NEGOTIATION, idle_s=0.5) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.settimeout(30.0)
            assert dribble(raw, b"GET /health HTTP/1.1\r\nX: ")

        async def pinging() -> int:
            async with ClientSession() as http, http.ws_connect(f"{server.url}/ws") as session:

                async def ping() -> None:
                    while not session.closed:
                        await session.ping()
                        await asyncio.sleep(0.05)

                pings = asyncio.create_task(ping())
                reply = await reply_of(session)
                pings.cancel()
                return int(reply)

        assert asyncio.run(asyncio.wait_for(pinging(), 60.0)) in {1000, 1006}
        assert eventually(lambda: server.sessions == 0)


def dribble(raw: socket.socket, start: bytes) -> bool:
    """Whether the server ends the connection while bytes still arrive."""
    raw.sendall(start)
    raw.settimeout(0.05)
    for _ in range(600):
        try:
            raw.sendall(b"x")
            if raw.recv(1024) == b"":
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def test_a_slow_grade_and_a_defect_do_not_stop_the_other_sessions(caplog: pytest.LogCaptureFixture) -> None:
    sums = Sums()
    with (
        served(TaskEnvironment("sums", sums)) as server,
        OpenEnvClient(server.url) as slow,
        OpenEnvClient(server.url) as other,
    ):
        slow.reset(seed=1)
        thread = threading.Thread(target=lambda: slow.step({"message": "slow"}))
        thread.start()
        assert code(talk(server.url, "{")[0]) == "INVALID_JSON", "the event loop waits for the grade"
        sums.release.set()
        thread.join(60.0)
        other.reset(seed=1)
        with pytest.raises(OpenEnvRefusal, match="EXECUTION_ERROR: The server has a defect"):
            other.step({"message": "defect"})
        assert "ZeroDivisionError: of the test" in caplog.text
        other.reset(seed=1)
        assert other.step({"message": "2"}).reward == 1.0


# --- servers that misbehave -------------------------------------------------------------------------------------------


@contextmanager
def answering(*replies: str | bytes | None) -> Iterator[str]:
    """The URL of a server that gives these replies; None closes the connection, and the end of the list says
    nothing."""

    class Told:
        name, description = "told", ""

        def schema(self) -> dict[str, Any]:
            return {}

        def episode(self) -> Any:
            raise NotImplementedError

    class ToldServer(EnvironmentServer):
        async def _session(self, request: web.Request) -> web.WebSocketResponse:
            found = web.WebSocketResponse()
            await found.prepare(request)
            for reply in replies:
                await found.receive()
                if reply is None:
                    await found.close()
                elif isinstance(reply, bytes):
                    await found.send_bytes(reply)
                else:
                    await found.send_str(reply)
            while not found.closed:
                await found.receive()
            return found

    with served(Told(), kind=ToldServer) as server:
        yield server.url


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("{", "does not speak OpenEnv's protocol"),
        ("[]", "does not speak OpenEnv's protocol"),
        ('{"data": {}}', "does not speak OpenEnv's protocol"),
        ('{"type": "observation", "data": []}', "does not speak OpenEnv's protocol"),
        ('{"type": "observation", "data": {}}', "no observation of OpenEnv's protocol"),
        ('{"type": "observation", "data": {"observation": {}, "done": 1}}', "no observation of OpenEnv's protocol"),
        ('{"type": "observation", "data": {"observation": {}, "reward": "1"}}', "gave the reward '1'"),
        (b"\x80\x04.", "the server closed it"),
        (None, "the server closed it"),
        ("x" * (17 * 2**20), "more than 16,777,216 bytes"),
    ],
)
def test_a_reply_that_makes_no_sense_is_an_error_of_one_line(reply: str | bytes | None, message: str) -> None:
    with answering(reply) as url, OpenEnvClient(url, timeout_s=30.0) as client:
        with pytest.raises(ServerUnavailableError, match=message) as error:
            client.reset()
        assert "\n" not in str(error.value)


def test_a_server_that_is_silent_or_missing() -> None:
    silent = pytest.raises(ServerUnavailableError, match=r"did not answer within 0\.2 s")
    with answering() as url, OpenEnvClient(url, timeout_s=0.2) as client, silent:
        client.reset()
    with OpenEnvClient(url) as client, pytest.raises(ServerUnavailableError, match="No environment answers at"):
        client.reset()
    for wrong in ("", "127.0.0.1:80", "ftp://x", "http://", "http://a b", "http://user@host", "http://x?y=1"):
        with pytest.raises(ConfigurationError, match="not the URL"):
            OpenEnvClient(wrong)


def test_a_client_connects_again_for_a_reset_but_not_within_an_episode() -> None:
    with served(NEGOTIATION) as server, OpenEnvClient(server.url) as client:
        client.reset(seed=1)
        end_sessions(server)
        assert not client.reset(seed=1).done
        end_sessions(server)
        with pytest.raises(LostSessionError):
            client.step({"message": "5"})


def test_a_program_that_forgets_its_clients_ends_quietly(server: EnvironmentServer) -> None:
    program = f"from pvg.games.openenv import *; OpenEnvClient({server.url!r}).reset(); open_openenv({server.url!r})"
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert eventually(lambda: server.sessions == 0)


def eventually(condition: Any) -> bool:
    """Whether it becomes true, within a minute."""
    for _ in range(1200):
        if condition():
            return True
        threading.Event().wait(0.05)
    return False
