"""Messages between the driver and its workers: JSON data, arrays and records, in bytes or a stream.

    send(writer, Frame("score", {"slot": 3, "ids": [first, second]}))
    frame = await receive(reader)               # None: the other side has closed
    frame = unpacked(b"".join(packed(frame)))   # as bytes

Nothing is unpickled: a record is one of the dataclasses in RECORDS.

On the wire: the header's length (uint32) and the body's (uint64), little-endian; the header, which is JSON; the arrays
one after the other, each aligned to ALIGNMENT bytes. An array, a tuple and a record stand in the header as an object
with one of the keys ARRAY, TUPLE and RECORD.

Numbers outside of arrays must be finite, because JSON has no NaN.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

PREFIX = struct.Struct("<IQ")
ALIGNMENT = 16
# Larger messages are a defect: the limits keep a damaged length from taking all memory.
MOST_HEADER = 1 << 30
MOST_BODY = 1 << 40
ARRAY, TUPLE, RECORD = "$array", "$tuple", "$record"
# What may travel as a record, and its module, which is imported at the first use: some modules import torch.
RECORDS = {
    "VersionSpan": "pvg.records",
    "Timing": "pvg.records",
    "Sampling": "pvg.rollout.engine",
    "GenerationRequest": "pvg.rollout.engine",
    "PartialCompletion": "pvg.rollout.engine",
    "Completion": "pvg.rollout.engine",
    "EngineStats": "pvg.rollout.engine",
    "PolicyBatch": "pvg.training.batch",
    "VerifierBatch": "pvg.verifier.data",
}

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Frame:
    """A message: what it is, and its content: JSON data, arrays, tuples and RECORDS, in any depth."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)


def packed(frame: Frame) -> list[bytes | memoryview]:
    """The frame as the pieces to write, without copies of large arrays."""
    body = _Body()
    header = orjson.dumps({"kind": frame.kind, "fields": body.taken(frame.fields)})
    return [PREFIX.pack(len(header), body.size), header, *body.pieces]


class _Body:
    """The arrays of a frame as the pieces to write."""

    def __init__(self) -> None:
        self.pieces: list[bytes | memoryview] = []
        self.size = 0

    def taken(self, value: Any) -> Any:
        """`value` as JSON data, once its arrays are taken."""
        if isinstance(value, np.ndarray):
            return {ARRAY: self._place(np.ascontiguousarray(value))}
        if isinstance(value, Mapping):
            return {name: self.taken(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return [self.taken(entry) for entry in value]
        if isinstance(value, tuple):
            return {TUPLE: [self.taken(entry) for entry in value]}
        if is_dataclass(value):
            content = {entry.name: self.taken(getattr(value, entry.name)) for entry in fields(value)}
            return {RECORD: type(value).__name__, **content}
        return value

    def _place(self, array: Array) -> list[Any]:
        offset, padding = self.size, -array.nbytes % ALIGNMENT
        if array.nbytes:
            self.pieces += [array.reshape(-1).view(np.uint8).data, b"\0" * padding]
        self.size += array.nbytes + padding
        return [array.dtype.str, array.shape, offset]


def send(writer: asyncio.StreamWriter, frame: Frame) -> None:
    """Hand the frame to the stream, which writes it in order. A frame for a closed connection is lost, as one that the
    other side does not read: `receive` tells that it has closed."""
    if not writer.is_closing():  # uvloop would raise RuntimeError
        writer.writelines(packed(frame))


async def receive(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame, whose arrays can be written to; None if the other side has closed, even within a frame.

    Raises ValueError for bytes that are no frame.
    """
    try:
        header_length, body_length = PREFIX.unpack(await reader.readexactly(PREFIX.size))
        if header_length > MOST_HEADER or body_length > MOST_BODY:
            raise ValueError(f"a frame of {header_length} + {body_length} bytes is too large")
        header = await reader.readexactly(header_length)
        return _frame(header, bytearray(await reader.readexactly(body_length)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def unpacked(data: bytes) -> Frame:
    """The inverse of `packed`, from its pieces in one; arrays can be written to."""
    view, start = memoryview(data), PREFIX.size + PREFIX.unpack_from(data)[0]
    return _frame(view[PREFIX.size : start], bytearray(view[start:]))


def _frame(header_text: bytes | memoryview, body: bytearray) -> Frame:
    header = orjson.loads(header_text)
    return Frame(header["kind"], _given(header["fields"], body))


def _given(value: Any, body: bytearray) -> Any:
    """The inverse of `_Body.taken`."""
    if isinstance(value, list):
        return [_given(entry, body) for entry in value]
    if not isinstance(value, dict):
        return value
    if ARRAY in value:
        dtype, shape, offset = value[ARRAY]
        view = np.frombuffer(body, np.dtype(dtype), count=math.prod(shape), offset=offset).reshape(shape)
        # A view of a small part would keep the whole message in memory.
        return view.copy() if view.nbytes < len(body) // 2 else view
    content = {name: _given(entry, body) for name, entry in value.items()}
    if TUPLE in content:
        return tuple(content[TUPLE])
    if (name := content.pop(RECORD, None)) is not None:
        return getattr(importlib.import_module(RECORDS[name]), name)(**content)
    return content
