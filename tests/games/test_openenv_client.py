"""The client of OpenEnv's protocol over real sockets: games, lost sessions, and servers that misbehave."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web
from environment_servers import Counting, EnvironmentServer, served

from pvg.errors import ConfigurationError, ServerUnavailableError, StateError
from pvg.games import open_game
from pvg.games.game import LostSessionError
from pvg.games.openenv import OpenEnvClient, OpenEnvRefusal
from pvg.records import Role


def moved(game: Any, state: Any, text: str) -> Any:
    (seat,) = game.seats(state)
    return game.step(state, {seat: game.parse(state, seat, text)}, seed=0)


def test_a_game_is_played_and_forked() -> None:
    with served(Counting()) as server:
        game: Any = open_game(f"openenv:{server.url}")
        opening = game.opening("train", 3)
        states = [game.start(opening)]
        for text in ("1", "2", "3", "4"):
            states.append(moved(game, states[-1], text))
        assert game.prompt(states[2], "player", Role.HELPFUL) == f"{opening.metadata['seed']}: 3"
        assert (game.seats(states[4]), game.values(states[4])) == ((), {"player": 10.0})
        assert game.values(moved(game, states[1], "5")) == {"player": 6.0}, "a fork repeats the first move"
        failed = moved(game, states[1], "boom")
        assert (game.seats(failed), game.values(failed)) == ((), {"player": 1.0})
        assert "division by zero" in failed.shown.note
        game.close()
        assert eventually(lambda: server.sessions == 0)


def test_a_lost_session_of_a_game_is_repeated() -> None:
    with served(Counting()) as server:
        game: Any = open_game(f"openenv:{server.url}")
        state = game.start(game.opening("train", 0))
        for text in ("1", "2", "3"):
            server.end_sessions()
            state = moved(game, state, text)
        assert game.values(state) == {"player": 6.0}
        game.close()


def test_a_lost_session_that_cannot_be_repeated_is_an_error() -> None:
    with served(Counting(seeded=False)) as server:
        game: Any = open_game(f"openenv:{server.url}")
        state = moved(game, game.start(game.opening("train", 0)), "1")
        server.end_sessions()
        with pytest.raises(StateError):
            moved(game, state, "2")
        game.close()


def test_more_games_at_once_than_the_server_has_sessions() -> None:
    """As many games as a batch has: the oldest sessions are closed, and their games are repeated when they go on."""
    with served(Counting(), most_sessions=3) as server:
        game: Any = open_game(f"openenv:{server.url}")
        states = [game.start(game.opening("train", number)) for number in range(8)]
        for text in ("1", "2", "3"):
            states = [moved(game, state, text) for state in states]
        assert [game.values(state) for state in states] == [{"player": 6.0}] * 8
        game.close()
        rivals = [OpenEnvClient(server.url) for _ in range(3)]
        for rival in rivals:
            rival.reset()
        with pytest.raises(ServerUnavailableError, match="All 3 sessions are in use"):
            game.opening("train", 0)
        for rival in rivals:
            rival.close()


def test_a_name_with_other_fields_names_each_once() -> None:
    for query in ("prompt", "prompt=", "prompt=a&prompt=b", "action=&prompt=a", "field=a"):
        with pytest.raises(ConfigurationError):
            open_game(f"openenv:http://127.0.0.1:9?{query}")


def test_the_sessions_of_a_server_are_bounded() -> None:
    with served(Counting(), most_sessions=1) as server, OpenEnvClient(server.url) as first:
        first.reset()
        with OpenEnvClient(server.url) as second, pytest.raises(OpenEnvRefusal) as refused:
            second.reset()
        assert refused.value.code == "CAPACITY_REACHED"


# --- servers that misbehave -------------------------------------------------------------------------------------------


@contextmanager
def answering(*replies: str | bytes | None) -> Iterator[str]:
    """The URL of a server that gives these replies; None closes the connection, and the end of the list says
    nothing."""

    class ToldServer(EnvironmentServer):
        async def session(self, request: web.Request) -> web.WebSocketResponse:
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

    with served(None, kind=ToldServer) as server:
        yield server.url


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("{", "does not speak OpenEnv's protocol"),
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
    with answering() as url, OpenEnvClient(url, timeout_s=0.2) as client, pytest.raises(ServerUnavailableError):
        client.reset()
    with OpenEnvClient(url) as client, pytest.raises(ServerUnavailableError):
        client.reset()
    for wrong in ("", "127.0.0.1:80", "ftp://x", "http://", "http://a b", "http://user@host", "http://x?y=1"):
        with pytest.raises(ConfigurationError):
            OpenEnvClient(wrong)


def test_a_client_connects_again_for_a_reset_but_not_within_an_episode() -> None:
    with served(Counting()) as server, OpenEnvClient(server.url) as client:
        client.reset(seed=1)
        server.end_sessions()
        assert not client.reset(seed=1).done
        server.end_sessions()
        with pytest.raises(LostSessionError):
            client.step({"message": "5"})


@pytest.mark.slow
def test_a_program_that_forgets_its_clients_ends_quietly() -> None:
    with served(Counting()) as server:
        program = (
            f"from pvg.games.openenv import *; OpenEnvClient({server.url!r}).reset(); open_openenv({server.url!r})"
        )
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
