"""Messages between the driver and its workers: a JSON header and arrays, in bytes or a stream. Nothing is unpickled.

    send(writer, Frame("score", {"id": 3}, {"lengths": lengths_N}))
    frame = await receive(reader)               # None: the other side has closed
    frame = unpacked(b"".join(packed(frame)))   # as bytes

On the wire: the header's length (uint32) and the body's (uint64), little-endian; the header; the arrays one after the
other, each aligned to ALIGNMENT bytes.

Numbers in `fields` must be finite, because JSON has no NaN. What may be NaN travels in an array.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

PREFIX = struct.Struct("<IQ")
ALIGNMENT = 16
# Larger messages are a defect: the limits keep a damaged length from taking all memory.
MOST_HEADER = 1 << 30
MOST_BODY = 1 << 40

Array = NDArray[Any]
Arrays = Mapping[str, Array]
RecordT = TypeVar("RecordT")


@dataclass(frozen=True, slots=True)
class Frame:
    """A message: what it is, its JSON data, and its arrays by name."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)


def packed(frame: Frame) -> list[bytes | memoryview]:
    """The frame as the pieces to write, without copies of large arrays."""
    places, pieces, offset = [], list[bytes | memoryview](), 0
    for name, given in frame.arrays.items():
        array = np.ascontiguousarray(given)
        places.append([name, array.dtype.str, list(array.shape), offset])
        padding = -array.nbytes % ALIGNMENT
        if array.nbytes:
            pieces += [array.reshape(-1).view(np.uint8).data, b"\0" * padding]
        offset += array.nbytes + padding
    header = orjson.dumps({"kind": frame.kind, "fields": frame.fields, "arrays": places})
    return [PREFIX.pack(len(header), offset), header, *pieces]


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
    arrays = {
        name: np.frombuffer(body, np.dtype(dtype), count=math.prod(shape), offset=offset).reshape(shape)
        for name, dtype, shape, offset in header["arrays"]
    }
    return Frame(header["kind"], header["fields"], arrays)


# --- records of arrays ------------------------------------------------------------------------------------------------


def ragged(name: str, rows: Sequence[Array], dtype: Any) -> dict[str, Array]:
    """Arrays of different length as two arrays: all of them, one after the other, and their lengths. Axes after the
    first must agree."""
    lengths_N = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
    return {name: np.concatenate(rows) if len(rows) else np.zeros(0, dtype), f"{name}.lengths": lengths_N}


def rows_of(name: str, arrays: Arrays) -> list[Array]:
    """The inverse of `ragged`."""
    lengths_N = arrays[f"{name}.lengths"]
    return np.split(arrays[name], np.cumsum(lengths_N)[:-1]) if len(lengths_N) else []


def record_arrays(prefix: str, record: Any) -> dict[str, Array]:
    """The fields of a dataclass whose fields are arrays, lists of arrays, integers, or None."""
    arrays: dict[str, Array] = {}
    for entry in fields(record):
        value, name = getattr(record, entry.name), f"{prefix}{entry.name}"
        if isinstance(value, np.ndarray):
            arrays[name] = value
        elif isinstance(value, int):
            arrays[name] = np.array(value)
        elif value is not None:
            arrays |= ragged(name, value, np.int32)
    return arrays


def record_of(kind: type[RecordT], prefix: str, arrays: Arrays) -> RecordT:
    """The inverse of `record_arrays`."""
    values: dict[str, Any] = {}
    for entry in fields(kind):  # type: ignore[arg-type]
        name = f"{prefix}{entry.name}"
        if f"{name}.lengths" in arrays:
            values[entry.name] = rows_of(name, arrays)
        elif name in arrays:
            array = arrays[name]
            values[entry.name] = array if array.ndim else int(array)
        else:
            values[entry.name] = None
    return kind(**values)
