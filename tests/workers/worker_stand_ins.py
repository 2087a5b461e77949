"""Workers and events that stand in for real ones."""

from __future__ import annotations

import asyncio
import atexit
import socket
from functools import cache
from typing import Any

from pvg.workers.frames import Frame, receive, send
from pvg.workers.local import LocalMember, LocalSupply
from pvg.workers.shared import SharedBuffers


class RecordedEvents:
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def event(self, tag: str, **fields: object) -> None:
        self.seen.append({"tag": tag, **fields})

    def of(self, event: str) -> list[dict[str, Any]]:
        return [seen for seen in self.seen if seen.get("event") == event]


class KeptSupply(LocalSupply):
    """Real workers, and one nursery for all tests of a process, because it takes seconds to import torch. A pool kills
    its workers before it ends its supply."""

    def __init__(self) -> None:
        super().__init__()
        self._started: list[int] = []

    async def start(self, successor: bool = False) -> LocalMember:
        member = await super().start(successor)
        self._started.append(member.pid)
        return member

    def end(self) -> None:
        """Let the nursery wait for its workers, which no longer show up as processes then."""
        self._lock = asyncio.Lock()  # the next test has another event loop
        self._control.setblocking(True)
        while self._started and not self._broken:
            self._control.sendall(f"wait {self._started.pop()}\n".encode())
            self._control.recv(64)
        self._control.setblocking(False)
        self._started.clear()


@cache
def kept_supply() -> KeptSupply:
    supply = KeptSupply()
    atexit.register(LocalSupply.end, supply)
    return supply


class DyingSupply:
    """Workers that end when they get a request of kind `last`, and answer all others. They are coroutines of this
    process."""

    member: type[LocalMember] = LocalMember

    def __init__(self, last: str = "") -> None:
        self._last = last
        self.events: Any = None
        self.started = 0
        self._workers: list[asyncio.Task[None]] = []

    async def start(self, successor: bool = False) -> LocalMember:
        self.started += 1
        ours, theirs = socket.socketpair()
        self._workers.append(asyncio.create_task(self._work(*await asyncio.open_unix_connection(sock=theirs))))
        return self.member(2**22 + 1, *await asyncio.open_unix_connection(sock=ours))

    async def _work(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (frame := await receive(reader)) is not None and frame.kind != self._last:
            send(writer, Frame("done", {"id": frame.fields["id"]}))
        writer.close()

    async def reason(self, member: LocalMember) -> str:
        return "exit code 1: no memory"

    async def watch(self) -> None:
        return

    def weights(self) -> SharedBuffers:
        return SharedBuffers()

    def end(self) -> None:
        return
