"""Tensors in memory that the driver shares with its workers.

    shared = SharedTensors(parameters)          # the driver; the layout is that of these tensors
    shared.write(parameters)
    mapped = MappedTensors(shared.place)        # a worker
    mapped.tensors["weight"]                    # a view of the shared memory: copy it before the next `write`

On Linux the memory has no name in any folder: workers open it through the driver's file descriptors, and nothing is
left when all processes are gone, however they ended. Elsewhere it is a temporary file.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; a cache line


class SharedTensors:
    """Owns the memory for tensors of fixed names, shapes and dtypes. One writer; `close` frees it."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._layout: list[list[Any]] = []
        offset = 0
        for name, tensor in tensors.items():
            self._layout.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset])
            offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT
        self._size = max(offset, 1)
        self._file: int | None = None
        self._path = ""
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("pvg-weights")
            self._path = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            self._file, self._path = tempfile.mkstemp(prefix="pvg-weights-")
        os.ftruncate(self._file, self._size)
        self._memory = mmap.mmap(self._file, self._size)
        self._views = _views(self._memory, self._layout)

    @property
    def place(self) -> dict[str, Any]:
        """Where a worker finds the memory and what is in it, as JSON data."""
        return {"path": self._path, "size": self._size, "layout": self._layout}

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors in. No worker may read meanwhile."""
        with torch.no_grad():
            for name, view in self._views.items():
                view.copy_(tensors[name])

    def close(self) -> None:
        """Give the memory back. A second call does nothing."""
        if self._file is None:
            return
        self._views.clear()
        os.close(self._file)
        if not self._path.startswith("/proc/"):
            os.unlink(self._path)
        self._file = None  # the mapping ends with its last view


class MappedTensors:
    """A worker's view of `SharedTensors`."""

    def __init__(self, place: Mapping[str, Any]) -> None:
        file = os.open(place["path"], os.O_RDWR)
        try:
            self._memory = mmap.mmap(file, place["size"])
        finally:
            os.close(file)
        self.tensors: dict[str, Tensor] = _views(self._memory, place["layout"])


def _views(memory: mmap.mmap, layout: list[list[Any]]) -> dict[str, Tensor]:
    views = {}
    for name, dtype, shape, offset in layout:
        kind, count = getattr(torch, dtype), int(np.prod(shape))
        flat = torch.frombuffer(memory, dtype=kind, count=count, offset=offset) if count else torch.empty(0, dtype=kind)
        views[name] = flat.reshape(shape)
    return views
