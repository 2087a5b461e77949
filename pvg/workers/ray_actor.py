"""What runs on a node of a Ray cluster: an actor that is a worker process.

The driver calls `take` for each frame that it sends, and reads the frames of the worker from one call of `serve`. Both
are bytes, so neither side unpickles what the other one has computed. The actor ends with the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from pvg.store.lease import this_boot, this_namespace
from pvg.workers.frames import Frame, packed, unpacked
from pvg.workers.ray_cluster import hello

if TYPE_CHECKING:
    from pvg.workers.process import WorkerProcess


class WorkerActor:
    """Serves one driver. `folder`: the driver's working folder, which the node may have too."""

    def __init__(self, folder: str) -> None:
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self._frames: asyncio.Queue[Frame | Exception] = asyncio.Queue()
        self._waiting: dict[int, Frame] = {}  # frames that have come before an earlier one
        self._next = 0
        self._process: WorkerProcess | None = None

    async def serve(self) -> AsyncIterator[bytes]:
        """The frames of the worker, without end; first "hello", which says where it runs. Raises what `take` raises."""
        yield _bytes(Frame("hello", {**hello(), "seen": seen()}))
        opening = asyncio.create_task(self._open())
        while True:
            frame = await self._frames.get()
            if isinstance(frame, Exception):
                opening.cancel()
                raise frame
            yield _bytes(frame)

    async def _open(self) -> None:
        """Import torch, which takes seconds, and begin to work."""
        gc.disable()  # otherwise it scans the objects of torch again and again while they are made
        try:
            module = await asyncio.to_thread(importlib.import_module, "pvg.workers.process")
            self._process = module.WorkerProcess(self._frames.put_nowait)
            self._take(self._process)
        except Exception as error:  # noqa: BLE001 - `serve` raises it
            self._frames.put_nowait(error)
        gc.enable()

    async def take(self, number: int, data: bytes, memory: Any = None) -> None:
        """Frame `number` of the driver. Ray starts calls in any order. `memory`: Ray's, where the frame's place is."""
        frame = unpacked(data)
        if memory is not None:
            frame = Frame(frame.kind, {**frame.fields, "place": {**frame.fields["place"], "memory": memory}})
        self._waiting[number] = frame
        if self._process is None:
            self._frames.put_nowait(Frame("pong"))
        else:
            self._take(self._process)

    def _take(self, process: WorkerProcess) -> None:
        try:
            while (ready := self._waiting.pop(self._next, None)) is not None:
                self._next += 1
                process.take(ready)
        except Exception as error:  # noqa: BLE001 - `serve` raises it
            self._frames.put_nowait(error)


def _bytes(frame: Frame) -> bytes:
    return b"".join(packed(frame))


def seen() -> list[str]:
    """Equal for two processes that can see each other."""
    return [this_boot(), this_namespace()]
