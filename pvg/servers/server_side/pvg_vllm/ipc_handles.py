"""Handles of GPU memory as plain JSON, so that they can travel over HTTP without pickles.

Experimental: no GPU has run this. torch describes a tensor's location for another process by the arguments of
`rebuild_cuda_tensor`: numbers, flags, four short byte strings, a dtype, and two constant classes. This module converts
them to a table and back. Decoding runs no code, whatever the table contains. The trainer encodes, the server decodes.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import torch

# The arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor, in order, with their types.
ARGUMENTS = (
    ("tensor_cls", "class"),
    ("tensor_size", "numbers"),
    ("tensor_stride", "numbers"),
    ("tensor_offset", "number"),
    ("storage_cls", "class"),
    ("dtype", "dtype"),
    ("storage_device", "number"),
    ("storage_handle", "bytes"),
    ("storage_size_bytes", "number"),
    ("storage_offset_bytes", "number"),
    ("requires_grad", "flag"),
    ("ref_counter_handle", "bytes"),
    ("ref_counter_offset", "number"),
    ("event_handle", "bytes"),
    ("event_sync_required", "flag"),
)
CLASSES = {"tensor_cls": torch.Tensor, "storage_cls": torch.storage.TypedStorage}
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8)
}


def encode_handle(arguments: Sequence[Any]) -> dict[str, Any]:
    """The result of `reduce_tensor` for a CUDA tensor as JSON. Raises ValueError for other arguments."""
    if len(arguments) != len(ARGUMENTS):
        raise ValueError(f"{len(arguments)} arguments, but a handle has {len(ARGUMENTS)}: torch has changed.")
    found: dict[str, Any] = {}
    for (name, kind), value in zip(ARGUMENTS, arguments, strict=True):
        if kind == "class":
            if value is not CLASSES[name]:
                raise ValueError(f"{name} is {value!r}, but must be {CLASSES[name]!r}.")
        elif kind == "dtype":
            found[name] = _name_of(value)
        elif kind == "bytes":
            found[name] = None if value is None else base64.b64encode(value).decode("ascii")
        elif kind == "numbers":
            found[name] = [int(number) for number in value]
        elif kind == "flag":
            found[name] = bool(value)
        else:
            found[name] = int(value)
    return found


def decode_handle(table: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of `rebuild_cuda_tensor`. Raises ValueError for a table that encode_handle did not create."""
    wanted = {name for name, kind in ARGUMENTS if kind != "class"}
    if not isinstance(table, Mapping) or table.keys() != wanted:
        raise ValueError("This is not a handle of GPU memory.")
    return tuple(CLASSES[name] if kind == "class" else _read(name, kind, table[name]) for name, kind in ARGUMENTS)


def _read(name: str, kind: str, value: Any) -> Any:
    if kind == "flag" and isinstance(value, bool):
        return value
    if kind == "number" and _is_number(value):
        return value
    if kind == "numbers" and isinstance(value, list) and all(map(_is_number, value)):
        return torch.Size(value) if name == "tensor_size" else tuple(value)
    if kind == "dtype" and isinstance(value, str) and value in DTYPES:
        return DTYPES[value]
    if kind == "bytes" and value is None:
        return None
    if kind == "bytes" and isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except binascii.Error as error:
            raise ValueError(f"{name} of a handle is not base64: {error}") from None
    raise ValueError(f"{name} of a handle cannot be {value!r:.80}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _name_of(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"Tensors of {dtype} cannot be sent as handles.")
    return name
