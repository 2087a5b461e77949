"""Tensors in memory that the driver shares with its workers, or in the frames between them.

shared = SharedTensors(parameters)          # the driver; the layout is that of these tensors
shared.write(parameters)
mapped = MappedTensors(shared.place)        # a worker
mapped.tensors["weight"]                    # a view of the shared memory: copy it before the next `write`

layout, data = packed_tensors(parameters)   # for a process on another machine: `data` is an array
MappedTensors({"memory": data, "layout": layout}).tensors["weight"]
"""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 64  # bytes; a cache line

Layout = list[list[Any]]  # for each tensor: its name, dtype, shape, and offset in bytes
Bytes = NDArray[np.uint8]


class SharedMemory:
    """`size` bytes, which other processes map at `path`. `close` frees them.

    On Linux the memory has no name in any folder: other processes open it through the owner's file descriptors, and
    nothing is left when all processes are gone, however they ended. Elsewhere it is a temporary file.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._file: int | None = None
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("pvg-weights")
            self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            self._file, self.path = tempfile.mkstemp(prefix="pvg-weights-")
        os.ftruncate(self._file, size)
        self.view = mmap.mmap(self._file, size)

    def close(self) -> None:
        """Give the memory back. A second call does nothing."""
        if self._file is None:
            return
        os.close(self._file)
        if not self.path.startswith("/proc/"):
            os.unlink(self.path)
        self._file = None  # the mapping ends with its last view


class SharedTensors:
    """Owns the memory for tensors of fixed names, shapes and dtypes. One writer; `close` frees it."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._layout, size = _layout_of(tensors)
        self.memory = SharedMemory(size)
        self._views = _views(self.memory.view, self._layout)

    @property
    def place(self) -> dict[str, Any]:
        """Where a worker finds the memory and what is in it, as JSON data."""
        return {"path": self.memory.path, "size": self.memory.size, "layout": self._layout}

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors in. No worker may read meanwhile."""
        with torch.no_grad():
            for name, view in self._views.items():
                view.copy_(tensors[name])

    def close(self) -> None:
        """Give the memory back. A second call does nothing."""
        self._views.clear()
        self.memory.close()


class SharedBuffers:
    """Two pieces of shared memory, written in turn. One is written again only after all workers have confirmed what is
    in the other one, so no worker ever reads memory that is being written."""

    def __init__(self) -> None:
        self._both: list[SharedTensors] = []

    async def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Returns the place of the memory that now holds `tensors`."""
        if len(self._both) < 2:
            self._both.append(SharedTensors(tensors))
        else:
            self._both.reverse()
        await asyncio.get_running_loop().run_in_executor(None, self._both[-1].write, tensors)
        return self._both[-1].place

    def close(self) -> None:
        for shared in self._both:
            shared.close()


class MappedTensors:
    """A worker's view of the tensors in a place: `SharedTensors`, or the array "memory". Do not write to them."""

    def __init__(self, place: Mapping[str, Any]) -> None:
        if "memory" in place:
            self._memory: mmap.mmap | Bytes = place["memory"]
        else:
            file = os.open(place["path"], os.O_RDWR)
            try:
                self._memory = mmap.mmap(file, place["size"])
            finally:
                os.close(file)
        with warnings.catch_warnings():  # Ray's memory cannot be written to, of which torch warns
            warnings.simplefilter("ignore")
            self.tensors: dict[str, Tensor] = _views(self._memory, place["layout"])


def packed_tensors(tensors: Mapping[str, Tensor]) -> tuple[Layout, Bytes]:
    """A copy of the tensors as JSON data and bytes. They may lie on a GPU, and may have any dtype of torch."""
    layout, size = _layout_of(tensors)
    data = np.zeros(size, np.uint8)
    with torch.no_grad():
        for name, view in _views(data, layout).items():
            view.copy_(tensors[name])
    return layout, data


def _layout_of(tensors: Mapping[str, Tensor]) -> tuple[Layout, int]:
    """Where each tensor lies, and the bytes of all of them; at least 1, because no memory has 0 bytes."""
    layout: Layout = []
    offset = 0
    for name, tensor in tensors.items():
        layout.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset])
        offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    return layout, max(offset, 1)


def _views(memory: mmap.mmap | Bytes, layout: Layout) -> dict[str, Tensor]:
    views = {}
    for name, dtype, shape, offset in layout:
        kind, count = getattr(torch, dtype), int(np.prod(shape))
        flat = torch.frombuffer(memory, dtype=kind, count=count, offset=offset) if count else torch.empty(0, dtype=kind)
        views[name] = flat.reshape(shape)
    return views
