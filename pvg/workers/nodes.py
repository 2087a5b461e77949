"""Other machines as the driver sees them: each has an agent (pvg.workers.node_agent), which forks processes there.

entrance = Entrance()                               # admits callers that know the run's secret
server = await asyncio.start_server(entrance.greet, host, 0)
key, expected = entrance.expect()                   # give `key` and `entrance.secret` to the agent
node = Node("second", (await expected)[1])
pid, reader, writer = await forked(node, entrance, "worker")
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import pvg
from pvg.errors import MissingRequirementError
from pvg.telemetry.device import processor
from pvg.telemetry.events import Events, SilentEvents, patience
from pvg.workers.frames import Frame, receive, send
from pvg.workers.links import SECRET_BYTES, admitted
from pvg.workers.local import ANSWER_S, START_S, LocalMember

HELLO_S = 60.0  # for the first frame of an agent that has connected
FORK_S = 2 * START_S + ANSWER_S  # the agent may need a second process to fork from
# An agent is lost after so many of the driver's probes without a report. Agents report twice as often as it probes.
PROBES_MISSED = 8

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Entrance:
    """Admits each expected connection once, and closes any other."""

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._expected: dict[int, asyncio.Future[Streams]] = {}

    def expect(self) -> tuple[int, asyncio.Future[Streams]]:
        """A key, and the connection that will come with it."""
        key = secrets.randbits(64)
        self._expected[key] = asyncio.get_running_loop().create_future()
        return key, self._expected[key]

    def forget(self, key: int) -> None:
        self._expected.pop(key, None)

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The handler of new connections for `asyncio.start_server`."""
        try:
            expected = self._expected.pop(await admitted(reader, writer, self.secret), None)
        except (ConnectionError, TimeoutError):
            expected = None
        if expected is None or expected.done():
            writer.close()
        else:
            expected.set_result((reader, writer))


@dataclass(eq=False)
class Node:
    """The driver's side of an agent."""

    name: str
    writer: asyncio.StreamWriter
    cpu_s: dict[str, float | None] = field(default_factory=dict, kw_only=True)  # by the process id
    answers: dict[int, asyncio.Future[Frame]] = field(default_factory=dict, kw_only=True)
    asked: int = field(default=0, kw_only=True)
    missed: int = field(default=0, kw_only=True)  # probes since its last report
    lost: str = field(default="", kw_only=True)  # why it is no longer used
    events: Events = field(default_factory=SilentEvents, kw_only=True)

    async def ask(self, frame: Frame) -> Frame:
        """The agent's answer. Raises ConnectionError if the node is or gets lost, and PvgError if the agent fails."""
        if self.lost:
            raise ConnectionError(self.lost)
        self.asked += 1
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self.answers[self.asked] = future
        send(self.writer, Frame(frame.kind, {**frame.fields, "id": self.asked}, frame.arrays))
        answer = await future
        if "error" in answer.fields:
            message, remedy = answer.fields["error"]
            raise MissingRequirementError(f"On node {self.name}: {message}", remedy)
        return answer

    def tell(self, frame: Frame) -> None:
        if not self.lost:
            send(self.writer, frame)

    def lose(self, why: str) -> None:
        """Ask it nothing any more; open questions raise ConnectionError."""
        self.lost = why
        self.writer.transport.abort()
        for future in self.answers.values():
            if not future.done():
                future.set_exception(ConnectionError(why))

    async def listen(
        self, reader: asyncio.StreamReader, events: Events, stop: Callable[[], None] | None = None
    ) -> None:
        """Take the agent's frames until its connection ends. `events` gets what its processes print. `stop`: called
        if the agent asks for the end of the run."""
        self.events = events
        while (frame := await receive(reader)) is not None:
            self.missed = 0
            if frame.kind == "alive":
                self.cpu_s = frame.fields["cpu_s"]
                if printed := frame.fields["printed"]:
                    events.event("workers", event="printed", node=self.name, text=printed)
            elif frame.kind == "stop":
                if stop is not None:
                    stop()
            elif frame.fields["id"] in self.answers:
                future = self.answers.pop(frame.fields["id"])
                if not future.done():
                    future.set_result(frame)


@dataclass(eq=False)
class NodeMember(LocalMember):
    """A process on a node."""

    host: Node

    @property
    def names(self) -> dict[str, Any]:
        return {"node": self.host.name, "pid": self.pid}

    def kill(self) -> None:
        """Kill the process, and close the connection in case that its node is gone."""
        self.host.tell(Frame("kill", {"pid": self.pid}))
        self.writer.transport.abort()

    def cpu_s(self) -> float | None:
        return self.host.cpu_s.get(str(self.pid))


async def forked(node: Node, entrance: Entrance, what: str) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
    """The id of a new process on the node, and the driver's connection to it. Raises ConnectionError if the process
    does not connect, and what `Node.ask` raises. `what`: its name in the error."""
    key, expected = entrance.expect()
    try:
        async with patience(node.events, f"a {what} on node {node.name}", FORK_S):
            pid: int = (await node.ask(Frame("fork", {"key": key}))).fields["pid"]
            return pid, *await expected
    except TimeoutError:
        raise ConnectionError(f"a {what} on node {node.name} has not connected to the driver") from None
    finally:
        entrance.forget(key)


async def greeting(reader: asyncio.StreamReader) -> Frame:
    """The first frame of an agent that has connected. Raises ConnectionError if it does not come."""
    try:
        hello = await asyncio.wait_for(receive(reader), HELLO_S)
    except TimeoutError:
        raise ConnectionError(f"an agent has connected, and then was silent for {HELLO_S:g} s") from None
    if hello is None:
        raise ConnectionError("an agent has connected and then left")
    return hello


def refuse_other_packages(name: str, found: Mapping[str, str]) -> None:
    """Raises MissingRequirementError for a node whose results would differ. `found`: what its agent has reported."""
    for package, own in (("pvg", pvg.__version__), ("torch", metadata.version("torch"))):
        if found[package] != own:
            raise MissingRequirementError(
                f"Node {name} has {package} {found[package]}, and this process has {own}.",
                "Install the same versions on all nodes",
            )


def note_other_processor(name: str, found: Mapping[str, str], events: Events) -> None:
    if found["processor"] != processor():
        why = f"Node {name} has another processor than this machine, so the last bits of results may differ"
        events.event("workers", event="node differs", node=name, why=why)
