"""What runs on each node of a cluster: it forks the node's workers, and keeps the weights in memory that they share.

The workers connect to the driver directly. The agent does not import torch. Weights come as frames over a
TCP connection to the driver, once per node. Nothing is unpickled.

Invariant: no worker outlives the agent, and no agent's connection outlives the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import pvg
from pvg.errors import PvgError
from pvg.telemetry.device import processor
from pvg.workers.frames import Frame, receive, send
from pvg.workers.links import connect, notice_broken
from pvg.workers.local import LocalSupply, cpu_s, kill
from pvg.workers.memory import SharedMemory

REPORT_S = 1.0
SILENT_S = 60.0  # after the network broke, the agent ends its workers


@dataclass(frozen=True)
class DriverAddress:
    """Where an agent finds the driver. `folder`: the driver's working folder, which the node may have too."""

    host: str
    port: int
    secret: bytes = field(repr=False)
    folder: str


class NodeAgent:
    """Serves one driver until it closes the connection."""

    def __init__(self) -> None:
        self._writer: asyncio.StreamWriter | None = None
        self._asked_to_stop = False

    def ask_to_stop(self) -> bool:
        """Ask the driver to end the run. Returns False if there is no driver, or if it was asked already."""
        if self._writer is None or self._writer.is_closing() or self._asked_to_stop:
            return False
        self._asked_to_stop = True
        send(self._writer, Frame("stop"))
        return True

    async def serve(self, driver: DriverAddress, key: int, name: str | None = None) -> None:
        """Connect to the driver as the expected connection `key`, and serve it. Raises OSError if it cannot be
        reached. `name`: of this node; None: Ray's id of it."""
        with contextlib.suppress(OSError):
            os.chdir(driver.folder)
        self._driver = driver
        self._memory: dict[str, SharedMemory] = {}  # by the path of the driver's memory
        self._workers: set[int] = set()
        self._read = 0  # of what the workers have printed
        with LocalSupply() as self._supply:
            connection = await asyncio.to_thread(connect, driver.host, driver.port, driver.secret, key)
            notice_broken(connection, SILENT_S)
            reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 20)
            self._writer = writer
            send(writer, Frame("hello", {**versions(), "node": ray_node() if name is None else name}))
            reporting = asyncio.create_task(self._report(writer))
            tasks = {reporting}
            try:
                while (frame := await receive(reader)) is not None:
                    task = asyncio.create_task(self._answer(frame, writer))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            finally:
                for task in tasks:
                    task.cancel()
                writer.close()
                for memory in self._memory.values():
                    memory.close()

    async def _answer(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        handlers: dict[str, Callable[[Frame], Any]] = {
            "fork": self._fork,
            "end": self._end,
            "weights": self._weights,
            "kill": self._kill,
            "forget": self._forget,
        }
        number = frame.fields.get("id")
        try:
            fields = await handlers[frame.kind](frame)
        except PvgError as error:
            fields = {"error": [error.message, error.remedy]}
        except Exception as error:  # noqa: BLE001 - the driver raises it
            fields = {"error": [f"{type(error).__name__}: {error}", ""]}
        if number is not None:
            send(writer, Frame("answer", {**fields, "id": number}))

    async def _fork(self, frame: Frame) -> dict[str, Any]:
        driver = self._driver
        with await asyncio.to_thread(connect, driver.host, driver.port, driver.secret, frame.fields["key"]) as ours:
            pid = await self._supply.fork(ours)
        self._workers.add(pid)
        return {"pid": pid}

    async def _end(self, frame: Frame) -> dict[str, Any]:
        pid = frame.fields["pid"]
        self._workers.discard(pid)
        return {"why": await self._supply.end_of(pid)}

    async def _kill(self, frame: Frame) -> dict[str, Any]:
        if frame.fields["pid"] in self._workers:
            kill(frame.fields["pid"])
        return {}

    async def _weights(self, frame: Frame) -> dict[str, Any]:
        """Copy weights into this node's memory. The driver sends them only while no worker reads that memory."""
        path, data = frame.fields["path"], frame.arrays["bytes"]
        memory = self._memory.get(path)
        if memory is None:
            memory = self._memory[path] = SharedMemory(data.nbytes)
        memory.view[:] = data.data
        return {"path": memory.path}

    async def _forget(self, frame: Frame) -> dict[str, Any]:
        if memory := self._memory.pop(frame.fields["path"], None):
            memory.close()
        return {}

    async def _report(self, writer: asyncio.StreamWriter) -> None:
        """Tell the driver that this node is alive, what its workers compute, and what they have printed."""
        while True:
            used = {str(pid): cpu_s(pid) for pid in self._workers}
            text, self._read = self._supply.printed(self._read)
            send(writer, Frame("alive", {"cpu_s": used, "printed": text}))
            await asyncio.sleep(REPORT_S)


def versions() -> dict[str, str]:
    """What must agree on all nodes for the same bits, and Ray's authentication."""
    return {
        "pvg": pvg.__version__,
        "torch": metadata.version("torch"),
        "processor": processor(),
        "auth": os.environ.get("RAY_AUTH_MODE", ""),
    }


def ray_node() -> str:
    """Ray's id of this node."""
    import ray

    return str(ray.get_runtime_context().get_node_id())
