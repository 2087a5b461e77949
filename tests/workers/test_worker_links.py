"""Only a caller that knows the secret gets a connection to the driver."""

from __future__ import annotations

import asyncio
import socket

import pytest
from worker_stand_ins import RecordedEvents

from pvg.errors import MissingRequirementError
from pvg.workers import links, nodes
from pvg.workers.frames import Frame, receive, send
from pvg.workers.links import CHALLENGE_BYTES, KEY, admitted, connect, interface_of, own_address

SECRET = bytes(range(32))


async def meet(call) -> int | BaseException:
    """What the driver makes of a caller."""
    found: asyncio.Future[int | BaseException] = asyncio.get_running_loop().create_future()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            found.set_result(await admitted(reader, writer, SECRET))
        except (ConnectionError, TimeoutError) as error:
            found.set_result(error)
        else:
            send(writer, Frame("welcome"))
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await asyncio.to_thread(call, port)
    answer = await found
    server.close()
    return answer


def test_an_agent_that_connects_and_then_hangs_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(nodes, "HELLO_S", 0.1)
    with pytest.raises(ConnectionError, match="has connected, and then was silent"):
        asyncio.run(_greeted(asyncio.StreamReader))


def test_an_agent_that_starts_no_process_is_named_and_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(nodes, "FORK_S", 0.1)
    monkeypatch.setattr("pvg.telemetry.events.QUIET_S", 0.01)
    events = RecordedEvents()

    async def run() -> None:
        ours, theirs = socket.socketpair()
        with theirs:  # the agent reads nothing
            _, writer = await asyncio.open_unix_connection(sock=ours)
            node = nodes.Node("second", writer, events=events)
            with pytest.raises(ConnectionError, match="on node second has not connected"):
                await nodes.forked(node, nodes.Entrance(), "worker")
            writer.close()

    asyncio.run(run())
    assert ["node second" in event["why"] for event in events.of("waits")] == [True]


async def _greeted(silent):
    await nodes.greeting(silent())


def test_a_caller_with_the_secret_is_admitted_under_its_key():
    async def run() -> None:
        connections = []
        assert await meet(lambda port: connections.append(connect("127.0.0.1", port, SECRET, 2**63 + 5))) == 2**63 + 5
        reader, writer = await asyncio.open_connection(sock=connections[0])
        welcome = await receive(reader)
        assert welcome is not None
        assert welcome.kind == "welcome"
        writer.close()

    asyncio.run(run())


def test_other_callers_are_refused():
    def replays(port: int) -> None:
        """Sends an answer to another challenge."""
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.recv(CHALLENGE_BYTES)
            connection.sendall(KEY.pack(1) + bytes(32))

    def leaves(port: int) -> None:
        socket.create_connection(("127.0.0.1", port)).close()

    for call in (lambda port: connect("127.0.0.1", port, bytes(32), 1).close(), replays, leaves):
        assert isinstance(asyncio.run(meet(call)), ConnectionError)


def test_a_caller_that_says_nothing_is_not_kept(monkeypatch):
    monkeypatch.setattr(links, "CONNECT_S", 0.05)
    silent: list[socket.socket] = []
    found = asyncio.run(meet(lambda port: silent.append(socket.create_connection(("127.0.0.1", port)))))
    assert isinstance(found, TimeoutError)
    silent[0].close()


def test_a_driver_that_closes_the_connection_is_an_error():
    async def run() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(connect, "127.0.0.1", port, SECRET, 1)
        server.close()

    asyncio.run(run())


def test_a_rank_uses_the_network_by_which_it_reaches_the_driver():
    async def run() -> None:
        addresses: list[str] = []

        def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            addresses.append(own_address(writer))
            writer.close()

        server = await asyncio.start_server(greet, "127.0.0.2", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        await reader.read()
        here, there = socket.socketpair()
        with there:
            _, local = await asyncio.open_unix_connection(sock=here)
            addresses += [own_address(writer), own_address(local)]
        for one in (writer, local, server):
            one.close()
        assert addresses == ["127.0.0.2", "127.0.0.1", "127.0.0.1"]
        assert len({interface_of(address) for address in addresses}) == 1
        with pytest.raises(MissingRequirementError, match=r"has the address 203\.0\.113\.9"):
            interface_of("203.0.113.9")

    asyncio.run(run())
