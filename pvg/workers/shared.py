"""Tensors in memory that the driver shares with its workers, or in the frames between them.

shared = SharedTensors(parameters)          # the driver; the layout is that of these tensors
shared.write(parameters)
tensors_at(shared.place)["weight"]          # a worker: a view of the shared memory; copy it before the next `write`

layout, data = packed_tensors(parameters)   # for a process on another machine: `data` is an array
tensors_at({"memory": data, "layout": layout})["weight"]
"""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
import warnings
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 64  # bytes; a cache line

Layout = list[list[Any]]  # for each tensor: its name, dtype, shape, and offset in bytes


class SharedTensors:
    """Owns memory for tensors of fixed names, shapes and dtypes. One writer; `close` frees it. `place`: where a worker
    finds the memory and what is in it, as JSON data.

    On Linux the memory has no name in any folder: other processes open it through the owner's file descriptors, and
    nothing is left when all processes are gone, however they ended. Elsewhere it is a temporary file.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        layout, size = _layout_of(tensors)
        self._file: IO[Any]
        if hasattr(os, "memfd_create"):
            self._file = os.fdopen(os.memfd_create("pvg-weights"), "rb")
            path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        else:
            self._file = tempfile.NamedTemporaryFile(prefix="pvg-weights-")  # noqa: SIM115 - `close` closes it
            path = self._file.name
        self.place: dict[str, Any] = {"path": path, "size": size, "layout": layout}
        self._views = tensors_at(self.place)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors in. No worker may read meanwhile."""
        with torch.no_grad():
            for name, view in self._views.items():
                view.copy_(tensors[name])

    def close(self) -> None:
        """Give the memory back. A second call does nothing."""
        self._views.clear()  # the mapping ends with its last view
        self._file.close()


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
        while self._both:
            self._both.pop().close()


def packed_tensors(tensors: Mapping[str, Tensor]) -> tuple[Layout, NDArray[np.uint8]]:
    """A copy of the tensors as JSON data and bytes. They may lie on a GPU, and may have any dtype of torch."""
    layout, size = _layout_of(tensors)
    data = np.zeros(size, np.uint8)
    with torch.no_grad():
        for name, view in tensors_at({"memory": data, "layout": layout}).items():
            view.copy_(tensors[name])
    return layout, data


def tensors_at(place: Mapping[str, Any]) -> dict[str, Tensor]:
    """A view of the tensors in a place: that of `SharedTensors`, or the array "memory". Only their owner writes."""
    if "memory" in place:
        with warnings.catch_warnings():  # Ray's memory cannot be written to, of which torch warns
            warnings.simplefilter("ignore")
            memory = torch.from_numpy(place["memory"])
    else:
        memory = torch.from_file(place["path"], shared=True, size=place["size"], dtype=torch.uint8)
    views = {}
    for name, dtype, shape, offset in place["layout"]:
        kind = getattr(torch, dtype)
        views[name] = memory[offset : offset + kind.itemsize * math.prod(shape)].view(kind).reshape(shape)
    return views


def _layout_of(tensors: Mapping[str, Tensor]) -> tuple[Layout, int]:
    """Where each tensor lies, and the bytes of all of them; at least 1, because no memory has 0 bytes."""
    layout: Layout = []
    offset = 0
    for name, tensor in tensors.items():
        layout.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset])
        offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    return layout, max(offset, 1)
