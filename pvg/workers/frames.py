"""Messages between the driver and its workers: JSON data, arrays and records, in bytes or a stream.

Nothing is unpickled: a record is one of the dataclasses in RECORDS.

On the wire: the header's length (uint32) and the body's (uint64), little-endian; the header, which is JSON; the arrays
one after the other, each aligned to ALIGNMENT bytes. The header has values by column, as what they are and their
content: a block has thousands of requests, and Python takes microseconds for each object.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

PREFIX = struct.Struct("<IQ")
ALIGNMENT = 16
# What may travel as a record, by module, which is imported at the first use: some modules import torch.
MODULES = {
    "pvg.records": ("VersionSpan", "Timing"),
    "pvg.rollout.engine": ("Sampling", "GenerationRequest", "PartialCompletion", "Completion", "EngineStats"),
    "pvg.telemetry.metrics": ("Metrics",),
    "pvg.training.batch": ("PolicyBatch",),
    "pvg.training.trainer": ("OptimizerSettings",),
    "pvg.verifier.data": ("VerifierBatch",),
}
RECORDS = {name: module for module, names in MODULES.items() for name in names}

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Frame:
    """A message: what it is, and its content: JSON data, arrays, tuples and RECORDS, in any depth."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)


def packed(frame: Frame) -> list[bytes | memoryview]:
    """The frame as the pieces to write, without copies of large arrays."""
    body = _Body()
    header = orjson.dumps([frame.kind, body.column([frame.fields])])
    return [PREFIX.pack(len(header), body.size), header, *body.pieces]


class _Body:
    """The arrays of a frame as the pieces to write."""

    def __init__(self) -> None:
        self.pieces: list[bytes | memoryview] = []
        self.size = 0

    def column(self, values: list[Any]) -> list[Any]:
        """What the values are and their content as JSON data, once their arrays are taken."""
        kinds = set(map(type, values))
        kind: Any = kinds.pop() if len(kinds) == 1 else None
        found: list[Any] = ["plain", values]
        if kind is None:
            found = ["mixed", [self.column([value]) for value in values]]
        elif kind is float and not all(map(math.isfinite, values)):
            found = ["floats", list(map(str, values))]
        elif kind is np.ndarray:
            if len(values) > 1 and {(each.dtype, each.ndim) for each in values} == {(values[0].dtype, 1)}:
                found = ["rows", self._place(np.concatenate(values)), list(map(len, values))]
            else:
                found = ["arrays", list(map(self._place, values))]
        elif kind in (list, tuple):
            found = [kind.__name__, self.column(list(chain(*values))), list(map(len, values))]
        elif is_dataclass(kind):
            if len(values) > 1 and len(set(map(id, values))) == 1:
                found = ["same", self.column(values[:1]), len(values)]
            else:
                columns = [self.column(list(map(attrgetter(each.name), values))) for each in fields(kind)]
                found = ["records", type(values[0]).__name__, columns]
        elif issubclass(kind, Mapping):
            # Each entry for itself, because the entries of a message differ in kind.
            found = ["dicts", [[[name, self.column([entry])] for name, entry in value.items()] for value in values]]
        elif issubclass(kind, np.generic):
            found = self.column([value.item() for value in values])
        return found

    def _place(self, array: Array) -> list[Any]:
        array = np.asarray(array, order="C")
        offset, padding = self.size, -array.nbytes % ALIGNMENT
        if array.nbytes:
            self.pieces += [array.reshape(-1).view(np.uint8).data, b"\0" * padding]
        self.size += array.nbytes + padding
        return [array.dtype.str, array.shape, offset]


def send(writer: asyncio.StreamWriter, frame: Frame) -> None:
    """A frame for a closed connection is lost, as one that the other side does not read."""
    if not writer.is_closing():  # uvloop would raise RuntimeError
        writer.writelines(packed(frame))


async def receive(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame; None if the other side has closed, even within a frame."""
    try:
        header_length, body_length = PREFIX.unpack(await reader.readexactly(PREFIX.size))
        header = await reader.readexactly(header_length)
        return _frame(header, bytearray(await reader.readexactly(body_length)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def unpacked(data: bytes) -> Frame:
    """The inverse of `packed`. Arrays can be written to."""
    view, start = memoryview(data), PREFIX.size + PREFIX.unpack_from(data)[0]
    return _frame(view[PREFIX.size : start], bytearray(view[start:]))


def _frame(header: bytes | memoryview, body: bytearray) -> Frame:
    kind, column = orjson.loads(header)
    return Frame(kind, _values(column, body)[0])


def _values(column: list[Any], body: bytearray) -> list[Any]:
    """The inverse of `_Body.column`."""
    found: Iterable[Any]
    match column:
        case ["plain", values]:
            found = values
        case ["mixed", columns]:
            found = [_values(each, body)[0] for each in columns]
        case ["floats", texts]:
            found = map(float, texts)
        case ["arrays", places]:
            found = [_array(place, body) for place in places]
        case ["rows", place, lengths]:
            found = _parts(_array(place, body), lengths)
        case ["same", entry, count]:
            found = _values(entry, body) * count
        case ["records", name, columns]:
            kind = getattr(importlib.import_module(RECORDS[name]), name)
            found = map(kind, *(_values(each, body) for each in columns))
        case ["dicts", contents]:
            found = [{name: _values(entry, body)[0] for name, entry in content} for content in contents]
        case [sequence, entries, lengths]:
            found = map({"list": list, "tuple": tuple}[sequence], _parts(_values(entries, body), lengths))
    return list(found)


def _array(place: list[Any], body: bytearray) -> Array:
    dtype, shape, offset = place
    view = np.frombuffer(body, np.dtype(dtype), count=math.prod(shape), offset=offset).reshape(shape)
    # A view of a small part would keep the whole message in memory.
    return view.copy() if view.nbytes < len(body) // 2 else view


def _parts(whole: Any, lengths: Iterable[int]) -> list[Any]:
    return [whole[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
