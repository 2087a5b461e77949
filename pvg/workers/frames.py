"""Messages between the driver and its workers: JSON data, arrays and records, in bytes or a stream.

    send(writer, Frame("score", {"slot": 3, "ids": [first, second]}))
    frame = await receive(reader)               # None: the other side has closed
    frame = unpacked(b"".join(packed(frame)))   # as bytes

Nothing is unpickled: a record is one of the dataclasses in RECORDS.

On the wire: the header's length (uint32) and the body's (uint64), little-endian; the header, which is JSON; the arrays
one after the other, each aligned to ALIGNMENT bytes. What JSON lacks stands in the header as an object with one key
that begins with "$". A list of equal records or tuples travels by column, and a list of arrays as one array, because a
block has thousands of requests, and Python takes microseconds for each object.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from types import NoneType
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

PREFIX = struct.Struct("<IQ")
ALIGNMENT = 16
# Larger messages are a defect: the limits keep a damaged length from taking all memory.
MOST_HEADER = 1 << 30
MOST_BODY = 1 << 40
# Single values; and lists of JSON values, of arrays with one axis, of one object, of equal records and of tuples.
ARRAY, NUMBER, TUPLE, RECORD, MAPPING = "$array", "$number", "$tuple", "$record", "$mapping"
PLAIN, ARRAYS, SAME, RECORDS_BY_FIELD, TUPLES = "$plain", "$arrays", "$same", "$records", "$tuples"
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
        taken: Any = value
        if isinstance(value, np.ndarray):
            taken = {ARRAY: self._place(np.asarray(value, order="C"))}
        elif isinstance(value, Mapping):
            content = {name: self.taken(entry) for name, entry in value.items()}
            taken = {MAPPING: list(content.items())} if _mark(content) else content
        elif isinstance(value, list):
            taken = self._list(value)
        elif isinstance(value, tuple):
            taken = {TUPLE: self._list(list(value))}
        elif is_dataclass(value):
            values = [self.taken(getattr(value, each.name)) for each in fields(value)]
            taken = {RECORD: [type(value).__name__, values]}
        elif isinstance(value, np.generic):
            taken = self.taken(value.item())
        elif isinstance(value, float) and not math.isfinite(value):
            taken = {NUMBER: str(value)}
        return taken

    def _list(self, value: list[Any]) -> Any:
        kinds = set(map(type, value))
        kind: Any = kinds.pop() if len(kinds) == 1 else object
        if kind in (int, str, bool, NoneType) or (kind is float and all(map(math.isfinite, value))):
            return {PLAIN: value}
        if kind is np.ndarray and {(each.dtype, each.ndim) for each in value} == {(value[0].dtype, 1)}:
            return {ARRAYS: [self._place(np.concatenate(value)), list(map(len, value))]}
        if is_dataclass(kind):
            if len(set(map(id, value))) == 1:
                return {SAME: [self.taken(value[0]), len(value)]}
            columns = [self._list(list(map(attrgetter(each.name), value))) for each in fields(kind)]
            return {RECORDS_BY_FIELD: [type(value[0]).__name__, columns]}
        if kind is tuple:
            return {TUPLES: [self._list(list(chain(*value))), list(map(len, value))]}
        return [self.taken(entry) for entry in value]

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
    if not (mark := _mark(value)):
        return {name: _given(entry, body) for name, entry in value.items()}
    content = found = value[mark]  # of PLAIN
    if mark == ARRAY:
        found = _array(content, body)
    elif mark == ARRAYS:
        found = _parts(_array(content[0], body), content[1])
    elif mark == NUMBER:
        found = float(content)
    elif mark == MAPPING:
        found = {name: _given(entry, body) for name, entry in content}
    elif mark == TUPLE:
        found = tuple(_given(content, body))
    elif mark == SAME:
        found = [_given(content[0], body)] * content[1]
    elif mark == TUPLES:
        found = list(map(tuple, _parts(_given(content[0], body), content[1])))
    elif mark in (RECORD, RECORDS_BY_FIELD):
        kind = getattr(importlib.import_module(RECORDS[content[0]]), content[0])
        values = _given(content[1], body)
        found = kind(*values) if mark == RECORD else list(map(kind, *values))
    return found


def _mark(value: Mapping[str, Any]) -> str:
    """The key of an object that stands for what JSON lacks; "": it is a mapping."""
    first = next(iter(value), "")
    return first if first.startswith("$") else ""


def _array(place: list[Any], body: bytearray) -> Array:
    dtype, shape, offset = place
    view = np.frombuffer(body, np.dtype(dtype), count=math.prod(shape), offset=offset).reshape(shape)
    # A view of a small part would keep the whole message in memory.
    return view.copy() if view.nbytes < len(body) // 2 else view


def _parts(whole: Any, lengths: list[int]) -> list[Any]:
    return [whole[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
