"""Tensors in memory that the driver shares with its workers, or in the frames between them."""

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


class SharedBuffers:
    """The weights of one model (pvg.workers.pool) in two pieces of shared memory, written in turn. One is written again
    only after all workers have confirmed what is in the other one, so no worker ever reads memory that is written."""

    def __init__(self) -> None:
        self._both: list[tuple[IO[Any], dict[str, Any], dict[str, Tensor]]] = []  # file, place and views of each

    async def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        if len(self._both) < 2:
            self._both.append(_shared(tensors))
        else:
            self._both.reverse()
        _, place, views = self._both[-1]
        await asyncio.get_running_loop().run_in_executor(None, copy_tensors, tensors, views)
        return place

    def close(self) -> None:
        while self._both:
            file, _, views = self._both.pop()
            views.clear()  # the mapping ends with its last view
            file.close()


def _shared(like: Mapping[str, Tensor]) -> tuple[IO[Any], dict[str, Any], dict[str, Tensor]]:
    """Memory for such tensors. On Linux it has no name in any folder: other processes open it through the owner's file
    descriptors, and nothing is left when all are gone, however they ended. Elsewhere it is a temporary file."""
    layout, size = _layout_of(like)
    file: IO[Any]
    if hasattr(os, "memfd_create"):
        file = os.fdopen(os.memfd_create("pvg-weights"), "rb")
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        file = tempfile.NamedTemporaryFile(prefix="pvg-weights-")  # noqa: SIM115 - `close` closes it
        path = file.name
    place = {"path": path, "size": size, "layout": layout}
    return file, place, tensors_at(place)


def packed_tensors(tensors: Mapping[str, Tensor]) -> tuple[Layout, NDArray[np.uint8]]:
    """A copy of the tensors for a process on another machine, which `tensors_at` {"memory": data, "layout": layout}
    reads. They may lie on a GPU, and may have any dtype of torch."""
    layout, size = _layout_of(tensors)
    data = np.zeros(size, np.uint8)
    copy_tensors(tensors, tensors_at({"memory": data, "layout": layout}))
    return layout, data


def copy_tensors(tensors: Mapping[str, Tensor], views: Mapping[str, Tensor]) -> None:
    """Copy into each of `views` the tensor with its name."""
    with torch.no_grad():
        for name, view in views.items():
            view.copy_(tensors[name])


def tensors_at(place: Mapping[str, Any]) -> dict[str, Tensor]:
    """A view of the tensors in a place: that of `SharedBuffers`, or the array "memory"."""
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
