"""Tensors in memory that the driver shares with its workers.

shared = SharedTensors(parameters)          # the driver; the layout is that of these tensors
shared.write(parameters)
mapped = MappedTensors(shared.place)        # a worker
mapped.tensors["weight"]                    # a view of the shared memory: copy it before the next `write`
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pvg.workers.memory import SharedMemory

ALIGNMENT = 64  # bytes; a cache line


class SharedTensors:
    """Owns the memory for tensors of fixed names, shapes and dtypes. One writer; `close` frees it."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._layout: list[list[Any]] = []
        offset = 0
        for name, tensor in tensors.items():
            self._layout.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset])
            offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT
        self.memory = SharedMemory(max(offset, 1))
        self._views = _views(self.memory.view, self._layout)

    @property
    def place(self) -> dict[str, Any]:
        """Where a worker finds the memory and what is in it, as JSON data."""
        return {"path": self.memory.path, "size": self.memory.size, "layout": self._layout}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Views of the memory. They keep it after `close`."""
        return self._views

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors in. No worker may read meanwhile."""
        with torch.no_grad():
            for name, view in self._views.items():
                view.copy_(tensors[name])

    def close(self) -> None:
        """Give the memory back. A second call does nothing."""
        self._views.clear()
        self.memory.close()


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
