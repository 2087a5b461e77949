"""What runs on a node of a Ray cluster: an actor that is a worker process.

The driver calls `take` for each frame that it sends, and reads the frames of the worker from one call of `serve`. Both
are bytes, so neither side unpickles what the other one has computed. The actor ends with the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator
from typing import Any

from pvg.store.lease import this_boot, this_namespace
from pvg.workers.frames import Frame, packed, unpacked
from pvg.workers.node_agent import ray_node, versions


class WorkerActor:
    """Serves one driver. `folder`: the driver's working folder, which the node may have too."""

    def __init__(self, folder: str) -> None:
        import ray.util

        with contextlib.suppress(OSError):
            os.chdir(folder)
        gc.disable()  # otherwise it scans the objects of torch again and again while they are made
        from pvg.workers.process import WorkerProcess

        gc.enable()
        self._frames: asyncio.Queue[Frame | Exception] = asyncio.Queue()
        self._waiting: dict[int, Frame] = {}  # frames that have come before an earlier one
        self._next = 0
        self._process = WorkerProcess(self._frames.put_nowait, ray.util.get_node_ip_address())

    async def serve(self) -> AsyncIterator[bytes]:
        """The frames of the worker, without end; first "hello", which says where it runs. Raises a defect of `take`."""
        self._frames.put_nowait(Frame("hello", {**versions(), "node": ray_node(), "pid": os.getpid(), "seen": seen()}))
        while True:
            frame = await self._frames.get()
            if isinstance(frame, Exception):
                raise frame
            yield b"".join(packed(frame))

    async def take(self, number: int, data: bytes, memory: Any = None) -> None:
        """Frame `number` of the driver. Ray starts calls in any order. `memory`: Ray's, where the frame's place is."""
        try:
            frame = unpacked(data)
            if memory is not None:
                frame = Frame(frame.kind, {**frame.fields, "place": {**frame.fields["place"], "memory": memory}})
            self._waiting[number] = frame
            while (ready := self._waiting.pop(self._next, None)) is not None:
                self._next += 1
                self._process.take(ready)
        except Exception as error:  # noqa: BLE001 - the driver raises it
            self._frames.put_nowait(error)


def seen() -> list[str]:
    """Equal for two processes that can see each other."""
    return [this_boot(), this_namespace()]
