"""Supplies one trainer rank in each process that torchrun has started (pvg.workers.torchrun).

    supply = TorchrunSupply(meeting, stop)
    await supply.ready()                    # all processes have connected to this one
    member = await supply.start()           # a rank

The first process is the driver, and one rank runs beside it. All ranks connect to the driver over TCP, also that one,
because ranks reach each other by the network by which they reach the driver.
"""

from __future__ import annotations

import asyncio
import os
from bisect import insort
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from pvg.errors import MissingRequirementError, WorkerLostError
from pvg.telemetry.events import Events, SilentEvents
from pvg.workers.frames import Frame
from pvg.workers.node_agent import DriverAddress, NodeAgent
from pvg.workers.nodes import (
    PROBES_MISSED,
    Entrance,
    Node,
    NodeMember,
    forked,
    greeting,
    note_other_processor,
    refuse_other_packages,
)
from pvg.workers.pool import Member, SharedWeights
from pvg.workers.torchrun import JOIN_S, Meeting, driver_address, node_name

PROBE_S = 2.0


@dataclass(eq=False)
class TorchrunMember(NodeMember):
    """A rank. `number`: of its process; `local`: of this process on its machine."""

    number: int
    local: int

    def gpu(self, number: int) -> int:
        return self.local


class TorchrunSupply:
    """Belongs to one event loop. `close` it. `stop`: called if another process gets SIGINT or SIGTERM."""

    def __init__(self, meeting: Meeting, stop: Callable[[], None]) -> None:
        self.events: Events = SilentEvents()
        self._meeting = meeting
        self._stop = stop
        self._opening = asyncio.Lock()
        self._entrance = Entrance()
        self._server: asyncio.Server | None = None
        self._nodes: list[Node] = []  # by the number of the process
        self._locals: list[int] = []
        self._free: list[int] = []  # processes without a rank
        self._tasks: set[asyncio.Task[None]] = set()

    async def ready(self) -> None:
        """Wait until all processes have connected. Raises MissingRequirementError if one does not come, or has
        another version of pvg or torch."""
        async with self._opening:
            if self._server is None:
                await self._open()

    async def _open(self) -> None:
        others = await asyncio.to_thread(self._meeting.others)
        launch = self._meeting.launch
        host = driver_address(launch, [other["address"] for other in others])
        self._server = await asyncio.start_server(self._entrance.greet, host, 0, limit=1 << 20)
        driver = DriverAddress(host, self._server.sockets[0].getsockname()[1], self._entrance.secret, os.getcwd())
        expected = [self._entrance.expect() for _ in range(launch.processes)]
        self._run(NodeAgent().serve(driver, expected[0][0], node_name(0)))
        await asyncio.to_thread(self._meeting.invite, driver, [key for key, _ in expected])
        self._locals = [launch.local, *(other["local"] for other in others)]
        machines = ["this machine", *(f"{other['machine']} ({other['address']})" for other in others)]
        for number, (_, connection) in enumerate(expected):
            try:
                self._nodes.append(await self._entered(*await asyncio.wait_for(connection, JOIN_S)))
            except TimeoutError:
                raise MissingRequirementError(
                    f"Process {number} of torchrun on {machines[number]} has not connected to the driver at "
                    f"{driver.host}:{driver.port} in {JOIN_S:g} s.",
                    "Let all machines of the run reach each other on all TCP ports (firewall)",
                ) from None
        self._free = list(range(launch.processes))
        self._run(self._probe())

    async def _entered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Node:
        try:
            hello = await greeting(reader)
        except ConnectionError as error:
            raise _lost(str(error)) from None
        name = hello.fields["node"]
        refuse_other_packages(name, hello.fields)
        note_other_processor(name, hello.fields, self.events)
        node = Node(name, writer)
        self._run(self._listen(node, reader))
        self.events.event("workers", event="node joined", node=name, processor=hello.fields["processor"])
        return node

    async def start(self) -> Member:
        """Start a rank in the first process that has none. Raises WorkerLostError if its process is lost."""
        await self.ready()
        number = self._free.pop(0)
        node = self._nodes[number]
        try:
            process = await forked(node, self._entrance, "trainer rank")
        except BaseException as error:
            insort(self._free, number)
            if isinstance(error, ConnectionError):
                raise _lost(str(error)) from None
            raise
        return TorchrunMember(*process, node, number, self._locals[number])

    async def reason(self, member: Member) -> str:
        """Why a rank ended, in words, with its node. Kills it if it has only closed its connection. Raises
        WorkerLostError if its process has ended too."""
        assert isinstance(member, TorchrunMember)
        member.kill()
        insort(self._free, member.number)
        try:
            answer = await member.host.ask(Frame("end", {"pid": member.pid}))
        except ConnectionError as error:
            raise _lost(str(error)) from None
        return f"{answer.fields['why']}, on node {member.host.name}"

    async def retire(self, member: Member) -> None:
        """End a rank that serves nothing any more."""
        await self.reason(member)

    def check(self) -> None:
        """Raises WorkerLostError if a process has ended: only torchrun can start another one."""
        for node in self._nodes:
            if node.lost:
                raise _lost(node.lost)

    def weights(self) -> SharedWeights:
        raise NotImplementedError("ranks get their rows in frames")

    async def close(self) -> None:
        """End all ranks; the other processes end with the driver. A second call does nothing."""
        for node in self._nodes:
            node.lose("the run has ended")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()

    def end(self) -> None:
        """Does nothing: without an event loop, no process has connected."""

    async def _listen(self, node: Node, reader: asyncio.StreamReader) -> None:
        await node.listen(reader, self.events, self._stop)
        self._lose(node, f"the connection to {node.name} broke")

    async def _probe(self) -> None:
        """Give up processes that do not report. Counts probes, not seconds: this process may have been stopped too."""
        while True:
            await asyncio.sleep(PROBE_S)
            for node in self._nodes:
                node.missed += 1
                if node.missed > PROBES_MISSED:
                    self._lose(node, f"{node.name} does not answer")

    def _lose(self, node: Node, why: str) -> None:
        if not node.lost:
            self.events.event("workers", event="node lost", node=node.name, why=why)
            node.lose(why)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _lost(why: str) -> WorkerLostError:
    return WorkerLostError(
        f"A process of torchrun was lost: {why}.", "Start torchrun again on all machines, with pvg train --resume"
    )
