"""Tensors into a safetensors file, one at a time: at no moment is there a second copy of the model in memory.

    size = write_tensors(folder / "model.safetensors", model.state_dict(), torch.bfloat16)

A tensor on a GPU is cast there and copied once; one on the CPU that has the right dtype already is written as it lies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from pvg.errors import ConfigurationError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# The format's names of torch's dtypes.
FORMAT_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called `name`, with or without "torch.". Raises ConfigurationError for one no weights can have."""
    import torch

    short = name.removeprefix("torch.")
    dtype: torch.dtype | None = getattr(torch, short, None) if short in FORMAT_NAMES else None
    if dtype is None or not dtype.is_floating_point:
        raise ConfigurationError(f"The servers' dtype is {name!r}, in which no weights can be published.")
    return dtype


def untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the further names of tensors that are one and the same memory: a tied weight keeps its first name."""
    seen: set[Any] = set()
    kept = {}
    for name, tensor in tensors.items():
        memory = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        )
        if tensor.numel() and memory in seen:
            continue
        seen.add(memory)
        kept[name] = tensor
    return kept


def wire_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """What `tensor` is published as: `dtype`, where it holds floating-point numbers; else as it is."""
    return dtype if tensor.is_floating_point() else tensor.dtype


def write_tensors(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """Create `path` with `tensors`, floating-point ones cast to `dtype`, tied ones once; fsync; return its bytes.

    Raises the OSError of a write that fails, and leaves what was written: for files inside a temporary folder.
    """
    # Wide dtypes first, so that every tensor is aligned without gaps, which the format forbids.
    chosen = sorted(untied(tensors).items(), key=lambda item: (-wire_dtype(item[1], dtype).itemsize, item[0]))
    with open(path, "xb", buffering=0) as file:
        _write(file.fileno(), _header(chosen, dtype))
        for _, tensor in chosen:
            _write(file.fileno(), _content(tensor, dtype))
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def _header(chosen: list[tuple[str, Tensor]], dtype: torch.dtype) -> bytes:
    """The length of the description in 8 bytes, then the description in JSON, filled up to a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in chosen:
        kind = wire_dtype(tensor, dtype)
        begin, end = end, end + tensor.numel() * kind.itemsize
        entries[name] = {
            "dtype": FORMAT_NAMES[str(kind).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = orjson.dumps(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _content(tensor: Tensor, dtype: torch.dtype) -> memoryview:
    import torch

    dense = tensor.detach().to(wire_dtype(tensor, dtype)).cpu().contiguous().reshape(-1)
    return dense.view(torch.uint8).numpy().data if dense.numel() else memoryview(b"")


def _write(descriptor: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
